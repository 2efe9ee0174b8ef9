"""How the server is reached and what it lets in. Checked here; flags, environment and file all end up in this."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of the server, beside those of the engine."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    page: bool = True
    ping_seconds: float = 15.0

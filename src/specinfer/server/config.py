"""The settings of the server: how it is reached and what it accepts, from flags, environment and config file."""

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TextIO

from specinfer.core.errors import check_float, check_int
from specinfer.core.lora import LoRARequest
from specinfer.server.keys import KeySettings, check_key, named

LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of the server, in addition to those of the engine.

    Attributes:
        uds: The path of a Unix socket to listen on, instead of host and port.
        root_path: The prefix that a proxy in front of the server strips from paths.
        api_keys: Any of these keys gives access; without keys, everyone who reaches the server may use it.
        key_settings: Names, roles and limits of single keys; a key that is not named here has the default ones.
        insecure: Whether other machines may be served without a key.
        allowed_origins: Web pages that may call from a browser, such as "https://chat.example.org"; "*" allows all.
        allowed_hosts: Names of this server that requests may have in their Host header. If there are none, loopback
            names and IP addresses are allowed, or any name with keys.
        max_connections: Requests that are served at once; further requests are refused.
        max_connections_per_address: Connections that one address may have open, or None for half of those that may be
            open at all. The IPv6 addresses of one network of 64 bits count as one.
        max_tree_nodes: Tree nodes per step that a request may ask for: the whole batch pays for them. None for 64, or
            256 if the target is streamed.
        body_timeout: Seconds for a request's head to arrive, and the same again for its body. A client that reads
            nothing of its response for this long is disconnected.
        keep_alive_timeout: Seconds until a connection without requests is closed.
        shutdown_timeout: Seconds that running requests get to finish when the server shuts down.
        ping_seconds: Seconds without output before a stream sends a comment; 0 for no comments.
        stream_interval: Tokens that a stream gathers before it sends them, unless the request sets its own.
        chat_template: The operator's chat template as text, or None for the model's.
        lora_modules: Adapters that are served from the start, by name.
        allow_runtime_lora_updating: Whether keys with the role admin may load and unload adapters.
        page: Whether / shows the web page.
        docs: Whether /openapi.json is served.
        metrics: Whether /metrics is served.
        metrics_prefix: The prefix of the metrics' names, "specinfer" or "vllm".
        metrics_public: Whether /metrics needs no key.
        log_stats_interval: Seconds between log lines of statistics; 0 for none.
        access_log: Whether requests are logged.
        trace: The path of a file for the token trees of all requests.
        otlp_endpoint: The URL that OpenTelemetry spans are sent to, such as "http://localhost:4318/v1/traces".

    Raises:
        ValueError: A field is out of range, or two fields conflict; the message says what to change.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    root_path: str = ""
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    api_keys: tuple[str, ...] = ()
    key_settings: Mapping[str, KeySettings] = field(default_factory=dict)
    insecure: bool = False
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    max_body_bytes: int = 4 * 2**20
    max_header_bytes: int = 16 * 2**10
    max_headers: int = 100
    max_connections: int = 1024
    max_connections_per_address: int | None = None
    max_tree_nodes: int | None = None
    body_timeout: float = 30.0
    keep_alive_timeout: float = 10.0
    shutdown_timeout: float = 20.0
    ping_seconds: float = 15.0
    stream_interval: int = 1
    chat_template: str | None = None
    lora_modules: Mapping[str, LoRARequest] = field(default_factory=dict)
    allow_runtime_lora_updating: bool = False
    page: bool = True
    docs: bool = True
    metrics: bool = True
    metrics_prefix: str = "specinfer"
    metrics_public: bool = False
    log_level: str = "info"
    log_stats_interval: float = 10.0
    access_log: bool = True
    trace: str | None = None
    otlp_endpoint: str | None = None

    def __post_init__(self) -> None:
        check_int("port", self.port, 0, 65535)
        for name in (
            "max_body_bytes",
            "max_header_bytes",
            "max_headers",
            "max_connections",
            "stream_interval",
        ):
            check_int(name, getattr(self, name), 1)
        for name in ("max_tree_nodes", "max_connections_per_address"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1)
        for name in ("body_timeout", "keep_alive_timeout"):
            check_float(name, getattr(self, name), 0.0, 86400.0, low_open=True)
        for name in ("shutdown_timeout", "ping_seconds", "log_stats_interval"):
            check_float(name, getattr(self, name), 0.0, 86400.0)
        if self.metrics_prefix not in ("specinfer", "vllm"):
            raise ValueError(f"metrics_prefix must be specinfer or vllm, not {self.metrics_prefix!r:.40}")
        if self.log_level not in LOG_LEVELS:
            raise ValueError(f"log_level must be one of {', '.join(LOG_LEVELS)}, not {self.log_level!r:.40}")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ValueError(f"root_path must begin with / and not end with one, not {self.root_path!r:.60}")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ValueError("ssl_certfile and ssl_keyfile belong together; give both or neither")
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ValueError(
                f"otlp_endpoint: {self.otlp_endpoint!r:.60} is not a URL; write it as http://localhost:4318/v1/traces"
            )
        self._check_keys()
        for origin in self.allowed_origins:
            if origin != "*" and ("://" not in origin or origin.count("/") != 2):
                raise ValueError(
                    f"allowed_origins: {origin!r:.60} is not an origin; write it as https://chat.example.org"
                )

    def _check_keys(self) -> None:
        for key in self.api_keys:
            check_key("api_key", key)
        named(self.api_keys, self.key_settings)
        if not (self.api_keys or self.insecure or self.uds or is_loopback(self.host)):
            raise ValueError(
                f"host: {self.host} lets other machines in, and there is no API key; set SPECINFER_API_KEY or give "
                "--api-key-file, listen on 127.0.0.1, or give --insecure if the network is trusted"
            )

    @property
    def tenants(self) -> dict[str, KeySettings]:
        """The settings of each key by its name, in the order of `api_keys`."""
        return named(self.api_keys, self.key_settings)


def is_loopback(host: str) -> bool:
    """Return whether a server at this name or address can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost" or host.lower().endswith(".localhost")


def check_writable(path: str) -> None:
    """Check that a trace file can be written, before a model is loaded for minutes; its content stays.

    Raises:
        ValueError: The file cannot be written.
    """
    open_private(path, "a").close()


def open_private(path: str, mode: Literal["a", "w"]) -> TextIO:
    try:
        # The file holds users' prompts: only the owner may read it.
        return open(path, mode, encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600))
    except OSError as error:
        raise ValueError(f"trace: {path} cannot be written: {error.strerror}") from error

"""Client side of a server with OpenAI's interface: its address, key, event stream and refusals.

httpx is imported where a client is opened, so that commands that need none do not wait for it.
"""

import ipaddress
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import httpx

KEY_VARIABLE = "SPECINFER_API_KEY"
_CONNECT_SECONDS = 5.0
_SILENT_SECONDS = 600.0  # a server may prefill a long prompt before it sends anything
_MAX_SHOWN = 300  # characters of a response that is not in OpenAI's format


def server_url(text: str) -> str:
    """Return the base address for paths such as /v1/models; it may be given with or without /v1.

    Raises:
        ValueError: The text is not the address of a server.
    """
    try:
        parts = urlsplit(text)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:  # the port is not a number
        is_address = False
    if not is_address or parts.query or parts.fragment or parts.username:
        raise ValueError(f"url: {text!r:.100} is not the address of a server; give one such as http://127.0.0.1:8000")
    return text.rstrip("/").removesuffix("/v1").rstrip("/")


def _settings(url: str, api_key: str | None) -> dict[str, Any]:
    import httpx

    if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key.strip() == api_key):
        raise ValueError("api_key: it has characters that no header can hold; copy it anew")
    return {
        "base_url": url,
        "mounts": {f"all://{urlsplit(url).netloc}": None} if _is_loopback(url) else {},  # past proxies
        "headers": {"Authorization": f"Bearer {api_key}"} if api_key else {},
        "timeout": httpx.Timeout(_SILENT_SECONDS, connect=_CONNECT_SECONDS),
    }


def _is_loopback(url: str) -> bool:
    """Return whether an address is of this machine, which no proxy can reach."""
    host = urlsplit(url).hostname or ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return address.is_loopback or address.is_unspecified


def open_client(url: str, api_key: str | None) -> "httpx.Client":
    import httpx

    return httpx.Client(**_settings(url, api_key))


def open_async_client(url: str, api_key: str | None) -> "httpx.AsyncClient":
    """Return a client for any number of concurrent requests."""
    import httpx

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(limits=limits, **_settings(url, api_key))


def error_text(status: int, body: bytes) -> str:
    """Return the reason that a server gives for refusing a request, as text."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        value = body.decode(errors="replace").strip()
    message = value.get("error", value.get("detail", value)) if isinstance(value, dict) else value
    if isinstance(message, dict):
        message = message.get("message", message)
    words = " ".join(str(message).split())[:_MAX_SHOWN] or "without an explanation"
    return f"the server answers {status}: {words}"


class EventDecoder:
    """A decoder that splits the bytes of an event stream into the JSON objects of its events."""

    def __init__(self) -> None:
        self._rest = b""
        self.is_done = False  # the server sent the end of the stream

    def push(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Yield the objects that these bytes complete.

        Raises:
            ValueError: An event is not a JSON object.
        """
        # Split at line feeds only: text within JSON may have other characters that str.splitlines cuts at.
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue  # a comment, a name, or the blank line that ends an event
            content = line[5:].strip()
            if content == b"[DONE]":
                self.is_done = True
            else:
                yield _object(content)


def _object(content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the server sent something that is not JSON: {content[:60]!r}") from error
    if not isinstance(value, dict):
        raise ValueError(f"the server sent an event that is not an object: {content[:60]!r}")
    return value

"""The frames of streams and the error objects of each API: OpenAI's, Anthropic's and Ollama's."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from specinfer.server.errors import ApiError

Event = Mapping[str, Any]


_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def to_json(value: object) -> bytes:
    """Return JSON in ASCII: some readers of events split lines at Unicode line separators too."""
    return _ENCODER.encode(value).encode()


@dataclass(frozen=True, slots=True)
class Dialect:
    """The frames of one API's streams, and its error objects.

    Attributes:
        line: Formats an event.
        error: Returns the body of a response that reports an error; in a stream it is an event.
        is_end: Returns whether these bytes of a stream are its last ones.
        ping: Sent when nothing has come for a while.
        done: Sent after the last event.
    """

    media_type: str
    line: Callable[[Event], bytes]
    error: Callable[[ApiError], dict[str, Any]]
    is_end: Callable[[bytes], bool]
    ping: bytes = b""
    done: bytes = b""


def _server_sent(event: Event) -> bytes:
    """Format a server-sent event; one with a "type", as in responses, gets an event name."""
    kind = event.get("type")
    name = b"" if kind is None else b"event: " + str(kind).encode() + b"\n"
    return name + b"data: " + to_json(event) + b"\n\n"


_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def _anthropic_error(error: ApiError) -> dict[str, Any]:
    kind = _ANTHROPIC_KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.plain_message, "code": error.code}}


def _ollama_error(error: ApiError) -> dict[str, Any]:
    return {"error": error.plain_message, "code": error.code}


_DONE = b"data: [DONE]\n\n"
OPENAI = Dialect(
    "text/event-stream", _server_sent, ApiError.body, lambda data: data.endswith(_DONE), b": ping\n\n", _DONE
)
ANTHROPIC = Dialect(
    "text/event-stream",
    _server_sent,
    _anthropic_error,
    lambda data: data.endswith(b'{"type":"message_stop"}\n\n'),
    _server_sent({"type": "ping"}),
)
OLLAMA = Dialect(
    "application/x-ndjson",
    lambda event: to_json(event) + b"\n",
    _ollama_error,
    lambda data: b'"done":true' in data.rstrip(b"\n").rpartition(b"\n")[2],
)


def dialect_of(path: str) -> Dialect:
    """Return the dialect of the API that a path belongs to."""
    if path.startswith("/api/"):
        return OLLAMA
    return ANTHROPIC if path == "/v1/messages" or path.startswith("/v1/messages/") else OPENAI


def code_of(body: bytes) -> str | None:
    """Return the code of an error in any dialect, or None if the body is none."""
    try:
        found = json.loads(body)
        return str(found["code"] if "code" in found else found["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return None

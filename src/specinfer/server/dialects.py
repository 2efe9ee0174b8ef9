"""The dialects of the APIs: the frames of their streams, their errors, and the names of their fields in messages.

Events are plain dicts: a stream may have thousands a second, and they need no validation.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from specinfer.core.errors import ContextLengthError, RequestError, reworded
from specinfer.server.errors import ApiError

Event = Mapping[str, Any]


_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def to_json(value: object) -> bytes:
    """Return JSON in ASCII: some readers of events split lines at Unicode line separators too."""
    return _ENCODER.encode(value).encode()


@dataclass(frozen=True, slots=True)
class Dialect:
    """The frames of one API's streams, its error objects, and the names of its fields.

    Attributes:
        line: Formats an event.
        error: Returns the body of a response that reports an error; in a stream it is an event.
        is_end: Returns whether these bytes of a stream are its last ones.
        ping: Sent when nothing has come for a while.
        done: Sent after the last event.
        names: Patterns of the names that fields have in the completion endpoints, and their names in this API.
        too_long: Returns the message about a prompt that is longer than the context, if clients search it for words.
    """

    media_type: str
    line: Callable[[Event], bytes]
    error: Callable[[ApiError], dict[str, Any]]
    is_end: Callable[[bytes], bool]
    ping: bytes = b""
    done: bytes = b""
    names: Mapping[str, str] = field(default_factory=dict)
    too_long: Callable[[ContextLengthError], str] | None = None

    def renamed(self, text: str) -> str:
        """Return a text with the names that fields have in this API."""
        for pattern, name in self.names.items():
            text = re.sub(pattern, name, text)
        return text

    def named(self, error: RequestError) -> RequestError:
        """Return an error with the names of this API's fields, or in its words."""
        if isinstance(error, ContextLengthError) and self.too_long is not None:
            return reworded(error, self.too_long(error))
        return reworded(error, self.renamed(str(error))) if self.names else error


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


def _anthropic_length(error: ContextLengthError) -> str:
    return f"prompt is too long: {error.num_tokens} tokens > {min(error.max_model_len, error.num_tokens - 1)} maximum"


# Fields of the completion endpoints that are options of Ollama's under the same name.
OPTIONS = ("frequency_penalty", "min_p", "presence_penalty", "seed", "stop", "temperature", "top_k", "top_p")
_DONE = b"data: [DONE]\n\n"
OPENAI = Dialect(
    "text/event-stream", _server_sent, ApiError.body, lambda data: data.endswith(_DONE), b": ping\n\n", _DONE
)
RESPONSES = replace(
    OPENAI,
    names={
        r"\bmax_tokens\b": "max_output_tokens",
        r"\bresponse_format\b": "text.format",
        r"\breasoning_effort\b": "reasoning.effort",
    },
)
ANTHROPIC = Dialect(
    "text/event-stream",
    _server_sent,
    _anthropic_error,
    lambda data: data.endswith(b'{"type":"message_stop"}\n\n'),
    _server_sent({"type": "ping"}),
    names={
        r"^tools\[(\d+)\]\.function\.parameters": r"tools[\1].input_schema",
        r"^tools\[(\d+)\]\.function": r"tools[\1]",
        r"^tool_choice\.function": "tool_choice",
        r"^response_format": "output_config.format",
        r"^stop\b": "stop_sequences",
        r"^system\.content": "system",
    },
    too_long=_anthropic_length,
)
OLLAMA = Dialect(
    "application/x-ndjson",
    lambda event: to_json(event) + b"\n",
    _ollama_error,
    lambda data: b'"done":true' in data.rstrip(b"\n").rpartition(b"\n")[2],
    names={
        r"^max_tokens\b": "options.num_predict",
        r"^repetition_penalty\b": "options.repeat_penalty",
        r"^response_format(\.schema)?\b": "format",
        rf"^({'|'.join(OPTIONS)})\b": r"options.\1",
    },
)


def dialect_of(path: str) -> Dialect:
    """Return the dialect of the API that a path belongs to."""
    if path.startswith("/api/"):
        return OLLAMA
    known = (("/v1/messages", ANTHROPIC), ("/v1/responses", RESPONSES))
    return next((dialect for root, dialect in known if path == root or path.startswith(f"{root}/")), OPENAI)


def code_of(body: bytes) -> str | None:
    """Return the code of an error in any dialect, or None if the body is none."""
    try:
        content = json.loads(body)
        return str(content["code"] if "code" in content else content["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return None

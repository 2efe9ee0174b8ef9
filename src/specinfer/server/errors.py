"""Errors in OpenAI's format: {"error": {"message", "type", "param", "code"}}. Codes are strings."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from specinfer.core.errors import ContextLengthError, EngineDeadError, QueueFullError, QuotaError, RequestError
from specinfer.server.config import ServerConfig

_MAX_MESSAGE = 1000  # a message may quote what was sent
_CODES = {
    400: "invalid_value missing_field invalid_json invalid_request context_length_exceeded unsupported_parameter "
    "lora_disabled",
    401: "invalid_api_key",
    403: "invalid_host invalid_origin insufficient_permissions lora_updating_disabled",
    404: "not_found model_not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    415: "unsupported_media_type",
    429: "rate_limit_exceeded queue_full queue_timeout",
    431: "headers_too_large",
    499: "client_closed_request",
    500: "internal_error generation_failed",
    503: "loading shutting_down engine_unavailable too_many_connections",
    504: "timeout",
}
STATUS_OF = {code: status for status, codes in _CODES.items() for code in codes.split()}
_TYPES = {
    401: "authentication_error", 429: "rate_limit_error", "insufficient_permissions": "permission_error",
    "lora_updating_disabled": "permission_error",
}  # fmt: skip
_HEADERS: dict[str, dict[str, str]] = {
    "invalid_api_key": {"WWW-Authenticate": "Bearer"},
    # The rest of such a request is not read.
    **{key: {"connection": "close"} for key in ("request_timeout", "request_too_large", "headers_too_large")},
    **{key: {"Retry-After": "1"} for key in ("queue_full", "queue_timeout", "too_many_connections")},
    **{key: {"Retry-After": "5"} for key in ("shutting_down", "engine_unavailable")},
}
_NOT_AGAIN = {"request_timeout", "internal_error", "generation_failed", "timeout"}  # clients would retry, and fail


class ErrorBody(BaseModel):
    """The description of an error, for people and for programs."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorResponse(BaseModel):
    """The body of every response that reports an error."""

    error: ErrorBody


class ApiError(Exception):
    """An error that answers a request; its code gives the HTTP status and headers."""

    def __init__(
        self,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        status: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.param, self.code = message, param, code
        self.status = status or STATUS_OF[code]
        self.headers = _HEADERS.get(code, {}) | dict(headers or {})
        if code in _NOT_AGAIN:
            self.headers["x-should-retry"] = "false"

    @property
    def kind(self) -> str:
        """The type of the error in OpenAI's words."""
        usual = "server_error" if self.status >= 500 else "invalid_request_error"
        return _TYPES.get(self.code) or _TYPES.get(self.status, usual)

    @property
    def plain_message(self) -> str:
        """The message as it is sent: bounded, and without lone surrogates, which UTF-8 cannot encode."""
        return self.message[:_MAX_MESSAGE].encode(errors="replace").decode()

    def body(self) -> dict[str, object]:
        """Return the error in OpenAI's format."""
        error = {"message": self.plain_message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


def unsupported(name: str, remedy: str) -> ApiError:
    """Return the refusal of a field."""
    return ApiError("unsupported_parameter", f"{name}: not supported; {remedy}", param=name)


# Exceptions whose message is sent to the client; any other exception is a bug of the server.
KNOWN = (ApiError, RequestError, QueueFullError, EngineDeadError, RequestValidationError, HTTPException)


def too_much_outgoing(config: ServerConfig) -> ApiError:
    return ApiError(
        "rate_limit_exceeded",
        f"clients have not read more than {config.max_outgoing_bytes} bytes of responses (--max-outgoing-bytes); read "
        "them, or try again later",
        headers={"Retry-After": "1"},
    )


def as_api_error(error: Exception) -> ApiError:
    """Return the error that answers a request which raised this exception."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QuotaError):
        return ApiError("rate_limit_exceeded", str(error), headers={"Retry-After": str(math.ceil(error.seconds))})
    if isinstance(error, QueueFullError):
        return ApiError("queue_full", str(error))
    if isinstance(error, EngineDeadError):
        return ApiError("engine_unavailable", str(error))
    if isinstance(error, RequestValidationError):
        return _of_validation(error)
    if isinstance(error, HTTPException):
        return _of_http(error)
    if isinstance(error, (RequestError, ValueError)):
        named = re.match(r"([a-z_]+)[\s:\[.]", str(error))
        if isinstance(error, ContextLengthError):
            return ApiError("context_length_exceeded", str(error), param=error.field)
        return ApiError("invalid_value", str(error), param=named[1] if named else None)
    return ApiError("internal_error", "an internal error; the log has it under this request's id")


def _of_validation(error: RequestValidationError) -> ApiError:
    first: Mapping[str, Any] = next(iter(error.errors()), {})
    place = first.get("loc", ())
    if place == ("body",) and first.get("type") == "missing":
        return ApiError("invalid_json", "body: is empty; send a JSON object, {...}")
    field = _field_name(place[1:] if place and place[0] in ("body", "query", "path", "header") else place)
    message = str(first.get("msg", "not understood")).removeprefix("Value error, ")
    message = "is not a field of this request; leave it out" if first.get("type") == "extra_forbidden" else message
    message = message if field is None or message.startswith(field) else f"{field}: {message[:1].lower()}{message[1:]}"
    code = "missing_field" if first.get("type") == "missing" else "invalid_value"
    return ApiError(code, message, param=field)


def _field_name(place: Sequence[int | str]) -> str | None:
    """Return the name of a field: ("messages", 0, "content") is messages[0].content."""
    # Names that pydantic adds for a branch of a union are not fields.
    parts = [part for part in place if isinstance(part, int) or re.fullmatch(r"[a-z_]+", part)]
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return name.removeprefix(".") or None


def _of_http(error: HTTPException) -> ApiError:
    headers = {name.lower(): value for name, value in (error.headers or {}).items()}
    if error.status_code == 404:
        return ApiError("not_found", "there is nothing under this path; see /openapi.json", headers=headers)
    if error.status_code == 405:
        allowed = headers.get("allow", "another method")
        return ApiError("method_not_allowed", f"this path takes {allowed} only", headers=headers)
    return ApiError("invalid_value", str(error.detail), headers=headers, status=error.status_code)

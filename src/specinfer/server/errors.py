"""Errors in OpenAI's format: {"error": {"message", "type", "param", "code"}}. Codes are strings."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from specinfer.core.errors import ContextLengthError, EngineDeadError, QueueFullError, QuotaError, RequestError

_MAX_MESSAGE = 1000  # a message may quote what was sent


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
    """An error with the HTTP status and headers that answer it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str = "invalid_value",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code
        self.headers = dict(headers or {})

    @property
    def plain_message(self) -> str:
        """The message as it is sent: bounded, and without lone surrogates, which UTF-8 cannot encode."""
        return self.message[:_MAX_MESSAGE].encode(errors="replace").decode()

    def body(self) -> dict[str, object]:
        """Return the error in OpenAI's format."""
        error = {"message": self.plain_message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


def renamed(text: str, names: Mapping[str, str]) -> str:
    """Return a text with other names of fields: a replacement for each regular expression, in order."""
    for pattern, name in names.items():
        text = re.sub(pattern, name, text)
    return text


def unsupported(name: str, remedy: str) -> ApiError:
    """Return the refusal of a field."""
    return ApiError(400, f"{name}: not supported; {remedy}", param=name, code="unsupported_parameter")


# Exceptions whose message is sent to the client; any other exception is a bug of the server.
KNOWN = (ApiError, RequestError, QueueFullError, EngineDeadError, RequestValidationError, HTTPException)


def as_api_error(error: Exception) -> ApiError:
    """Return the error that answers a request which raised this exception."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QuotaError):
        headers = {"Retry-After": str(math.ceil(error.seconds))}
        return ApiError(429, str(error), kind="rate_limit_error", code="rate_limit_exceeded", headers=headers)
    if isinstance(error, QueueFullError):
        headers = {"Retry-After": "1"}
        return ApiError(429, str(error), kind="rate_limit_error", code="queue_full", headers=headers)
    if isinstance(error, EngineDeadError):
        headers = {"Retry-After": "5"}
        return ApiError(503, str(error), kind="server_error", code="engine_unavailable", headers=headers)
    if isinstance(error, RequestValidationError):
        return _of_validation(error)
    if isinstance(error, HTTPException):
        return _of_http(error)
    if isinstance(error, (RequestError, ValueError)):
        named = re.match(r"([a-z_]+)[\s:\[.]", str(error))
        if isinstance(error, ContextLengthError):
            return ApiError(400, str(error), param=error.field, code="context_length_exceeded")
        return ApiError(400, str(error), param=named[1] if named else None)
    return ApiError(
        500,
        "an internal error; the log has it under this request's id",
        kind="server_error",
        code="internal_error",
        headers={"x-should-retry": "false"},  # clients would retry a 500, and fail again
    )


def _of_validation(error: RequestValidationError) -> ApiError:
    first: Mapping[str, Any] = next(iter(error.errors()), {})
    place = first.get("loc", ())
    if place == ("body",) and first.get("type") == "missing":
        return ApiError(400, "body: is empty; send a JSON object, {...}", code="invalid_json")
    field = _field_name(place[1:] if place and place[0] in ("body", "query", "path", "header") else place)
    message = str(first.get("msg", "not understood")).removeprefix("Value error, ")
    message = "is not a field of this request; leave it out" if first.get("type") == "extra_forbidden" else message
    message = message if field is None or message.startswith(field) else f"{field}: {message[:1].lower()}{message[1:]}"
    code = "missing_field" if first.get("type") == "missing" else "invalid_value"
    return ApiError(400, message, param=field, code=code)


def _field_name(place: Sequence[int | str]) -> str | None:
    """Return the name of a field: ("messages", 0, "content") is messages[0].content."""
    # Names that pydantic adds for a branch of a union are not fields.
    parts = [part for part in place if isinstance(part, int) or re.fullmatch(r"[a-z_]+", part)]
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return name.removeprefix(".") or None


def _of_http(error: HTTPException) -> ApiError:
    headers = {name.lower(): value for name, value in (error.headers or {}).items()}
    if error.status_code == 404:
        return ApiError(404, "there is nothing under this path; see /openapi.json", code="not_found", headers=headers)
    if error.status_code == 405:
        allowed = headers.get("allow", "another method")
        return ApiError(405, f"this path takes {allowed} only", code="method_not_allowed", headers=headers)
    kind = "server_error" if error.status_code >= 500 else "invalid_request_error"
    return ApiError(error.status_code, str(error.detail), kind=kind, headers=headers)

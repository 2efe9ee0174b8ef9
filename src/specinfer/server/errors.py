"""What is refused, in OpenAI's shape: {"error": {"message", "type", "param", "code"}}, with codes that are strings."""

import re

from specinfer.errors import EngineDeadError, QueueFullError, RequestError


class ApiError(Exception):
    """An answer other than success."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str = "invalid_value",
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code
        self.headers = headers or {}

    def body(self) -> dict[str, object]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def as_api_error(error: Exception) -> ApiError:
    """What a caller is told of an exception."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        headers = {"Retry-After": "1"}
        return ApiError(429, str(error), kind="rate_limit_error", code="queue_full", headers=headers)
    if isinstance(error, EngineDeadError):
        headers = {"Retry-After": "5"}
        return ApiError(503, str(error), kind="server_error", code="engine_unavailable", headers=headers)
    if isinstance(error, (RequestError, ValueError)):
        named = re.match(r"([a-z_]+)[\s:\[]", str(error))
        return ApiError(400, str(error), param=named[1] if named else None)
    return ApiError(
        500, "an internal error; the log has it under this request's id", kind="server_error", code="internal_error"
    )

"""The outer middleware: gives each request an id and a line in the log, and turns exceptions into error responses."""

import asyncio
import json
import logging
import re
import time
import uuid
from contextvars import ContextVar

from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specinfer.server.auth import route_path
from specinfer.server.dialect import dialect_of
from specinfer.server.errors import KNOWN, ApiError, as_api_error
from specinfer.server.state import Serving

logger = logging.getLogger(__name__)
access = logging.getLogger("specinfer.access")

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
QUIET_PATHS = frozenset({"/health", "/health/ready", "/ping", "/metrics", "/load"})  # requested every few seconds
_SOUND_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")


class ServingMiddleware:
    """The outermost middleware: gives each request an id and logs how it ended."""

    def __init__(self, app: ASGIApp, state: Serving) -> None:
        self._app, self._state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        scope["root_path"] = self._state.config.root_path  # routes then match paths with and without it
        # The server sends no body in response to HEAD.
        inner = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        mark, start, status = REQUEST_ID.set(request_id), time.monotonic(), 0

        async def framed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(inner, receive, framed)
        finally:
            if self._state.config.access_log and scope["path"] not in QUIET_PATHS:
                client = (scope.get("client") or ("-",))[0]
                path = json.dumps(scope["path"][:200])  # any character may be in it; a query may hold a secret
                took = time.monotonic() - start
                access.info("%s %s %s %s %.3f s", client, scope["method"], path, status or "gone", took)
            REQUEST_ID.reset(mark)


class Refusals:
    """Middleware that answers with the error that was raised, and lets no exception pass."""

    def __init__(self, app: ASGIApp, state: Serving) -> None:
        self._app, self._state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched)
            return
        except asyncio.CancelledError:
            # Cancelled because the server is stopping. If it is not, the client has gone and needs no response.
            if started or not self._state.is_stopping:
                raise
            api_error = ApiError("shutting_down", "the server is shutting down")
        except Exception as error:
            api_error = as_api_error(error) if isinstance(error, KNOWN) else _of_fault(error, started=started)
        if not started:
            await refusal(self._state, api_error, route_path(scope))(scope, receive, send)


def _of_fault(error: Exception, *, started: bool) -> ApiError:
    """Log an unforeseen exception. A stream that has begun just ends, and its reader sees that it is incomplete."""
    logger.error("a request failed%s", " in the middle of its response" if started else "", exc_info=error)
    return as_api_error(RuntimeError())


def refusal(state: Serving, error: ApiError, path: str) -> JSONResponse:
    """Return the response for an error in the dialect of the path's API, and count it."""
    if state.count_refusal is not None:
        state.count_refusal(error.code)
    return JSONResponse(dialect_of(path).error(error), error.status, error.headers)


def _request_id(scope: Scope) -> str:
    given = next((value for name, value in scope["headers"] if name.lower() == b"x-request-id"), b"")
    text = given.decode("latin-1")
    return text if _SOUND_ID.fullmatch(text) else uuid.uuid4().hex

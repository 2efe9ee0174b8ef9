"""Middleware: ids and log lines of requests, error responses for exceptions, and limits on headers and bodies."""

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import Mapping
from contextvars import ContextVar

from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specinfer.core.errors import QuotaError
from specinfer.quotas import OutgoingResponse, Quotas
from specinfer.server.auth import OPEN_PATHS, route_path
from specinfer.server.config import ServerConfig
from specinfer.server.dialects import dialect_of
from specinfer.server.errors import KNOWN, ApiError, as_api_error
from specinfer.server.json_body import read_body
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


_CLOSE = {"connection": "close"}  # the rest of such a request is not read
_SMALL = 2**17  # bytes of JSON that are parsed in the event loop; larger bodies are parsed in a thread
_PIECE = 2**16  # bytes of a response that are handed over at once; as many are taken before its client reads
_MANY = 64  # times max_body_bytes: the limit on the bodies that are being read at once, of all clients together
_DISCARDED = 4  # times max_body_bytes: this much is read and dropped, so that the sender gets to read the response


class Heads:
    """Middleware that refuses large headers; the HTTP parser's own limit covers only what it parses at once."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app, self._config = app, config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = scope["headers"]
        size = sum(len(name) + len(value) for name, value in headers)
        size += len(scope.get("raw_path") or b"") + len(scope.get("query_string", b""))
        if len(headers) > self._config.max_headers or size > self._config.max_header_bytes:
            raise head_too_large(self._config)
        await self._app(scope, receive, send)


def head_too_large(config: ServerConfig) -> ApiError:
    return ApiError(
        "headers_too_large",
        f"headers: more than {config.max_headers} of them or {config.max_header_bytes} bytes; send fewer",
    )


class Bodies:
    """Middleware that reads whole bodies, within limits of size and time, and requires a valid JSON object.

    `ParsedRequest` returns that object.
    """

    def __init__(self, app: ASGIApp, state: Serving) -> None:
        self._app, self._config, self._quotas = app, state.config, state.quotas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Open paths need no key, so no body is read for them.
        if scope["method"] not in ("POST", "PUT", "PATCH") or route_path(scope) in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        body = await self._read(headers, receive, scope["state"]["tenant"])
        if body is None:
            return  # the client is gone
        scope["state"]["body_size"] = len(body)
        if body:
            scope = _as_json(scope, headers)
            is_small = len(body) <= _SMALL
            scope["state"]["fields"] = read_body(body) if is_small else await asyncio.to_thread(read_body, body)
        await self._app(scope, _replay(body, receive), send)

    async def _read(self, headers: Mapping[bytes, bytes], receive: Receive, tenant: str) -> bytes | None:
        limit = self._config.max_body_bytes
        declared = headers.get(b"content-length", b"0")
        if not declared.isdigit():
            raise ApiError("invalid_value", "content-length: must be a number", headers=_CLOSE)
        too_large = ApiError(
            "request_too_large",
            f"body: more than {limit} bytes; send less, or raise --max-body-bytes",
        )
        if int(declared[:20]) > _DISCARDED * limit:
            raise too_large
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._config.body_timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    part = message.get("body", b"")
                    size += len(part)
                    if not self._quotas.add_bytes(tenant, len(part), _MANY * limit):
                        raise _too_much_at_once()
                    if size > _DISCARDED * limit:
                        raise too_large
                    if size > limit:
                        parts.clear()
                    else:
                        parts.append(part)
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            raise ApiError(
                "request_timeout",
                f"body: not here after {self._config.body_timeout:g} seconds; send it faster, or less",
            ) from None
        except QuotaError as error:
            refused = as_api_error(error)
            refused.headers |= _CLOSE
            raise refused from None
        finally:
            self._quotas.add_bytes(tenant, -size, 0)
        if size > limit:
            raise too_large
        return b"".join(parts)


async def send_in_pieces(message: Message, send: Send, outgoing: OutgoingResponse) -> None:
    """Send a message; a large body in pieces, each when the client has read what came before, but a little."""
    body = message.get("body", b"")
    if len(body) <= _PIECE:
        await send(message)
        return
    outgoing.num_bytes = len(body)
    for start in range(0, len(body), _PIECE):
        piece, is_last = body[start : start + _PIECE], start + _PIECE >= len(body)
        await send({**message, "body": piece, "more_body": not is_last or message.get("more_body", False)})
        outgoing.num_bytes -= len(piece)


def token_headers(quotas: Quotas, tenant: str) -> dict[str, str]:
    """Return OpenAI's headers about the tokens that a key has left; none for a key without a limit."""
    left, limit = quotas.tokens_left(tenant), quotas.limits_of(tenant).max_tokens_per_minute
    if left is None or limit is None:
        return {}
    seconds = 60 * (limit - left) / limit
    return {
        "x-ratelimit-limit-tokens": str(limit),
        "x-ratelimit-remaining-tokens": str(max(int(left), 0)),
        "x-ratelimit-reset-tokens": f"{seconds // 60:.0f}m{seconds % 60:.0f}s" if seconds >= 60 else f"{seconds:.1f}s",
    }


def _too_much_at_once() -> ApiError:
    return ApiError(
        "too_many_connections",
        "body: too much is being sent by all clients together; try again later",
        headers=_CLOSE,
    )


def _as_json(scope: Scope, headers: Mapping[bytes, bytes]) -> Scope:
    """Return the scope of a request whose body is JSON by its type.

    Ollama's API takes any type, as curl -d sends that of a form. A page of another site could send such a body without
    asking first, so what a browser sends (it always has an Origin, and newer ones Sec-Fetch-Site) must name JSON.
    """
    if route_path(scope).startswith("/api/") and not {b"origin", b"sec-fetch-site"} & headers.keys():
        others = [(name, value) for name, value in scope["headers"] if name.lower() != b"content-type"]
        return {**scope, "headers": [*others, (b"content-type", b"application/json")]}
    kind = headers.get(b"content-type", b"").decode("latin-1").split(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ApiError(
            "unsupported_media_type",
            f"content-type: must be application/json, not {kind!r:.60}; set the header",
        )
    return scope


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a receive function that yields a body read before, then what comes after it."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return messages.pop() if messages else await receive()

    return next_message

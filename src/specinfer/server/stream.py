"""Streams of events in the frames of each API (`Dialect`), and clients that disconnect; an error is the last event.

Events are plain dicts: a stream may have thousands a second, and they need no validation. Work for a client that has
disconnected is ended at once. ASGI reports that as the next message after the body, which must have been read before.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, cast

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from specinfer.server.errors import ApiError, as_api_error

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
        content = json.loads(body)
        return str(content["code"] if "code" in content else content["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return None


logger = logging.getLogger(__name__)
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies must not buffer events

Failing: TypeAlias = Callable[[ApiError], Sequence[Mapping[str, Any]]] | None


class EventStream(Response):
    """A response that is a stream of events; it ends when the client disconnects.

    Args:
        events: The events as JSON objects, or None when nothing has come for a while.
        close: Called when the stream has ended, or if it never began.
        fail: Returns the events that end the stream with an error, or None for the dialect's one event.
    """

    def __init__(
        self,
        events: AsyncGenerator[Mapping[str, Any] | None],
        close: Callable[[], None],
        headers: Mapping[str, str] | None = None,
        dialect: Dialect = OPENAI,
        fail: Failing = None,
    ) -> None:
        self._events, self._close, self._dialect, self._fail = events, close, dialect, fail
        super().__init__(headers={**_HEADERS, **(headers or {})}, media_type=dialect.media_type)
        del self.headers["content-length"]  # set by the empty body above

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(OSError):  # the client has gone
                await run_until(wait_for_disconnect(receive), self._send(send))
        finally:
            await self._events.aclose()
            self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for line in lines_of(self._events, self._dialect, self._fail):
            await send({"type": "http.response.body", "body": line, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def lines_of(
    events: AsyncIterator[Mapping[str, Any] | None], dialect: Dialect = OPENAI, fail: Failing = None
) -> AsyncIterator[bytes]:
    """Yield events as bytes. The status code has been sent by now, so an error is reported as an event."""
    try:
        async for event in events:
            if line := dialect.ping if event is None else dialect.line(event):
                yield line
    except Exception as error:
        if not isinstance(error, ApiError):  # an unforeseen exception
            logger.error("a stream ended with an error", exc_info=error)
        api_error = error if isinstance(error, ApiError) else as_api_error(RuntimeError())
        for event in [dialect.error(api_error)] if fail is None else fail(api_error):
            yield dialect.line(event)
    if dialect.done:
        yield dialect.done


T = TypeVar("T")


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def run_until(end: Coroutine[Any, Any, object], work: Coroutine[Any, Any, T]) -> tuple[bool, T | None]:
    """Return whether the work is done, and its result; it is cancelled if the end comes first."""
    working, ending = asyncio.ensure_future(work), asyncio.ensure_future(end)
    try:
        await asyncio.wait((working, ending), return_when=asyncio.FIRST_COMPLETED)
        return (True, working.result()) if working.done() else (False, None)
    finally:
        await cancel(working, ending)


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of the work, which is cancelled if the client disconnects first.

    Raises:
        ApiError: The client has disconnected; nobody will read the response.
    """
    is_done, result = await run_until(wait_for_disconnect(request.receive), work)
    if not is_done:
        raise ApiError("client_closed_request", "the client closed the connection")
    return cast("T", result)


async def cancel(*tasks: "asyncio.Future[Any]") -> None:
    """Cancel tasks that are not done, and wait until they have cleaned up."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

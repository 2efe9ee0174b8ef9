"""Streams of events, and clients that disconnect; an error is the last event.

Work for a client that has disconnected is ended at once. ASGI reports that as the next message after the body, which
must have been read before.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar, cast

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from specinfer.server.dialects import OPENAI, Dialect
from specinfer.server.errors import ApiError, as_api_error

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

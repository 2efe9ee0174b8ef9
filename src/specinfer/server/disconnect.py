"""Clients that disconnect: work for them is ended at once, whatever it waits for.

ASGI reports a disconnect as the next message after the body, so the body must have been read before. Checking from time
to time would notice it too late, and behind some middleware not at all.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request
from starlette.types import Receive

from specinfer.server.errors import ApiError

T = TypeVar("T")


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of the work, which is cancelled if the client disconnects first.

    Raises:
        ApiError: The client has disconnected; nobody will read the response.
    """
    working = asyncio.ensure_future(work)
    going = asyncio.ensure_future(wait_for_disconnect(request.receive))
    try:
        await asyncio.wait((working, going), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError(499, "the client closed the connection", code="client_closed_request")
        return working.result()
    finally:
        await cancel(working, going)


async def cancel(*tasks: "asyncio.Future[Any]") -> None:
    """Cancel tasks that are not done, and wait until they have cleaned up."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

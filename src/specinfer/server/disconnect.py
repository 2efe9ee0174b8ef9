"""Clients that go away: work for them is ended at once, whatever it waits for.

A client's going is the next message after its body, so the body has to be read before. Asking now and then whether
it is still there would come too late, and not at all behind some middleware.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request
from starlette.types import Receive

from specinfer.server.errors import ApiError

T = TypeVar("T")


async def wait_for_disconnect(receive: Receive) -> None:
    """Returns when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The work's result; if the client goes first, the work is cancelled.

    Raises:
        ApiError: The client has gone; nobody will read the answer.
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
    """Cancels what is not done, and waits until it has cleaned up."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

"""Requests whose bodies the middleware has parsed: to parse a large one again would keep the event loop busy."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute


class ParsedRequest(Request):
    """A request that returns the object that `Bodies` has read."""

    async def json(self) -> Any:
        return self.scope["state"]["fields"]


class ParsedRoute(APIRoute):
    """A route that takes its fields from a `ParsedRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_parsed(request: Request) -> Response:
            return await handle(ParsedRequest(request.scope, request.receive))

        return handle_parsed

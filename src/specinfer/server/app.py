"""The application: its routes, and the middleware that all requests pass.

The middleware from the outside in: `ServingMiddleware` names and logs requests, CORS admits the allowed origins,
`Refusals` answers with the errors raised further in, `Heads` limits headers, `Guard` authenticates, `Gate` refuses work
that cannot be taken, and `Bodies` reads bodies.
"""

from functools import cache

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import specinfer
from specinfer.core.text import counted
from specinfer.server import (
    anthropic,
    chat,
    completions,
    ollama,
    ollama_models,
    operations,
    page,
    responses,
    tokens,
)
from specinfer.server.auth import OPEN_PATHS, Guard, route_path
from specinfer.server.errors import KNOWN, ApiError, ErrorResponse, as_api_error, too_much_outgoing
from specinfer.server.middleware import (
    Bodies,
    Heads,
    Refusals,
    ServingMiddleware,
    refusal,
    send_in_pieces,
    token_headers,
)
from specinfer.server.state import ServerState, Serving, state_of

_MODULES = (
    *(chat, completions, responses, anthropic, ollama, ollama_models),
    *(tokens, operations, page),
)


def create_app(state: ServerState) -> FastAPI:
    """Create the application for an engine that is running, or that the caller starts before the first request."""
    config = state.config
    app = FastAPI(
        title="SpecInfer",
        version=specinfer.__version__,
        openapi_url=None,  # FastAPI would make the schema in the event loop, which takes 0.2 s
        docs_url=None,  # FastAPI's page loads scripts from the network
        redoc_url=None,
        middleware=checks(state),
        responses={name: {"model": ErrorResponse} for name in ("4XX", "5XX")},
    )
    app.state.server = state
    if config.docs:
        app.add_route("/openapi.json", _schema)
    for module in _MODULES:
        app.include_router(module.router)
    for kind in KNOWN:
        app.add_exception_handler(kind, _error_response)
    return app


def _schema(request: Request) -> JSONResponse:
    """Return the schema of the API; runs in a thread."""
    schema, root = request.app.openapi(), request.scope.get("root_path", "").rstrip("/")
    return JSONResponse(schema | {"servers": [{"url": root}]} if root else schema)


def checks(state: Serving) -> list[Middleware]:
    """Return the middleware that every request passes before it reaches a route, from the outside in."""
    config = state.config
    middleware = [Middleware(ServingMiddleware, state)]
    if config.allowed_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=config.allowed_origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "retry-after"],
            )
        )
    return [
        *middleware,
        Middleware(Refusals, state),
        Middleware(Heads, config),
        Middleware(Guard, config),
        Middleware(Gate, state),
        Middleware(Bodies, state),
    ]


class Gate:
    """Middleware that refuses work while the model loads, when the engine is dead or stopping, or at a limit.

    It hands over large responses in pieces, each when the client has read what came before.
    """

    def __init__(self, app: ASGIApp, state: Serving) -> None:
        self._app, self._state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        quotas, tenant = self._state.quotas, scope["state"]["tenant"]
        if scope["method"] == "POST" and route_path(scope) not in OPEN_PATHS:
            self._check(tenant)

        async def respond(message: Message) -> None:
            if message["type"] == "http.response.start" and quotas.tokens_left(tenant) is not None:
                MutableHeaders(scope=message).update(token_headers(quotas, tenant))
            await send_in_pieces(message, send, outgoing)

        with quotas.connection(tenant), quotas.response(tenant) as outgoing:
            scope["state"]["outgoing"] = outgoing
            await self._app(scope, receive, respond)

    def _check(self, tenant: str) -> None:
        quotas, config = self._state.quotas, self._state.config
        self._state.check_ready()
        if not quotas.check_connection(tenant, config.max_connections):
            raise ApiError(
                "too_many_connections",
                f"{counted(quotas.num_connections, 'request')} being served already; try again later",
                headers={"Retry-After": "1"},
            )
        if not quotas.check_outgoing(tenant, 0, config.max_outgoing_bytes):
            raise too_much_outgoing(config)


async def _error_response(request: Request, error: Exception) -> JSONResponse:
    path, api_error = route_path(request.scope), as_api_error(error)
    if api_error.code == "method_not_allowed" and path not in _paths():  # it only looks like the id of something
        api_error = as_api_error(HTTPException(404))
    if api_error.code == "not_found" and (meant := _meant(path)):
        api_error.message = f"there is nothing under this path; did you mean {meant}?"
    return refusal(state_of(request), api_error, path)


def _meant(path: str) -> str | None:
    """Return the path that a client meant whose base URL has no /v1, or one too many."""
    nearby = (f"/v1{path}", path.removeprefix("/v1"))
    return next((near for near in nearby if near in _paths() and near != path), None)


@cache
def _paths() -> frozenset[str]:
    return frozenset(getattr(route, "path", "") for module in _MODULES for route in module.router.routes)

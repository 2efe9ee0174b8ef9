"""The application: routes, and what every answer has in common."""

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from specinfer.errors import EngineDeadError, QueueFullError, RequestError
from specinfer.server import chat, completions, operations, page, responses, tokens
from specinfer.server.errors import ApiError, as_api_error
from specinfer.server.state import ServerState


def create_app(state: ServerState) -> FastAPI:
    """The server for an engine that has been started, or that the caller starts before the first request."""
    app = FastAPI(title="SpecInfer")
    app.state.server = state
    for module in (chat, completions, responses, tokens, operations, page):
        app.include_router(module.router)
    for kind in (ApiError, RequestError, QueueFullError, EngineDeadError):
        app.add_exception_handler(kind, _answer_error)
    return app


async def _answer_error(request: Request, error: Exception) -> JSONResponse:
    told = as_api_error(error)
    return JSONResponse(told.body(), told.status, told.headers)

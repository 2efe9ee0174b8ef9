"""A server without sockets: the application around a small engine, and a client that calls it."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import httpx

from specinfer.async_llm import AsyncLLM, QueueLimits
from specinfer.llm import LLM
from specinfer.server.app import create_app
from specinfer.server.config import ServerConfig
from specinfer.server.state import ServerState

T = TypeVar("T")
Body = Callable[[httpx.AsyncClient, ServerState], Awaitable[T]]


def client_of(state: ServerState, **settings: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(create_app(state), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", **settings)


def serve(
    llm: LLM, body: Body[T], names: Sequence[str] = ("tiny",), limits: QueueLimits | None = None, **config: Any
) -> T:
    """What `body` makes of a client, while the engine runs."""

    async def run() -> T:
        async with AsyncLLM(llm, limits) as engine:
            state = ServerState(engine, ServerConfig(**config), names)
            async with client_of(state) as client:
                return await body(client, state)

    try:
        return asyncio.run(run())
    finally:
        llm.engine.observers.clear()  # the next engine brings its own


def without_engine(body: Body[T], **config: Any) -> T:
    """The same while the model is being loaded."""

    async def run() -> T:
        state = ServerState(None, ServerConfig(**config), ("tiny",))
        async with client_of(state) as client:
            return await body(client, state)

    return asyncio.run(run())


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error in an answer, once its shape is OpenAI's."""
    content = answer.json()
    assert set(content) == {"error"}
    error: dict[str, Any] = content["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["code"], str)
    return error

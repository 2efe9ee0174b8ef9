"""A server within a test: over ASGI without a socket, or on a port of its own for clients that need one."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

import httpx
import pytest
import uvicorn

from specinfer import LLM, AsyncLLM, QueueLimits
from specinfer.engine.engine import Engine
from specinfer.server.app import create_app
from specinfer.server.config import ServerConfig
from specinfer.server.state import ServerState

T = TypeVar("T")
Body = Callable[[httpx.AsyncClient, ServerState], Awaitable[T]]


def app_of(engine: AsyncLLM, **config: Any) -> Any:
    return create_app(ServerState(engine, ServerConfig(**config), ("tiny",)))


@asynccontextmanager
async def served(
    llm: LLM, limits: QueueLimits | None = None, **config: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, AsyncLLM]]:
    """A client of an app around this model, and the engine behind it."""
    async with AsyncLLM(llm, limits) as engine:
        transport = httpx.ASGITransport(app=app_of(engine, **config))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60) as client:
            yield client, engine


@contextmanager
def served_on_port(llm: LLM, *, wrap: Callable[[Any], Any] = lambda app: app, **settings: Any) -> Iterator[str]:
    """The address of a real server in a thread, whose app may be wrapped in another."""
    started, address = threading.Event(), []

    async def serve() -> None:
        async with AsyncLLM(llm) as engine:
            config = uvicorn.Config(
                wrap(app_of(engine, **settings)), log_level="error", http="h11", ws="none", lifespan="off"
            )
            server = uvicorn.Server(config)
            with socket.create_server(("127.0.0.1", 0)) as listener:
                address.extend([f"http://127.0.0.1:{listener.getsockname()[1]}", server])
                serving = asyncio.ensure_future(server.serve([listener]))
                while not server.started:
                    await asyncio.sleep(0.01)
                started.set()
                await serving

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(30)
    try:
        yield address[0]
    finally:
        address[1].should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def events_of(body: str) -> list[dict[str, Any]]:
    """The events of a stream, which must be whole."""
    lines = [line for line in body.split("\n\n") if line and not line.startswith(":")]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


class Caller:
    """One request over ASGI whose client can go away at any time."""

    def __init__(self, app: Any, path: str, body: dict[str, Any]) -> None:
        self.sent: list[dict[str, Any]] = []
        self._gone = asyncio.Event()
        self._messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
            "method": "POST", "scheme": "http", "path": path, "raw_path": path.encode(), "root_path": "",
            "query_string": b"", "headers": headers, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
        }  # fmt: skip
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def leave(self) -> None:
        """The client goes; the application has to notice and return."""
        self._gone.set()
        await asyncio.wait_for(self.task, 5)

    async def _receive(self) -> dict[str, Any]:
        if self._messages:
            return self._messages.pop()
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)


# -------------------------------------------------- for tests that are no coroutines, or need no engine


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

    observers = list(llm.engine.observers)
    try:
        return asyncio.run(run())
    finally:
        llm.engine.observers[:] = observers  # without what a test put beside the engine


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


def slow_steps(monkeypatch: pytest.MonkeyPatch, seconds: float = 0.01) -> None:
    """Steps that leave time for what is to happen between them, however small the model."""
    step = Engine.step

    def delayed(self: Engine) -> Any:
        time.sleep(seconds)
        return step(self)

    monkeypatch.setattr(Engine, "step", delayed)

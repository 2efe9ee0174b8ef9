"""A server within a test: over ASGI without a socket, or on a port of its own for clients that need one."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Self, TypeVar

import httpx
import pytest
import uvicorn

from specinfer import LLM, AsyncLLM, QueueLimits
from specinfer.engine.engine import Engine
from specinfer.server.app import create_app
from specinfer.server.config import ServerConfig
from specinfer.server.state import ServerState

T = TypeVar("T")
PATIENCE = 60.0  # seconds
Body = Callable[[httpx.AsyncClient, ServerState], Awaitable[T]]


def app_of(engine: AsyncLLM, **config: Any) -> Any:
    return create_app(ServerState(engine, ServerConfig(**config), ("tiny",)))


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
    llm: LLM | None, work: Body[T], names: Sequence[str] = ("tiny",), limits: QueueLimits | None = None, **config: Any
) -> T:
    """What `work` makes of a client, while the engine runs; without a model while it is being loaded."""

    async def run() -> T:
        async with nullcontext() if llm is None else AsyncLLM(llm, limits) as engine:
            state = ServerState(engine, ServerConfig(**config), names)
            async with client_of(state) as client:
                return await work(client, state)

    observers = [] if llm is None else list(llm.engine.observers)
    try:
        return asyncio.run(run())
    finally:
        if llm is not None:
            llm.engine.observers[:] = observers  # without what a test put beside the engine


def ask(
    llm: LLM | None, *requests: tuple[str, Any], headers: Mapping[str, str] | None = None, **settings: Any
) -> list[httpx.Response]:
    """The answers to requests, each a path and a body, one after the other; a body of bytes is sent as it is."""

    async def work(client: httpx.AsyncClient, state: ServerState) -> list[httpx.Response]:
        bodies = [(path, {"content": body} if isinstance(body, bytes) else {"json": body}) for path, body in requests]
        return [await client.post(path, **body, headers=headers) for path, body in bodies]

    return serve(llm, work, **settings)


def post(llm: LLM | None, path: str, *bodies: Any, **settings: Any) -> list[httpx.Response]:
    """The answers to several bodies at one path."""
    return ask(llm, *((path, body) for body in bodies), **settings)


def choices_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The choices of a whole answer."""
    assert answer.status_code == 200, answer.text
    choices: list[dict[str, Any]] = answer.json()["choices"]
    return choices


class Server:
    """An app around a model, served over ASGI in an event loop of its own; use it as `with`.

    Args:
        llm: None while the model is being loaded.
    """

    def __init__(
        self, llm: LLM | None, limits: QueueLimits | None = None, names: Sequence[str] = ("tiny",), **config: Any
    ) -> None:
        self.llm: Any = llm
        self._limits, self._names, self._config = limits, names, ServerConfig(**config)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="server of a test")

    def __enter__(self) -> Self:
        if self.llm is not None:
            self.llm.engine.observers.clear()  # of servers before
        self._thread.start()
        self.run(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        assert not self._thread.is_alive()
        self._loop.close()

    async def _start(self) -> None:
        self.engine: Any = None if self.llm is None else AsyncLLM(self.llm, self._limits)
        if self.engine is not None:
            self.engine.start()
        self.state = ServerState(self.engine, self._config, self._names)
        self.client = client_of(self.state, timeout=PATIENCE)

    async def _stop(self) -> None:
        await self.client.aclose()
        assert self.engine is None or await self.engine.shutdown()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of work in the server's loop."""
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, PATIENCE), self._loop).result()

    def get(self, path: str, **given: Any) -> httpx.Response:
        return self.run(self.client.get(path, **given))

    def request(self, method: str, path: str, **given: Any) -> httpx.Response:
        return self.run(self.client.request(method, path, **given))

    def post(self, path: str, json: Any = None, **given: Any) -> httpx.Response:
        return self.run(self.client.post(path, json=json, **given))


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

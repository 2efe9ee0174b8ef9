"""A server on a port of its own as `process.run` makes it, in a thread, and clients that speak bytes to it."""

import asyncio
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import httpx

from hostile import TEXT
from specinfer import LLM, QueueLimits
from specinfer.server import process
from specinfer.server.config import ServerConfig
from specinfer.server.listening import listening
from tests.server.dialects import read
from worlds import await_that

BODY = {"prompt": "def f", "max_tokens": 4, "seed": 1, "temperature": 0.8}


class Port:
    """A served process's inside, in a thread: signals are the only thing that is missing."""

    def __init__(self, llm: LLM, config: ServerConfig) -> None:
        self._service = process.Service(lambda: llm, "demo", ("demo",), config, QueueLimits())
        self.llm, self.config = llm, config
        self._alone = ""

    def __enter__(self) -> "Port":
        self._stack = ExitStack()
        listener = self._stack.enter_context(listening(self._service.config))
        self.place: tuple[str, int] = listener.getsockname()
        self._process: Any = None

        async def serve() -> None:
            loop = asyncio.get_running_loop()
            loop.add_signal_handler = lambda *args: None  # type: ignore[method-assign]  # not in the main thread
            self._loop, self._process = loop, process._Process(self._service, listener)
            self._code = await self._process.run()

        self._thread = threading.Thread(target=lambda: asyncio.run(serve()))
        self._thread.start()
        self.client = self._stack.enter_context(
            httpx.Client(base_url="{}://{}:{}".format(self._scheme, *self.place), timeout=30, verify=False)
        )
        await_that(lambda: self.client.get("/health").status_code == 200, 20)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._process.signals.stop, 15)
        self._thread.join(30)
        self._stack.close()
        assert not self._thread.is_alive()
        assert self._code == 0

    @property
    def _scheme(self) -> str:
        return "http" if self.config.ssl_certfile is None else "https"

    @property
    def num_connections(self) -> int:
        return len(self._process._server.server_state.connections)

    @property
    def is_idle(self) -> bool:
        return self._process._state.engine.num_live == 0 and not self.llm.engine.has_work

    def connect(self) -> socket.socket:
        return socket.create_connection(self.place, timeout=20)

    def say(self, data: bytes) -> bytes:
        """All that comes back for these bytes until the server closes."""
        with self.connect() as connection:
            with suppress(OSError):  # it has heard enough
                connection.sendall(data)
            return read_all(connection)

    @contextmanager
    def well(self) -> Iterator[None]:
        """While this goes on a neighbour streams; it says what it says alone, and nothing is left behind."""
        body = BODY | {"max_tokens": 30, "ignore_eos": True, "stream": True}
        self._alone = alone = self._alone or streamed(self.client, body)
        found: list[str] = []
        neighbour = threading.Thread(target=lambda: found.append(streamed(self.client, body)))
        neighbour.start()
        try:
            yield
        finally:
            neighbour.join(30)
            await_that(lambda: self.is_idle, 20)
        assert found == [alone]
        assert self.client.post(TEXT, json=BODY).status_code == 200
        assert self.client.get("/health").status_code == 200


def streamed(client: httpx.Client, body: dict[str, Any]) -> str:
    return read(client.post(TEXT, json=body)).text


def read_all(connection: socket.socket) -> bytes:
    parts = []
    with suppress(OSError):
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


def request(body: Any = None, *lines: str, path: str = TEXT, method: str = "POST", length: str | None = None) -> bytes:
    """A request as bytes."""
    content = b"" if body is None else json.dumps(body).encode()
    size = str(len(content)) if length is None else length
    head = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json", f"Content-Length: {size}"]
    return "\r\n".join([*head, *lines, "", ""]).encode("latin-1") + content


def statuses(said: bytes) -> list[int]:
    return [int(code) for code in re.findall(rb"HTTP/1\.1 (\d{3}) ", said)]

"""A replica: one engine in its own process, behind the same application as a server with a single engine.

Requests are ASGI scopes and responses are bytes (`messages.py`), so all endpoints, errors and streams are the same.
"""

import asyncio
import contextlib
import dataclasses
import sys
import zlib
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.types import Message, Scope

from specinfer.async_llm import AsyncLLM
from specinfer.core.clock import epoch_seconds
from specinfer.generation import Generation
from specinfer.server import logs
from specinfer.server.app import create_app
from specinfer.server.observation import Observation
from specinfer.server.process import SWITCH_SECONDS
from specinfer.server.replicas.messages import pack_response
from specinfer.server.replicas.settings import ReplicaSettings
from specinfer.server.state import ServerState

_RECENT_SECONDS = 30.0  # first tokens that are older than this do not count for scaling
_MAX_RECENT = 1000
_LOOPBACK = "127.0.0.1"


class EngineReplica:
    """A server of the requests that the router sends; Ray Serve creates as many as are needed.

    Args:
        name: The replica's name among all replicas; empty for the one that Ray gives it.
    """

    def __init__(self, settings: ReplicaSettings, name: str = "") -> None:
        if not name:
            name = _name_of_ray()
            _stay_on_loopback()
        sys.setswitchinterval(SWITCH_SECONDS)
        logs.configure(settings.server.log_level, settings.server.log_format)
        settings = settings.of_replica(name)
        # Replicas get different seeds, so that requests without a seed do not all get the same random numbers.
        seed = settings.engine.seed + zlib.crc32(name.encode())
        self._name = name
        self._engine = AsyncLLM.from_engine_args(dataclasses.replace(settings.engine, seed=seed), settings.limits)
        self._engine.llm.prepare()
        self._state = ServerState(None, settings.server, settings.names, str(settings.engine.model))
        self._state.put_engine(self._engine)
        self._observation = Observation(self._engine, self._state)
        self._app = create_app(self._state)
        self._first_tokens: deque[tuple[float, float]] = deque(maxlen=_MAX_RECENT)  # its time, and seconds to it
        self._engine.on_end.append(self._note_end)
        self._has_started = False
        # Ray Serve awaits the instance's __del__ after its last request. Python calls only the class's; there is none.
        self.__del__ = self.close

    async def answer(
        self, scope: Scope, body: bytes, digests: Sequence[str] = (), avoid: Sequence[str] = ()
    ) -> AsyncGenerator[bytes]:
        """Yield the response to a request as it comes; closing the generator ends the request.

        Args:
            digests, avoid: Read by `PrefixRouter` when it chooses the replica.
        """
        await self._start()
        exchange = _Exchange(body, self._name)
        serving = asyncio.ensure_future(exchange.serve(self._app, scope))
        try:
            async for part in exchange.parts():
                yield part
            await serving
        finally:
            exchange.gone.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(serving)

    async def load(self) -> dict[str, int]:
        """Return the numbers of all, running and waiting outputs."""
        await self._engine.check_health()
        return self._state.load()

    async def scrape(self) -> tuple[str, str]:
        """Return the replica's name and its metrics as text."""
        return self._name, "" if self._state.scrape is None else self._state.scrape().decode()

    async def check_health(self) -> None:
        """Raise `EngineDeadError` if the engine failed or hangs; Ray Serve then replaces the replica."""
        await self._start()
        await self._engine.check_health()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what scaling uses besides the number of requests: recent seconds to first token, 90th percentile."""
        since = epoch_seconds() - _RECENT_SECONDS
        recent = sorted(took for at, took in self._first_tokens if at >= since)
        return {"ttft": recent[len(recent) * 9 // 10] if recent else 0.0}

    async def close(self) -> None:
        """Stop the engine, and close its logs and metrics."""
        if self._has_started:
            self._has_started = False
            self._state.is_stopping = True
            await self._observation.__aexit__(None, None, None)
            await self._engine.shutdown()

    async def _start(self) -> None:
        """Start the engine in the loop that serves; Ray creates the object outside of it."""
        if not self._has_started:
            self._has_started = True
            self._engine.start()
            await self._observation.__aenter__()

    def _note_end(self, generation: Generation) -> None:
        for request in generation.requests:
            if request.times.first_token is not None:
                self._first_tokens.append(
                    (request.times.first_token, request.times.first_token - request.times.arrival)
                )


def _name_of_ray() -> str:
    from ray import serve

    name: str = serve.get_replica_context().replica_id.unique_id
    return name


def _stay_on_loopback() -> None:
    """Let Ray Serve open its port of this replica on loopback if all of Ray is there; it would listen everywhere."""
    import ray
    from ray.serve._private import replica

    add_port = getattr(replica, "add_port_to_grpc_server", None)
    if add_port is not None and ray.util.get_node_ip_address() == _LOOPBACK:
        replica.add_port_to_grpc_server = lambda server, _: add_port(server, f"{_LOOPBACK}:0")


class _Exchange:
    """One request and its response, as an ASGI application sees them."""

    def __init__(self, body: bytes, name: str) -> None:
        self._name = name
        self._messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        self._sent: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.gone = asyncio.Event()  # set when the client has gone or the response was closed

    async def serve(self, app: Any, scope: Any) -> None:
        try:
            await app(scope, self._receive, self._send)
        finally:
            self._sent.put_nowait(None)

    async def parts(self) -> AsyncGenerator[bytes]:
        """Yield what the application sent; parts that are ready are joined."""
        while (part := await self._sent.get()) is not None:
            gathered, has_ended = [part], False
            while not self._sent.empty() and not has_ended:
                more = self._sent.get_nowait()
                has_ended = more is None
                gathered.append(more or b"")
            yield b"".join(gathered)
            if has_ended:
                return

    async def _receive(self) -> Message:
        if self._messages:
            return self._messages.pop()
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._sent.put_nowait(pack_response(message, self._name))
        elif message["type"] == "http.response.body" and message.get("body"):
            self._sent.put_nowait(message["body"])

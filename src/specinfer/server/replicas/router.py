"""The router at the port: an application that checks requests as a single process does and passes them to a replica.

If a replica is full, stopping or lost before a response has begun, the router asks another replica. A response that has
begun cannot be moved: it ends with an error that its reader sees.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from specinfer.server.app import checks
from specinfer.server.auth import route_path
from specinfer.server.config import ServerConfig
from specinfer.server.dialects import code_of, dialect_of
from specinfer.server.errors import ApiError
from specinfer.server.replicas.messages import ResponseHead, prefix_digests, replica_scope, unpack_response
from specinfer.server.replicas.metrics import PORT, RouterMetrics, merged
from specinfer.server.state import loading, quotas_of, shutting_down
from specinfer.server.stream import run_until, wait_for_disconnect

logger = logging.getLogger(__name__)
_ELSEWHERE = frozenset({"queue_full", "shutting_down", "loading", "engine_unavailable", "too_many_connections"})
_MAX_FULL, _MAX_LOST = 16, 2  # refusals that are retried at most, and lost replicas after which a request fails
_PROBE_SECONDS = 5.0
_LAST = {"type": "http.response.body", "body": b"", "more_body": False}


class ReplicaLostError(Exception):
    """A replica ended, or failed, before its response was complete."""


class NoReplicaError(Exception):
    """There is no replica to ask."""


class ReplicaSet(Protocol):
    """The replicas, however they are reached."""

    def ask(self, scope: Scope, body: bytes, digests: Sequence[str], avoid: Sequence[str]) -> AsyncGenerator[bytes]:
        """Yield the bytes of one replica's answer; closing the generator ends the request there.

        Args:
            digests: Digests of the request's prefixes, the longest first.
            avoid: Names of replicas that have refused the request.

        Raises:
            ReplicaLostError: The response ends before it is complete.
            NoReplicaError: There is no replica to ask.
        """
        ...

    async def everyone(self, method: str, seconds: float) -> list[Any]:
        """Call a method of every replica and return the results of those that answer in time."""
        ...


class RouterState:
    """The state that the middleware and the router share.

    Attributes:
        is_stopping: True when no new work is taken.
        num_live: Requests that replicas are serving.
        ended: Set when requests that still run must end with an error.
    """

    def __init__(self, config: ServerConfig, name: str) -> None:
        self.config, self.quotas = config, quotas_of(config)
        self.metrics = RouterMetrics(name, config.metrics_prefix)
        self.count_refusal: Callable[[str], None] | None = self.metrics.count_refusal
        self.is_stopping = False
        self.num_live = 0
        self.ended = asyncio.Event()
        self._replica_set: ReplicaSet | None = None

    def put_replica_set(self, replica_set: ReplicaSet) -> None:
        """Serve through these replicas from now on."""
        self._replica_set = replica_set

    @property
    def replica_set(self) -> ReplicaSet:
        """The replicas."""
        if self._replica_set is None:
            raise loading()
        return self._replica_set

    def check_ready(self) -> None:
        """Raise the error that answers a request for new work while none is taken."""
        if self.is_stopping:
            raise shutting_down()
        assert self.replica_set is not None

    async def check_health(self) -> None:
        """Raise `ApiError` if no replica answers."""
        if not await self.replica_set.everyone("load", _PROBE_SECONDS):
            raise lost("no replica answers; try again in a moment")


def create_router(state: RouterState) -> ASGIApp:
    """Create the router behind the server's middleware."""
    app: ASGIApp = Router(state)
    for check in reversed(checks(state)):
        app = check.cls(app, *check.args, **check.kwargs)
    return _Outermost(app)


def lost(message: str) -> ApiError:
    """Return the error for a request that no replica can answer."""
    return ApiError("engine_unavailable", message)


class _Outermost:
    """A receiver of the ASGI lifespan events, for which the application has nothing to do."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        for _ in range(2):
            kind = (await receive())["type"]
            await send({"type": f"{kind}.complete"})


class Router:
    """The application behind the middleware: answers a few paths and passes all other requests to a replica."""

    def __init__(self, state: RouterState) -> None:
        self._state = state
        answers = (
            ("/health", ("GET", "HEAD"), self._health),
            ("/health/ready", ("GET", "HEAD"), self._ready),
            ("/ping", ("GET", "POST"), self._health),
            ("/load", ("GET",), self._load),
            ("/metrics", ("GET",), self._metrics),
        )
        self._own = {(method, path): stream for path, methods, stream in answers for method in methods}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        own = self._own.get((scope["method"], route_path(scope)))
        if own is not None:
            await (await own())(scope, receive, send)
            return
        state, body = self._state, await _read(receive)
        if body is None:
            return  # the client is gone
        passing = _Passing(state, scope, body, send)
        state.num_live += 1
        try:
            with contextlib.suppress(OSError):  # the client has gone
                await run_until(wait_for_disconnect(receive), passing.run())
        finally:
            state.num_live -= 1

    async def _health(self) -> Response:
        await self._state.check_health()
        return JSONResponse({"status": "ok"})

    async def _ready(self) -> Response:
        self._state.check_ready()
        return await self._health()

    async def _load(self) -> Response:
        results = await self._state.replica_set.everyone("load", _PROBE_SECONDS)
        names = ("server_load", "num_running", "num_waiting")
        return JSONResponse({name: sum(result[name] for result in results) for name in names})

    async def _metrics(self) -> Response:
        if not self._state.config.metrics:
            raise ApiError("not_found", "metrics are not served")
        results = await self._state.replica_set.everyone("scrape", _PROBE_SECONDS)
        own = self._state.metrics.scrape(num_replicas=len(results), num_live=self._state.num_live)
        texts = {PORT: own} | dict(sorted(results))
        return Response(merged(texts), media_type="text/plain; version=0.0.4; charset=utf-8")


class _Passing:
    """One request that is being passed to a replica."""

    def __init__(self, state: RouterState, scope: Scope, body: bytes, send: Send) -> None:
        self._state, self._body, self._send = state, body, send
        self._scope, self._dialect = replica_scope(scope), dialect_of(route_path(scope))
        fields = scope["state"].pop("fields", {})  # only the body is passed on
        self._digests = prefix_digests(fields, scope["state"]["tenant"]) if scope["method"] == "POST" else []
        self._has_begun = self._is_stream = self._is_whole = False
        self._num_left: int | None = None  # bytes left of the response, if its length is known

    async def run(self) -> None:
        """Ask replicas until one answers.

        Raises:
            ApiError: No replica answers.
        """
        is_done, _ = await run_until(self._state.ended.wait(), self._ask())
        if not is_done:
            await self._tell(lost("the server is shutting down"))

    async def _ask(self) -> None:
        avoid: list[str] = []
        num_lost = 0
        while True:
            try:
                async with aclosing(
                    self._state.replica_set.ask(self._scope, self._body, self._digests, avoid)
                ) as stream:
                    head, start = unpack_response(await anext(stream))
                    if head.status in (429, 503):  # a short response, which comes whole
                        start += b"".join([part async for part in stream])
                        if self._is_better_at_another(head, start, avoid):
                            avoid.append(head.replica)
                            self._state.metrics.count_moved("refused")
                            continue
                    return await self._pass_on(head, start, stream)
            except NoReplicaError:
                raise lost("all replicas are down; others are being started") from None
            except (ReplicaLostError, StopAsyncIteration) as error:
                if self._is_whole:  # only the replica's end of the response was missing
                    return await self._send(_LAST)
                num_lost += 1
                logger.warning("a replica was lost with a request: %s", error)
                if self._has_begun or num_lost == _MAX_LOST:
                    self._state.metrics.count_moved("failed")
                    return await self._tell(lost("the replica that served this request was lost; send it again"))
                self._state.metrics.count_moved("lost")

    def _is_better_at_another(self, head: ResponseHead, body: bytes, avoid: Sequence[str]) -> bool:
        """Return whether another replica may serve what this one refused."""
        if head.replica in avoid or len(avoid) == _MAX_FULL:
            return False
        return code_of(body) in _ELSEWHERE

    async def _pass_on(self, head: ResponseHead, start: bytes, stream: AsyncGenerator[bytes]) -> None:
        self._has_begun = True
        kind = next((value for name, value in head.headers if name.lower() == b"content-type"), b"")
        self._is_stream = kind.startswith(self._dialect.media_type.encode())
        length = next((int(value) for name, value in head.headers if name.lower() == b"content-length"), None)
        self._num_left = length
        await self._send({"type": "http.response.start", "status": head.status, "headers": head.headers})
        if start:
            await self._pass_part(start)
        async for part in stream:
            await self._pass_part(part)
        await self._send(_LAST)

    async def _pass_part(self, part: bytes) -> None:
        await self._send({"type": "http.response.body", "body": part, "more_body": True})
        if self._num_left is not None:
            self._num_left -= len(part)
        self._is_whole = self._dialect.is_end(part) if self._is_stream else self._num_left == 0

    async def _tell(self, error: ApiError) -> None:
        """Report an error to the client, at whatever point the response is."""
        if not self._has_begun:
            raise error
        if self._is_stream:
            event = self._dialect.line(self._dialect.error(error)) + self._dialect.done
            await self._send({"type": "http.response.body", "body": event, "more_body": False})
        else:
            raise RuntimeError("a response was cut short")  # its reader sees that it is incomplete


async def _read(receive: Receive) -> bytes | None:
    """Return a body whose size has been checked, or None if the client has gone."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)

"""The server as a process: opens the port, loads the model, and serves requests until a signal.

Signals are handled only here. The first one lets running requests finish in time; the second one ends them at once.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import stat
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from specinfer.async_llm import AsyncLLM
from specinfer.core.queue_limits import QueueLimits
from specinfer.core.systems import STOP_SIGNALS, raise_max_descriptors
from specinfer.llm import LLM
from specinfer.server import logs
from specinfer.server.app import create_app
from specinfer.server.config import ServerConfig
from specinfer.server.connection import Connection
from specinfer.server.disconnect import cancel
from specinfer.server.observation import Observation
from specinfer.server.state import ServerState
from specinfer.server.supervision import notify, report_health

logger = logging.getLogger(__name__)

_FLUSH_SECONDS = 5  # time for the last events of streams whose requests have all ended
_TICK = 0.2
_BACKLOG = 256  # connections that wait to be accepted; the loop tries as often at once when descriptors run out
# The engine's thread needs the interpreter lock several times a step; Python's default, 5 ms, is as long as a step.
SWITCH_SECONDS = 0.0005


def leave_at_once(code: int) -> None:
    """Exit without cleaning up: an orderly exit is not safe while a thread is in native code."""
    logs.flush()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(code)


@dataclass(frozen=True, slots=True)
class Service:
    """The model to serve, and the settings to serve it with.

    Attributes:
        load: Loads the model; runs in its own thread while the port already answers.
        leave: Called with the exit code if the server is stopped and that thread or a pass does not end in time.
    """

    load: Callable[[], LLM]
    model: str
    names: tuple[str, ...]
    config: ServerConfig
    limits: QueueLimits
    leave: Callable[[int], None] = leave_at_once


def on_signal(loop: asyncio.AbstractEventLoop, number: int, stop: Callable[[int], None]) -> None:
    """Let the loop call a function with the number of a signal when it comes."""
    try:
        loop.add_signal_handler(number, stop, number)
    except NotImplementedError:  # Windows
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(stop, number))


def run(service: Service) -> int:
    """Serve until the process is stopped, and return its exit code.

    Raises:
        OSError: The address cannot be listened on.
        ModelError, ValueError: The model cannot be used.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    raise_max_descriptors()
    with listening(service.config) as listener:
        process = _Process(service, listener)
        code = asyncio.run(process.run())
    if process.leaves_thread:
        service.leave(code)
    return code


class _Process:
    """One run of the process, in stages."""

    def __init__(self, service: Service, listener: socket.socket) -> None:
        self._service, self._listener = service, listener
        self._state = ServerState(None, service.config, service.names, service.model)
        self._server = make_server(service.config, create_app(self._state))
        self._told, self._forced = asyncio.Event(), asyncio.Event()
        self._set_by = ""
        self.leaves_thread = False  # a thread is still loading or computing in native code

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            on_signal(loop, number, self._stop)
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        logger.info("listening on %s; loading %s", address(self._service.config, self._listener), self._service.model)
        try:
            llm = await self._wait_unless_stopped(_in_thread(self._service.load))
            if llm is None:
                self.leaves_thread = True
                logger.info("%s: the server ends before the model is loaded", self._set_by)
                return 0
            engine = AsyncLLM(llm, self._service.limits)
            return await self._serve(engine)
        finally:
            self._server.should_exit = True
            await self._serving

    async def _serve(self, engine: AsyncLLM) -> int:
        observation = Observation(engine, self._state)
        self._state.put_engine(engine)
        engine.start()
        self._announce(engine)
        notify("READY=1")
        watchdog = asyncio.create_task(report_health(engine.check_health))
        try:
            async with observation:
                while not (self._told.is_set() or engine.has_failed or engine.is_hung or self._serving.done()):
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._told.wait(), _TICK)
                return await self._end(engine)
        finally:
            await cancel(watchdog)
            self.leaves_thread = not await engine.shutdown(1.0)

    def _announce(self, engine: AsyncLLM) -> None:
        llm = engine.llm
        slots = llm.target.cache.num_slots
        logger.info("KV cache size: %s tokens", f"{slots:,}")
        if (stream := llm.target.loaded.stream) is not None:
            logger.info(
                "%d of %d layers stay in memory, %.2f GB are read for each pass",
                stream.num_resident, stream.num_layers, stream.bytes_per_pass / 1e9,
            )  # fmt: skip
        logger.info(
            "Maximum concurrency for %s tokens per request: %.2fx",
            f"{llm.max_model_len:,}",
            min(slots / llm.max_model_len, llm.max_num_seqs),
        )
        logger.info(
            "Application startup complete: %s as %s",
            address(self._service.config, self._listener),
            ", ".join(self._service.names),
        )

    async def _end(self, engine: AsyncLLM) -> int:
        """Wait until running requests end or time runs out, then end the rest; return the exit code."""
        self._state.is_stopping = True
        notify("STOPPING=1")
        if engine.has_failed:
            logger.critical("the engine failed; the server ends")
            return 1
        if engine.is_hung:
            limit = self._service.limits.max_step_seconds
            logger.critical("a step takes longer than %g seconds; the server ends, to be started again", limit)
            return 1
        seconds = self._service.config.shutdown_timeout
        logger.info(
            "%s: no new requests; %d outputs get %g seconds to end; once more ends them now",
            self._set_by, engine.num_live, seconds,
        )  # fmt: skip
        ended = await self._until_forced(engine.drain(seconds))
        if not ended:
            logger.warning("%d outputs did not end in time and end with an error", engine.num_live)
        stopped = await engine.shutdown(1.0 if self._forced.is_set() else 10.0)
        return 0 if stopped and not (self._forced.is_set() or engine.has_failed) else 1

    async def _wait_unless_stopped(self, work: "asyncio.Future[LLM]") -> LLM | None:
        """Return the loaded model, or None if the server is stopped before."""
        told = asyncio.create_task(self._told.wait())
        awaited: set[asyncio.Future[Any]] = {work, told, self._serving}
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
        return work.result() if work.done() else None

    async def _until_forced(self, work: Coroutine[None, None, bool]) -> bool:
        task, forced = asyncio.ensure_future(work), asyncio.create_task(self._forced.wait())
        await asyncio.wait({task, forced}, return_when=asyncio.FIRST_COMPLETED)
        for each in (task, forced):
            each.cancel()
        return task.done() and not task.cancelled() and task.result()

    def _stop(self, number: int) -> None:
        if self._told.is_set():
            self._forced.set()
            self._server.force_exit = True
        self._set_by = signal.Signals(number).name
        self._told.set()


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers, and with a time limit on TLS handshakes.

    Signals are handled in this module. A client that never begins its handshake would be kept for a minute.
    """

    def __init__(self, config: uvicorn.Config, handshake_timeout: float) -> None:
        super().__init__(config)
        self._handshake_timeout = handshake_timeout

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if not self.config.is_ssl:
            return await super().startup(sockets)
        loop: Any = asyncio.get_running_loop()  # uvicorn has no setting for it
        loop.create_server = partial(loop.create_server, ssl_handshake_timeout=self._handshake_timeout)
        try:
            await super().startup(sockets)
        finally:
            del loop.create_server

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(config: ServerConfig, app: ASGIApp) -> uvicorn.Server:
    """Return a uvicorn server for an application, with the configured limits and without signal handlers.

    Raises:
        OSError: The certificate or its key cannot be used.
    """
    # httptools, uvicorn's default, accepts heads of megabytes.
    connection = partial(Connection, limits=config)
    settings = uvicorn.Config(
        app,
        http=connection,  # type: ignore[arg-type]  # uvicorn only calls it
        ws="none",
        backlog=_BACKLOG,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=config.max_header_bytes,
        timeout_keep_alive=max(round(config.keep_alive_timeout), 1),
        timeout_graceful_shutdown=_FLUSH_SECONDS,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
    )
    try:
        settings.load()
    except OSError as error:  # includes errors of the ssl module
        raise OSError(f"ssl_certfile, ssl_keyfile: they cannot be used: {error.strerror or error}") from error
    return _Server(settings, config.body_timeout)


def _in_thread(load: Callable[[], LLM]) -> "asyncio.Future[LLM]":
    """Load in a daemon thread: a model that takes minutes must not keep a stopped process alive."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[LLM] = loop.create_future()

    def settle(llm: LLM | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        elif llm is not None:
            future.set_result(llm)

    def work() -> None:
        llm, error = None, None
        try:
            llm = load()
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, llm, error)

    threading.Thread(target=work, name="specinfer-loader", daemon=True).start()
    return future


@contextlib.contextmanager
def listening(config: ServerConfig) -> Iterator[socket.socket]:
    """Yield a bound socket; an address in use is reported before a model is loaded.

    Raises:
        OSError: The address cannot be used; the message names it.
    """
    place = config.uds or f"{config.host}:{config.port}"
    try:
        listener = _unix_socket(config.uds) if config.uds is not None else _tcp_socket(config.host, config.port)
    except OSError as error:
        raise OSError(f"{place} cannot be listened on: {error.strerror or error}; choose another") from error
    try:
        yield listener
    finally:
        listener.close()
        if config.uds is not None:
            with contextlib.suppress(OSError):
                os.unlink(config.uds)


def _tcp_socket(host: str, port: int) -> socket.socket:
    family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    # The IPv6 wildcard address covers both families.
    is_both = place[0] == "::" and socket.has_dualstack_ipv6()
    return socket.create_server((str(place[0]), port), family=family, backlog=2048, dualstack_ipv6=is_both)


def _unix_socket(path: str) -> socket.socket:
    if not hasattr(socket, "AF_UNIX"):
        raise OSError("this system has no Unix sockets")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.stat(path).st_mode) and not _is_answered(path):
                os.unlink(path)  # left by a process that was killed
        listener.bind(path)
        os.chmod(path, 0o660)  # a client that may write to the socket needs no key
    except OSError:
        listener.close()
        raise
    return listener


def _is_answered(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
        return True


def address(config: ServerConfig, listener: socket.socket) -> str:
    """Return the URL of the server."""
    if config.uds is not None:
        return f"unix:{config.uds}"
    host = f"[{config.host}]" if ":" in config.host else config.host
    scheme = "http" if config.ssl_certfile is None else "https"
    return f"{scheme}://{host}:{listener.getsockname()[1]}{config.root_path}"

"""The server as a process: opens the port, loads the model, and serves requests until a signal.

Signals are handled here, or come from the parent (`supervisor.py`). The first one lets running requests finish in time;
the second one ends them at once.
"""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import uvicorn

from specinfer.async_llm import AsyncLLM
from specinfer.core.limits import QueueLimits
from specinfer.core.systems import raise_max_descriptors, stop_signals
from specinfer.llm import LLM
from specinfer.server import logs
from specinfer.server.app import create_app
from specinfer.server.config import ServerConfig
from specinfer.server.connection import make_server
from specinfer.server.listening import address, listening
from specinfer.server.observation import Observation
from specinfer.server.state import ServerState
from specinfer.server.stream import cancel, run_until
from specinfer.server.supervisor import ACCEPTING, HEARTBEAT, ParentProcess, notify, watchdog_seconds

logger = logging.getLogger(__name__)

_TICK = 0.2
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
        parent: The process that starts this one again when it dies, if there is one.
    """

    load: Callable[[], LLM]
    model: str
    names: tuple[str, ...]
    config: ServerConfig
    limits: QueueLimits
    leave: Callable[[int], None] = leave_at_once
    parent: ParentProcess | None = None


def on_signal(loop: asyncio.AbstractEventLoop, number: int, stop: Callable[[int], None]) -> None:
    """Let the loop call a function with the number of a signal when it comes."""
    try:
        loop.add_signal_handler(number, stop, number)
    except NotImplementedError:  # Windows
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(stop, number))


class StopSignals:
    """The signals that stop a process: the first one lets requests end in time, a second one ends them at once.

    Attributes:
        stopping, forced: Set by the first and by the second signal.
        set_by: The name of the last signal.
    """

    def __init__(self, server: uvicorn.Server) -> None:
        self._server = server
        self.stopping, self.forced = asyncio.Event(), asyncio.Event()
        self.set_by = ""

    def stop(self, number: int) -> None:
        """Note that a signal has come."""
        if self.stopping.is_set():
            self.forced.set()
            self._server.force_exit = True
        self.set_by = signal.Signals(number).name
        self.stopping.set()

    async def come_before(self, *work: "asyncio.Future[Any]") -> bool:
        """Wait for any of the work, and return whether the process was stopped before all of it was done."""
        stopping = asyncio.create_task(self.stopping.wait())
        await asyncio.wait({*work, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        return not work[0].done()


def run(service: Service, listener: socket.socket | None = None) -> int:
    """Serve until the process is stopped, and return its exit code.

    Args:
        listener: The socket to serve on, or None to open the address of the configuration.

    Raises:
        OSError: The address cannot be listened on.
        ModelError, ValueError: The model cannot be used.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    raise_max_descriptors()
    with contextlib.nullcontext(listener) if listener is not None else listening(service.config) as place:
        process = _Process(service, place)
        code = asyncio.run(process.run())
    if process.leaves_thread:
        service.leave(code)
    return code


class _Process:
    """One run of the process, in stages."""

    def __init__(self, service: Service, listener: socket.socket) -> None:
        self._service, self._listener = service, listener
        last = ("", None) if service.parent is None else (service.parent.last_end, service.parent.ready_at)
        self._state = ServerState(None, service.config, service.names, service.model, *last)
        self._notify = notify if service.parent is None else service.parent.report
        self._server = make_server(service.config, create_app(self._state))
        self.signals = StopSignals(self._server)
        self.leaves_thread = False  # a thread is still loading or computing in native code

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        if self._service.parent is not None:
            self._service.parent.on_stop(lambda number: loop.call_soon_threadsafe(self.signals.stop, number))
        else:
            for number in stop_signals():
                on_signal(loop, number, self.signals.stop)
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        if self._service.parent is not None:
            self._service.parent.report(ACCEPTING)
        logger.info("listening on %s; loading %s", address(self._service.config, self._listener), self._service.model)
        try:
            loading = _in_thread(self._service.load)
            if await self.signals.come_before(loading, self._serving):
                self.leaves_thread = True
                logger.info("%s: the server ends before the model is loaded", self.signals.set_by)
                return 0
            engine = AsyncLLM(loading.result(), self._service.limits)
            return await self._serve(engine)
        finally:
            self._server.should_exit = True
            await self._serving

    async def _serve(self, engine: AsyncLLM) -> int:
        observation, stopping = Observation(engine, self._state), self.signals.stopping
        self._state.put_engine(engine)
        engine.start()
        gc.collect()
        gc.freeze()  # a collection that searches modules and models too keeps all threads waiting for 0.2 s
        self._announce(engine)
        self._notify("READY=1")
        watchdog = asyncio.create_task(self._report_health(engine))
        try:
            async with observation:
                while not (
                    self.signals.stopping.is_set() or engine.has_failed or engine.is_hung or self._serving.done()
                ):
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(stopping.wait(), _TICK)
                return await self._end(engine)
        finally:
            gc.unfreeze()
            await cancel(watchdog)
            self.leaves_thread = not await engine.shutdown(1.0)

    async def _report_health(self, engine: AsyncLLM) -> None:
        """Report to the parent and the watchdog of systemd, twice within its limit, while the engine is well."""
        seconds = min(watchdog_seconds() or HEARTBEAT, HEARTBEAT)
        while True:
            await engine.check_health()
            self._notify("WATCHDOG=1")
            await asyncio.sleep(seconds)

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
        self._notify("STOPPING=1")
        if engine.has_failed:
            logger.critical("the engine failed; its process ends")
            return 1
        if engine.is_hung:
            limit = self._service.limits.max_step_seconds
            logger.critical("a step takes longer than %g seconds; the process ends, to be started again", limit)
            return 1
        seconds = self._service.config.shutdown_timeout
        logger.info(
            "%s: no new requests; %d outputs get %g seconds to end; once more ends them now",
            self.signals.set_by, engine.num_live, seconds,
        )  # fmt: skip
        is_done, has_drained = await run_until(self.signals.forced.wait(), engine.drain(seconds))
        if not (is_done and has_drained):
            logger.warning("%d outputs did not end in time and end with an error", engine.num_live)
        await engine.shutdown(1.0 if self.signals.forced.is_set() else 10.0)
        # A text may take longer to read, which is no failure.
        return 0 if engine.has_stopped and not (self.signals.forced.is_set() or engine.has_failed) else 1


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

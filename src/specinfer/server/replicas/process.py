"""Replicas behind one port, as a process: opens the port, starts Ray and the replicas, and serves until a signal.

SIGTERM and SIGINT stop it as they stop a server with one engine. SIGUSR1 reads the settings again and replaces the
replicas one after another.
"""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from specinfer.core.errors import ModelError
from specinfer.core.systems import STOP_SIGNALS
from specinfer.server.connection import make_server
from specinfer.server.listening import address, listening
from specinfer.server.process import StopSignals, leave_at_once, on_signal
from specinfer.server.replicas.replica_set import Cluster, RayReplicaSet, deploy
from specinfer.server.replicas.router import RouterState, create_router
from specinfer.server.replicas.settings import ReplicaDeployment

logger = logging.getLogger(__name__)
_TICK = 0.1


@dataclass(frozen=True, slots=True)
class ReplicaService:
    """The deployment to serve, and the cluster to serve it on.

    Attributes:
        reload: Reads the settings again, for replicas that replace the old ones.
        leave: Called with the exit code if the process is stopped while Ray is starting something.
    """

    deployment: ReplicaDeployment
    cluster: Cluster
    reload: Callable[[], ReplicaDeployment]
    leave: Callable[[int], None] = leave_at_once


def run(service: ReplicaService) -> int:
    """Serve until the process is stopped, and return its exit code.

    Raises:
        OSError: The address cannot be listened on, or Ray cannot be used.
        ModelError: No replica could be started.
    """
    with listening(service.deployment.settings.server) as listener:
        process = _Process(service, listener)
        code = asyncio.run(process.run())
    if process.is_busy:
        service.cluster.remove_folder()
        service.leave(code)
    return code


class _Process:
    """One run of the process, in stages."""

    def __init__(self, service: ReplicaService, listener: socket.socket) -> None:
        settings = service.deployment.settings
        self._service, self._listener, self._config = service, listener, settings.server
        self._state = RouterState(settings.server, settings.names[0])
        self._server = make_server(settings.server, create_router(self._state))
        self._signals, self._renew = StopSignals(self._server), asyncio.Event()
        self._has_joined = False
        self._work: Future[Any] | None = None
        # One thread for all of Ray's work, as Ray's processes end with the thread that started them.
        self._ray = ThreadPoolExecutor(1, thread_name_prefix="specinfer-ray")

    @property
    def is_busy(self) -> bool:
        """True while Ray is starting something."""
        return self._work is not None and not self._work.done()

    async def run(self) -> int:
        self._catch_signals()
        serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        where = "a Ray of its own" if self._service.cluster.is_own else f"Ray at {self._service.cluster.address}"
        logger.info("listening on %s; starting replicas on %s", address(self._config, self._listener), where)
        try:
            if await self._wait_unless_stopped(self._start()):
                await self._serve()
            return await self._end()
        finally:
            self._server.should_exit = True
            await serving
            # Our own Ray must not be disturbed while it starts something; it ends with this process.
            if self._has_joined and not (self.is_busy and self._service.cluster.is_own):
                await asyncio.to_thread(self._service.cluster.leave)
            self._ray.shutdown(wait=False, cancel_futures=True)

    async def _start(self) -> None:
        await self._in_ray(self._service.cluster.join)
        self._has_joined = True
        self._catch_signals()  # Ray has replaced the handlers
        await self._deploy(self._service.deployment)
        scaling = self._service.deployment.scaling
        many = str(scaling.min_replicas) if scaling.is_fixed else f"{scaling.min_replicas} to {scaling.max_replicas}"
        logger.info(
            "Application startup complete: %s as %s, %s replicas",
            address(self._config, self._listener), ", ".join(self._service.deployment.settings.names), many,
        )  # fmt: skip

    async def _deploy(self, new: ReplicaDeployment) -> None:
        replica_set: RayReplicaSet = await self._in_ray(lambda: deploy(new.settings, new.scaling, new.resources))
        self._state.put_replica_set(replica_set)

    async def _serve(self) -> None:
        """Serve, and replace the replicas on request, until the process is stopped."""
        while not self._signals.stopping.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._signals.stopping.wait(), _TICK)
            if self._renew.is_set() and not self._signals.stopping.is_set():
                self._renew.clear()
                await self._replace()

    async def _replace(self) -> None:
        logger.info("SIGUSR1: the settings are read again, and replicas are replaced one after another")
        try:
            deployment = self._service.reload()
            if await self._wait_unless_stopped(self._deploy(deployment)):
                logger.info("all replicas are replaced")
        except (ModelError, ValueError) as error:
            logger.error("the replicas stay as they are, as far as they were not replaced: %s", error)

    async def _end(self) -> int:
        """Wait until running requests end or time runs out, then end the rest; return the exit code."""
        self._state.is_stopping = True
        seconds = self._config.shutdown_timeout
        logger.info(
            "%s: no new requests; %d requests get %g seconds to end; once more ends them now",
            self._signals.set_by, self._state.num_live, seconds,
        )  # fmt: skip
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._state.num_live and not self._signals.forced.is_set():
                    await asyncio.sleep(_TICK)
        if self._state.num_live:
            logger.warning("%d requests did not end in time and end with an error", self._state.num_live)
        self._state.ended.set()
        return 1 if self._signals.forced.is_set() else 0

    async def _wait_unless_stopped(self, work: Coroutine[Any, Any, None]) -> bool:
        """Return whether the work was done before the process was stopped; its thread runs on until Ray ends."""
        task = asyncio.ensure_future(work)
        if await self._signals.come_before(task):
            return False
        task.result()
        return True

    async def _in_ray(self, work: Callable[[], Any]) -> Any:
        self._work = self._ray.submit(work)
        return await asyncio.wrap_future(self._work)

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            on_signal(loop, number, self._signals.stop)
        if hasattr(signal, "SIGUSR1"):
            loop.add_signal_handler(signal.SIGUSR1, self._renew.set)

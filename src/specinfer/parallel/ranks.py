"""Ranks: all processes of a sharded target, from the view of rank 0, which starts, connects and watches them."""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from specinfer.core.errors import RanksError
from specinfer.core.parallel_config import ParallelConfig, Place, find_place
from specinfer.parallel.device_group import DeviceGroup, each_has_a_gpu
from specinfer.parallel.group import Channel, HostGroup, ShardSpec, Traffic
from specinfer.parallel.health import BEAT_SECONDS, STALE_BEATS, HeartbeatMonitor
from specinfer.parallel.processes import Processes, share_cores
from specinfer.parallel.rendezvous import Rendezvous, has_nccl, join_rendezvous

T = TypeVar("T")
logger = logging.getLogger(__name__)

_DIAGNOSIS_SECONDS = 4.0  # wait for the cause: a broken connection is noticed before it is known which rank broke it
_SHUTDOWN_SECONDS = 3.0
_TENSOR, _STAGES, _WORLD, _COMMANDS, _MESSAGES = range(1, 6)  # numbers of the groups


class Connections:
    """The groups of one rank.

    If each rank has its own GPU, tensors use connections between GPUs.

    Attributes:
        shard: Shard of the target that this rank computes.
        stages: Ranks that pass hidden states on to each other, from the last stage to the first.
        world: All ranks.
        commands: Messages from rank 0 to all others.
        messages: Messages between rank 0 and each of the others.
    """

    def __init__(self, rendezvous: Rendezvous, config: ParallelConfig, device: torch.device) -> None:
        self.traffic = Traffic()
        self._links, rank = rendezvous.links, rendezvous.place.rank
        width, num_stages = config.tensor_parallel_size, config.pipeline_parallel_size
        behind, tensor_rank = divmod(rank, width)  # stages between this one and the last

        def group(ranks: range, number: int) -> HostGroup:
            return HostGroup(self._links, ranks, rank, number, self.traffic)

        self.world = group(range(config.world_size), _WORLD)
        self._is_direct = each_has_a_gpu(self.world, rendezvous.place, device, is_available=has_nccl())

        def tensor_group(ranks: range, number: int) -> HostGroup | DeviceGroup:
            if not self._is_direct or len(ranks) == 1:
                return group(ranks, number)
            own, size = ranks.index(rank), len(ranks)
            return DeviceGroup(rendezvous.connect_devices(f"{number}/{ranks[0]}", own, size), own, size, self.traffic)

        first = behind * width
        tensor = tensor_group(range(first, first + width), _TENSOR)
        self.shard = ShardSpec(tensor, num_stages - 1 - behind, num_stages)
        self.stages = tensor_group(range(tensor_rank, config.world_size, width), _STAGES)
        others = range(1, config.world_size) if rank == 0 else range(1)
        self.commands = Channel(self._links, others, _COMMANDS, self.traffic)
        self.messages = Channel(self._links, others, _MESSAGES, self.traffic)
        self._device_groups = [each for each in (tensor, self.stages) if isinstance(each, DeviceGroup)]

    def connect(self, device: torch.device) -> None:
        """Let GPUs connect now, not at their first use: that takes memory of them, which caches must leave.

        All ranks call this together.
        """
        tensor, stages = self.shard.tensor, self.stages
        if isinstance(tensor, DeviceGroup):
            tensor.all_gather(torch.zeros(1, device=device))
        if isinstance(stages, DeviceGroup):
            mark = torch.zeros(1, device=device)
            if stages.rank + 1 < stages.size:
                stages.recv(mark, stages.rank + 1)
            if stages.rank > 0:
                stages.send(mark, stages.rank - 1)

    def abort(self) -> None:
        """End waits for other GPUs, from any thread; they would last forever."""
        for each in self._device_groups:
            each.abort()

    def close(self) -> None:
        """Close the groups and all connections, in the thread that uses GPUs; they cannot be used any more."""
        for each in self._device_groups:
            each.close()
        self._links.close()


class Ranks:
    """Rank 0's handle on the other ranks.

    Everything that waits for them runs in a separate thread. So an interrupt never leaves a pass half done, and a rank
    that hangs does not block the caller.

    Args:
        config: Number of ranks and their machines.
        wanted: Settings that must be the same on all ranks, by name.
        module: Module that a worker runs, as `python -m`.
        job: Function that returns the input line of the worker at a place.
        device: Device that rank 0 computes on.

    Raises:
        ValueError: The address cannot be used, or a rank was started with other settings.
        RanksError: Some ranks did not connect, or failed.
    """

    def __init__(
        self,
        config: ParallelConfig,
        wanted: Mapping[str, str],
        module: str,
        job: Callable[[Place], str],
        device: torch.device,
    ) -> None:
        place = find_place(config)
        if place.rank > 0:
            raise ValueError(
                f"RANK: torchrun started this process as rank {place.rank}, and the engine is on rank 0; run "
                "specinfer.setup.follower.follow with the same arguments here"
            )
        self.config = config
        self.failure: str | None = None
        self._is_closed = threading.Event()
        self._were_notified = False
        self._children: Processes | None = None
        self._rendezvous = join_rendezvous(place)
        self.place = self._rendezvous.place
        self._threads_before = share_cores(place.local_size)
        self._tasks, self._messages = _WorkerThread("specinfer-rank"), _WorkerThread("specinfer-messages")
        self._watcher = threading.Thread(target=self._watch, args=(module, job), name="specinfer-ranks", daemon=True)
        self._watcher.start()
        try:
            self._rendezvous.check_settings(wanted, self.check)
            self.connections = self.call(lambda: Connections(self._rendezvous, config, device))
        except BaseException:
            self.close()
            raise

    @property
    def shard(self) -> ShardSpec:
        return self.connections.shard

    @property
    def process_ids(self) -> list[int]:
        """Process ids of the ranks that this process has started."""
        return [] if self._children is None else self._children.ids

    def check(self) -> None:
        """Raise `RanksError` if a rank is lost, hangs or failed."""
        if self.failure is not None:
            raise RanksError(self.failure)

    def serve(self) -> None:
        """Shorten the time limit of heartbeats after loading."""
        self._monitor.limit = STALE_BEATS

    def submit(self, work: "Callable[[], T]") -> "Future[T]":
        """Run work in the thread that may wait for other ranks, after all work submitted before."""
        self.check()
        return self._tasks.add(work)

    def await_message(self, rank: int) -> "Future[Tensor]":
        """Return a future of the next message from a rank: [count] int32. It does not wait for passes in progress."""
        self.check()
        return self._messages.add(lambda: self.connections.messages.receive(rank))

    def result(self, future: "Future[T]") -> T:
        """Wait for a future and return its result.

        Raises:
            RanksError: A rank is lost, hangs or failed; any error of a group counts as that.
        """
        self.check()
        while not wait([future], BEAT_SECONDS).done:
            self.check()
        self.check()
        try:
            return future.result()
        except (RuntimeError, OSError) as error:
            raise RanksError(self._reason(error)) from error

    def call(self, work: "Callable[[], T]") -> T:
        """Run work in that thread and wait for it; raises as `result` does."""
        return self.result(self.submit(work))

    def fail(self, reason: str) -> None:
        """Mark the target as unusable, with the reason."""
        self.failure = self.failure or reason

    def _reason(self, error: Exception) -> str:
        """Return the reason for a broken connection, as soon as it is known which rank broke it."""
        end = time.monotonic() + _DIAGNOSIS_SECONDS
        while self.failure is None and time.monotonic() < end:
            time.sleep(BEAT_SECONDS / 10)
        self.fail(f"a pass over several ranks failed: {error}")
        assert self.failure is not None
        return self.failure

    # ----------------------------------------------------------------------- in the watching thread

    def _watch(self, module: str, job: Callable[[Place], str]) -> None:
        """Start the workers of this machine, which live as long as this thread, and watch all ranks."""
        first, count = self.place.rank + 1, self.place.num_started
        places = [replace(self.place, rank=first + i, local_rank=i + 1, num_started=0) for i in range(count)]
        try:
            self._monitor = HeartbeatMonitor(self._rendezvous.another(), range(1, self.place.world_size))
            children = self._children = Processes(module, [job(place) for place in places], self.place.local_size)
            while self.failure is None and not self._is_closed.wait(BEAT_SECONDS):
                if (number := children.ended()) is not None:
                    rank = places[number].rank
                    self.fail(
                        self._monitor.reported_error() or f"rank {rank} has ended with code {children.code(number)}"
                    )
                elif (wrong := self._monitor.check()) is not None:
                    self.fail(wrong)
            if self.failure is None and self._were_notified:
                children.wait(_SHUTDOWN_SECONDS)
            elif self.failure is not None:
                logger.critical("%s; the target cannot be used any more", self.failure)
                self._abort()
        except Exception as error:
            logger.exception("other ranks are not watched any more")
            self.fail(f"the ranks of this machine could not be started or watched: {error}")
        finally:
            if self._children is not None:
                self._children.kill()

    def close(self, stop_others: Callable[[], None] | None = None) -> None:
        """End the workers. Repeated calls do nothing.

        Args:
            stop_others: Function that lets them end in order, or None to kill them, as after a failure.
        """
        if self._is_closed.is_set():
            return
        if self.failure is None and stop_others is not None:
            with contextlib.suppress(Exception):
                self.submit(stop_others).result(_SHUTDOWN_SECONDS)
                self._were_notified = True
        self._is_closed.set()
        if self._watcher.is_alive():
            self._watcher.join(2 * _SHUTDOWN_SECONDS)
        self.fail("the ranks were ended")
        self._messages.end(_SHUTDOWN_SECONDS)
        self._tasks.add(self._disconnect)
        self._tasks.end(_SHUTDOWN_SECONDS)
        self._rendezvous.links.close()  # if that thread hangs
        if self._threads_before is not None:
            torch.set_num_threads(self._threads_before)

    def _abort(self) -> None:
        """End all waiting for other ranks, which might last forever and keep this process from ending."""
        connections: Connections | None = getattr(self, "connections", None)
        if connections is not None:
            with contextlib.suppress(RuntimeError):
                connections.abort()
        self._rendezvous.links.close()

    def _disconnect(self) -> None:
        """Close the connections in the thread that uses them: those between GPUs need it."""
        connections: Connections | None = getattr(self, "connections", None)
        if connections is not None:
            connections.close()


class _WorkerThread:
    """A thread that runs tasks in order. Unlike an executor's it is a daemon: it may hang at process exit."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._do_all, name=name, daemon=True)
        self._thread.start()

    def add(self, work: "Callable[[], T]") -> "Future[T]":
        future: Future[T] = Future()

        def do() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        self._queue.put(do)
        return future

    def end(self, seconds: float) -> None:
        """End the thread after all added work; if that hangs, wait no longer than this many seconds."""
        self._queue.put(None)
        self._thread.join(seconds)

    def _do_all(self) -> None:
        while (work := self._queue.get()) is not None:
            work()

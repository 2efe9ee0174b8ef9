"""Ranks: all processes that hold a target, as one of them sees them: started, met, connected and watched."""

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

from specinfer.errors import RanksError
from specinfer.parallel.config import ParallelConfig, Place, find_place
from specinfer.parallel.device_group import DeviceGroup, each_has_a_gpu
from specinfer.parallel.health import BEAT_SECONDS, STALE_BEATS, Watch
from specinfer.parallel.mail import Mail, Orders
from specinfer.parallel.processes import Processes, share_cores
from specinfer.parallel.rendezvous import Meeting, has_nccl, listen, meet
from specinfer.parallel.share import Share
from specinfer.parallel.torch_group import TorchGroup, Traffic

T = TypeVar("T")
logger = logging.getLogger(__name__)

_VERDICT_SECONDS = 4.0  # a broken connection is noticed before it is known who broke it
_FAREWELL_SECONDS = 3.0
_TENSOR, _STAGES, _WORLD, _ORDERS, _MAIL = range(1, 6)  # numbers of groups


class Connections:
    """The groups of one rank, over the same connections; between GPUs that are each one rank's, tensors have others.

    Args:
        device: That this rank computes on.

    Attributes:
        share: What this rank holds.
        stages: The ranks that pass hidden states on to each other, from the last stage to the first.
        world: All ranks.
        orders: From rank 0 to all others.
        mail: Between rank 0 and each of the others.
    """

    def __init__(self, meeting: Meeting, config: ParallelConfig, device: torch.device) -> None:
        self.traffic = Traffic()
        backend, rank = meeting.connect(), meeting.place.rank
        width, num_stages = config.tensor_parallel_size, config.pipeline_parallel_size
        behind, tensor_rank = divmod(rank, width)  # stages between this one and the last

        def group(ranks: range, number: int) -> TorchGroup:
            return TorchGroup(backend, ranks, rank, number, self.traffic)

        self.world = group(range(config.world_size), _WORLD)
        self._is_direct = each_has_a_gpu(self.world, meeting.place, device, is_available=has_nccl())

        def tensor_group(ranks: range, number: int) -> TorchGroup | DeviceGroup:
            if not self._is_direct or len(ranks) == 1:
                return group(ranks, number)
            own, size = ranks.index(rank), len(ranks)
            return DeviceGroup(meeting.connect_devices(f"{number}/{ranks[0]}", own, size), own, size, self.traffic)

        first = behind * width
        tensor = tensor_group(range(first, first + width), _TENSOR)
        self.share = Share(tensor, num_stages - 1 - behind, num_stages)
        self.stages = tensor_group(range(tensor_rank, config.world_size, width), _STAGES)
        self.orders = Orders(backend, rank, config.world_size, _ORDERS, self.traffic)
        others = range(1, config.world_size) if rank == 0 else range(1)
        self.mail = Mail(backend, rank, others, _MAIL, self.traffic)
        self._all = (tensor, self.stages, self.world, self.orders, self.mail)

    def abort(self) -> None:
        """Ends what waits for another GPU, from any thread: only connections over gloo break by themselves."""
        for each in self._all:
            if isinstance(each, DeviceGroup):
                each.abort()

    def close(self) -> None:
        """Gives them up; whoever still holds a group cannot use it."""
        for each in self._all:
            each.close()


class Ranks:
    """Rank 0's hold on the others. All that waits for them is done in a thread of its own, so that an interrupt never
    leaves a pass half done, and a rank that hangs keeps nobody.

    Args:
        wanted: What must be the same on all ranks, by name.
        module: What a worker runs, as `python -m`.
        job: The line that a worker at this place gets.
        device: That rank 0 computes on.

    Raises:
        ValueError: The address cannot be used, or a rank was started with something else.
        RanksError: Some did not come, or failed.
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
                "specinfer.follower.follow with the same arguments here"
            )
        self.config = config
        self.failure: str | None = None
        self._is_closed = threading.Event()
        self._were_told = False
        self._children: Processes | None = None
        listener = None if place.is_hosted else listen(place)
        self._meeting = meet(place, listener=listener)
        self.place = self._meeting.place
        self._threads_before = share_cores(place.local_size)
        self._works, self._letters = _Works("specinfer-rank"), _Works("specinfer-mail")
        self._keeper = threading.Thread(target=self._keep, args=(module, job), name="specinfer-ranks", daemon=True)
        self._keeper.start()
        try:
            self._meeting.agree(wanted, self.check)
            self.connections = self.call(lambda: Connections(self._meeting, config, device))
        except BaseException:
            self.close()
            raise

    @property
    def share(self) -> Share:
        return self.connections.share

    @property
    def process_ids(self) -> list[int]:
        """Of the ranks that this process has started."""
        return [] if self._children is None else self._children.ids

    def check(self) -> None:
        """Raises `RanksError` if a rank is gone, hangs or failed."""
        if self.failure is not None:
            raise RanksError(self.failure)

    def serve(self) -> None:
        """Loading is over: from now on a rank that stands still for a moment hangs."""
        self._watch.limit = STALE_BEATS

    def submit(self, work: "Callable[[], T]") -> "Future[T]":
        """Has it done in the thread that may wait for other ranks, after what was submitted before."""
        self.check()
        return self._works.add(work)

    def await_message(self, rank: int) -> "Future[Tensor]":
        """The next one from there: [count] int32. Passes that are under way meanwhile do not hold it up."""
        self.check()
        return self._letters.add(lambda: self.connections.mail.take(rank))

    def result(self, future: "Future[T]") -> T:
        """What came of it.

        Raises:
            RanksError: A rank is gone, hangs or failed; whatever a group raises is taken for that.
        """
        self.check()
        while not wait([future], BEAT_SECONDS).done:
            self.check()
        self.check()
        try:
            return future.result()
        except (RuntimeError, OSError) as error:
            raise RanksError(self._why(error)) from error

    def call(self, work: "Callable[[], T]") -> T:
        """Does it there, and waits for it; raises as `result` does."""
        return self.result(self.submit(work))

    def fail(self, why: str) -> None:
        """The target cannot be used any more."""
        self.failure = self.failure or why

    def _why(self, error: Exception) -> str:
        """Who broke a connection, as soon as it is known."""
        end = time.monotonic() + _VERDICT_SECONDS
        while self.failure is None and time.monotonic() < end:
            time.sleep(BEAT_SECONDS / 10)
        self.fail(f"a pass over several ranks failed: {error}")
        assert self.failure is not None
        return self.failure

    # ----------------------------------------------------------------------- in the keeper's thread

    def _keep(self, module: str, job: Callable[[Place], str]) -> None:
        """Starts the workers of this machine, which live as long as this thread, and watches all ranks."""
        first, count = self.place.rank + 1, self.place.num_started
        places = [replace(self.place, rank=first + i, local_rank=i + 1, num_started=0) for i in range(count)]
        try:
            self._watch = Watch(self._meeting.another(), range(1, self.place.world_size))
            children = self._children = Processes(module, [job(place) for place in places], self.place.local_size)
            while self.failure is None and not self._is_closed.wait(BEAT_SECONDS):
                if (number := children.ended()) is not None:
                    rank = places[number].rank
                    self.fail(self._watch.said() or f"rank {rank} has ended with code {children.code(number)}")
                elif (wrong := self._watch.look()) is not None:
                    self.fail(wrong)
            if self.failure is None and self._were_told:
                children.wait(_FAREWELL_SECONDS)
            elif self.failure is not None:
                logger.critical("%s; the target cannot be used any more", self.failure)
                self._abort()
        except Exception as error:
            logger.exception("other ranks are not watched any more")
            self.fail(f"the ranks of this machine could not be started or watched: {error}")
        finally:
            if self._children is not None:
                self._children.kill()

    def close(self, farewell: Callable[[], None] | None = None) -> None:
        """Ends the workers; called more than once, it does nothing.

        Args:
            farewell: What lets them end by themselves; None: they are killed, as where something has failed.
        """
        if self._is_closed.is_set():
            return
        if self.failure is None and farewell is not None:
            with contextlib.suppress(Exception):
                self.submit(farewell).result(_FAREWELL_SECONDS)
                self._were_told = True
        self._is_closed.set()
        if self._keeper.is_alive():
            self._keeper.join(2 * _FAREWELL_SECONDS)
        self.fail("the ranks were ended")
        self._letters.end(_FAREWELL_SECONDS)
        self._works.add(self._disconnect)
        self._works.end(_FAREWELL_SECONDS)
        if self._threads_before is not None:
            torch.set_num_threads(self._threads_before)

    def _abort(self) -> None:
        """A GPU that waits for another would wait for ever, and this process with it when it is to end."""
        connections: Connections | None = getattr(self, "connections", None)
        if connections is not None:
            with contextlib.suppress(RuntimeError):
                connections.abort()

    def _disconnect(self) -> None:
        """In the thread that uses them; left to the end of the process, they would end it with an error."""
        connections: Connections | None = getattr(self, "connections", None)
        if connections is not None:
            connections.close()


class _Works:
    """A thread that does one thing after the other; a daemon, unlike an executor's: it may hang as the process ends."""

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
        """After what was added; it may hang, in something that nobody waits for."""
        self._queue.put(None)
        self._thread.join(seconds)

    def _do_all(self) -> None:
        while (work := self._queue.get()) is not None:
            work()

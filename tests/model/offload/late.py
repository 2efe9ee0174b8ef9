"""A device that is late: what it is told to do waits in two queues, and chance decides when which of them moves on.

It has no memory of its own; its buffers are tensors on the CPU. What is read before it was copied, or overwritten
before its last use, is found by whoever looks at the bytes.
"""

import threading
from collections import deque
from collections.abc import Callable
from random import Random

import torch
from torch import Tensor

from specinfer.model.offload.transfer import Copy, Event

POISON = 0xEE  # in buffers that nobody has written to
_PIECES = 4  # a copy takes its time

Step = Callable[[], bool]  # does something of what is first in a queue; False: it has to wait


class LateEvent:
    def __init__(self, link: "LateLink") -> None:
        self._link = link
        self.is_reached = False

    def reach(self) -> bool:
        self.is_reached = True
        return True

    def synchronize(self) -> None:
        self._link.num_waits += threading.current_thread() is threading.main_thread()
        self._link.run_until(lambda: self.is_reached)

    def query(self) -> bool:
        return self.is_reached

    def elapsed_time(self, end_event: Event) -> float:
        assert self.is_reached
        assert end_event.query()
        return self._link.milliseconds


class LateLink:
    """See `DeviceTransfer`.

    Args:
        eager: What is computed is computed at once, as PyTorch does on a CPU; only copies are late.
        milliseconds: What its clock says of any two events.
    """

    def __init__(self, seed: int = 0, *, eager: bool = False, milliseconds: float = 1.0) -> None:
        self._chance, self._eager, self.milliseconds = Random(seed), eager, milliseconds
        self._bias = self._chance.choice([0.03, 0.5, 0.97])  # whether one queue runs far ahead of the other
        self._copies: deque[Step] = deque()
        self._kernels: deque[Step] = deque()
        self._lock = threading.RLock()
        self.pinned: dict[int, int] = {}  # address -> bytes
        self.num_waits = 0  # of the main thread, for the device
        self.num_copies = 0
        self.is_stuck = False

    def buffer(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), POISON, dtype=torch.uint8)

    def pin(self, memory: Tensor) -> None:
        assert memory.data_ptr() not in self.pinned
        self.pinned[memory.data_ptr()] = memory.nbytes

    def unpin(self, memory: Tensor) -> None:
        del self.pinned[memory.data_ptr()]

    def copy(self, source: Tensor, into: Tensor, after: Event | None) -> Copy:
        assert self.pinned[source.data_ptr()] >= source.nbytes
        started, done = LateEvent(self), LateEvent(self)
        self.num_copies += 1
        with self._lock:
            if after is not None:
                self._copies.append(after.query)
            self._copies.append(started.reach)
            for one, other in zip(into.chunk(_PIECES), source.chunk(_PIECES), strict=True):
                self._copies.append(lambda one=one, other=other: one.copy_(other) is one)
            self._copies.append(done.reach)
        self._some()
        return Copy(started, done)

    def record(self) -> Event:
        event = LateEvent(self)
        self._compute(event.reach)
        return event

    def wait(self, event: Event) -> None:
        self._compute(event.query)

    def launch(self, kernel: Callable[[], None]) -> None:
        """Computes something, some time; what it reads must be there all the while."""

        def run() -> bool:
            kernel()
            return True

        for _ in range(3):
            self._compute(run)

    def finish(self) -> None:
        self.num_waits += 1
        self.run_until(lambda: not self._copies and not self._kernels)

    def run_until(self, is_over: Callable[[], bool]) -> None:
        while True:
            with self._lock:
                if is_over():
                    return
                one, other = self._queues()
                moved = self._step(one) or self._step(other)
                # In a reader's thread it may be the main thread that brings what is waited for.
                assert moved or threading.current_thread() is not threading.main_thread(), "the queues are stuck"

    def _compute(self, step: Step) -> None:
        with self._lock:
            self._kernels.append(step)
        if self._eager:
            self.run_until(lambda: not self._kernels)
        self._some()

    def _some(self) -> None:
        with self._lock:
            while not self.is_stuck and self._chance.random() < 0.7:
                self._step(self._queues()[0])

    def _queues(self) -> tuple[deque[Step], deque[Step]]:
        """The one that moves, and the other."""
        if self._chance.random() < self._bias:
            return self._copies, self._kernels
        return self._kernels, self._copies

    @staticmethod
    def _step(queue: deque[Step]) -> bool:
        if not queue or not queue[0]():
            return False
        queue.popleft()
        return True

"""The way from host memory to a device: what a device must be able to do so that layers are streamed to it.

A device has two queues, one that computes and one that copies. Events order them: a copy begins when the kernels that
read what was there are over, and kernels begin when the copy is. Only the device waits for these.
"""

import threading
from collections import deque
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from specinfer.errors import ModelError


class Event(Protocol):
    """A place in a queue, as `torch.cuda.Event`."""

    def synchronize(self) -> None:
        """The calling thread waits until the queue has come here."""

    def query(self) -> bool:
        """Whether it has."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from here to a later place; both were reached."""


class Copy(NamedTuple):
    """Begins once what it had to wait for is over."""

    started: Event
    done: Event


class Link(Protocol):
    """A device and its two queues."""

    def buffer(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8 on the device."""

    def pin(self, memory: Tensor) -> None:
        """Lets the device copy from host memory, which begins with a page, by itself.

        Raises:
            ModelError: The system refuses.
        """

    def unpin(self, memory: Tensor) -> None:
        """Before the memory is given back."""

    def copy(self, source: Tensor, into: Tensor, after: Event | None) -> Copy:
        """Bytes of pinned memory to the device, on the queue that copies."""

    def record(self) -> Event:
        """Reached when all that was to be computed so far is."""

    def wait(self, event: Event) -> None:
        """What is to be computed from now on begins after the event."""

    def finish(self) -> None:
        """The calling thread waits until all copies are done, and all that was to be computed is."""


class CudaLink:
    """That of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = torch.cuda.Stream(device)

    def buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def pin(self, memory: Tensor) -> None:
        # PyTorch's own pinned memory comes in powers of two, up to twice what is asked for.
        with torch.cuda.device(self._device):
            code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
        if code:
            raise ModelError(
                f"offload: {memory.nbytes / 2**20:.0f} MiB of host memory cannot be pinned (CUDA error {code}); raise "
                'memory_budget so that more layers stay on the device, or use offload="disk"'
            )

    def unpin(self, memory: Tensor) -> None:
        code = int(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))
        assert code == 0, f"CUDA error {code}"

    def copy(self, source: Tensor, into: Tensor, after: Event | None) -> Copy:
        with torch.cuda.stream(self._copies):
            if after is not None:
                self._copies.wait_event(after)  # type: ignore[arg-type]
            started = self._record(self._copies)
            into.copy_(source, non_blocking=True)
            return Copy(started, self._record(self._copies))

    def record(self) -> Event:
        return self._record(torch.cuda.current_stream(self._device))

    def wait(self, event: Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)  # type: ignore[arg-type]

    def finish(self) -> None:
        torch.cuda.synchronize(self._device)

    @staticmethod
    def _record(stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record(stream)
        return event


class Stopwatch:
    """Adds up how long a device took between events, without waiting for them."""

    def __init__(self) -> None:
        self._spans: deque[tuple[Event, Event]] = deque()
        self._seconds = 0.0
        self._lock = threading.Lock()

    def add(self, start: Event, end: Event) -> None:
        """In the order in which they are reached."""
        with self._lock:
            self._spans.append((start, end))
            self._collect()

    @property
    def seconds(self) -> float:
        """Of what is over; may be asked by any thread."""
        with self._lock:
            self._collect()
            return self._seconds

    def _collect(self) -> None:
        while self._spans and self._spans[0][1].query():
            start, end = self._spans.popleft()
            self._seconds += start.elapsed_time(end) / 1000

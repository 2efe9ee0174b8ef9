"""Transfer from host memory to a device: the operations that a device must offer for streaming layers.

A device has two queues, one for computing and one for copies. Events order them: a copy begins after the kernels that
read the old contents, and kernels begin after the copy. Only the device waits for events.
"""

import contextlib
import threading
from collections import deque
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from specinfer.core.errors import ModelError


class Event(Protocol):
    """A place in a queue, as `torch.cuda.Event`."""

    def synchronize(self) -> None:
        """Block the calling thread until the queue has reached this place."""

    def query(self) -> bool:
        """Return whether the queue has reached this place."""

    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds from here to a later place; the queue must have reached both."""


class Copy(NamedTuple):
    """The events before and after a copy, which starts once the event it waits for is reached."""

    started: Event
    done: Event


class DeviceTransfer(Protocol):
    """A device and its two queues."""

    def buffer(self, num_bytes: int) -> Tensor:
        """Return a [num_bytes] uint8 tensor on the device."""

    def pin(self, memory: Tensor) -> None:
        """Pin page-aligned host memory, so that the device can copy from it by itself.

        Raises:
            ModelError: The system refuses.
        """

    def unpin(self, memory: Tensor) -> None:
        """Unpin memory; required before it is freed."""

    def copy(self, source: Tensor, into: Tensor, after: Event | None) -> Copy:
        """Queue a copy of bytes from pinned memory to the device."""

    def record(self) -> Event:
        """Return an event that is reached when all computing queued so far is done."""

    def wait(self, event: Event) -> None:
        """Make all computing queued from now on wait for the event."""

    def finish(self) -> None:
        """Block the calling thread until all copies and all computing are done."""


class _CudaEvent(torch.cuda.Event):
    """An event that any thread may wait for: where another GPU is the current one, CUDA would allocate memory there."""

    def synchronize(self) -> None:
        with torch.cuda.device(self.device):
            super().synchronize()

    def query(self) -> bool:
        with torch.cuda.device(self.device):
            return bool(super().query())  # type: ignore[no-untyped-call]


class CudaTransfer:
    """The transfers to a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = torch.cuda.Stream(device)

    def buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def pin(self, memory: Tensor) -> None:
        # PyTorch's own pinned memory comes in powers of two, up to twice the size asked for.
        with torch.cuda.device(self._device):
            code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
            if code:
                with contextlib.suppress(RuntimeError):  # else PyTorch would report this error at the next launch
                    torch.ones(1, device=self._device)
        if code:
            raise ModelError(
                f"offload: {memory.nbytes / 2**20:.0f} MiB of host memory cannot be pinned (CUDA error {code}); raise "
                'memory_budget so that more layers stay on the device, or use offload="disk"'
            )

    def unpin(self, memory: Tensor) -> None:
        with torch.cuda.device(self._device):
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
        event = _CudaEvent(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event


class Stopwatch:
    """The total time in seconds that a device took between pairs of events, measured without waiting for them."""

    def __init__(self) -> None:
        self._spans: deque[tuple[Event, Event]] = deque()
        self._seconds = 0.0
        self._lock = threading.Lock()

    def add(self, start: Event, end: Event) -> None:
        """Add a time span; spans must be added in the order in which they are reached."""
        with self._lock:
            self._spans.append((start, end))
            self._collect()

    @property
    def seconds(self) -> float:
        """Seconds of the finished spans; any thread may read it."""
        with self._lock:
            self._collect()
            return self._seconds

    def _collect(self) -> None:
        while self._spans and self._spans[0][1].query():
            start, end = self._spans.popleft()
            self._seconds += start.elapsed_time(end) / 1000

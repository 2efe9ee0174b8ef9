"""Bandwidth of memory, and of copies from host to device: the limits of passes that use each weight once.

No one operation reads memory fastest on every machine, so several are tried and the fastest counts. All of them are
PyTorch operations, with all threads, over far more bytes than any cache holds. The bandwidth of a shared machine
varies, so the result of each round is kept in addition to the best.
"""

import time
from collections.abc import Callable

import torch

from specinfer.bench.clock import now
from specinfer.model.offload.direct import pages
from specinfer.model.offload.transfer import DeviceTransfer

NUM_BYTES = 2**30
_COLUMNS = 2**14
_COPIES = 8  # copies of each of the two buffers between readings of the clock


class Bandwidth:
    """Bytes per second of several ways to read one buffer, by round."""

    def __init__(self, device: torch.device, num_bytes: int = NUM_BYTES) -> None:
        assert num_bytes % (8 * _COLUMNS) == 0
        # Ones, because pages of zeros that were never written may all map to one page, which stays in the cache.
        floats = torch.ones(num_bytes // 4, device=device)
        one, other = floats.chunk(2)
        rows, vector = floats.view(-1, _COLUMNS), torch.ones(_COLUMNS, device=device)
        self._ways: dict[str, Callable[[], object]] = {
            "sum of int64": floats.view(torch.int64).sum,
            "sum of float32": floats.sum,
            "sums of rows": lambda: rows.sum(dim=1),
            "dot product": lambda: torch.dot(one, other),
            "matrix by vector": lambda: torch.mv(rows, vector),
            "copy": lambda: one.copy_(other),  # reads one half and writes the other
        }
        self._device, self._num_bytes = device, num_bytes
        self.rates: dict[str, list[float]] = {name: [] for name in self._ways}

    def measure(self) -> None:
        """Measure each way once more."""
        for name, run in self._ways.items():
            started = now(self._device)
            run()
            self.rates[name].append(self._num_bytes / (now(self._device) - started))


class LinkBandwidth:
    """Bytes per second of copies from host memory to a device: the limit of a pass whose weights are on the host.

    Copies from pinned memory run back to back in one stream, as the copies of streamed layers do.
    """

    def __init__(self, link: DeviceTransfer, num_bytes: int = 64 * 2**20) -> None:
        self._link, self._num_bytes, self._way = link, num_bytes, f"{num_bytes / 2**20:g} MiB"
        self._pairs = [(pages(num_bytes), link.buffer(num_bytes)) for _ in range(2)]
        for host, _ in self._pairs:
            host.fill_(1)  # pages that were never written may all map to one
            link.pin(host)
        self.rates: dict[str, list[float]] = {self._way: []}

    @property
    def is_direct(self) -> bool:
        """True, since no cache is in between."""
        return True

    def measure(self, seconds: float) -> float:
        """Copy for about the given number of seconds, and return the bytes per second."""
        started, num_copied, spent = time.perf_counter(), 0, 0.0
        while not num_copied or time.perf_counter() < started + seconds:
            copies = [self._link.copy(host, there, None) for _ in range(_COPIES) for host, there in self._pairs]
            copies[-1].done.synchronize()
            spent += copies[0].started.elapsed_time(copies[-1].done) / 1000
            num_copied += len(copies)
        self.rates[self._way].append(num_copied * self._num_bytes / spent)
        return self.rates[self._way][-1]

    def close(self) -> None:
        """Release the memory."""
        self._link.finish()
        for host, _ in self._pairs:
            self._link.unpin(host)
        self._pairs = []

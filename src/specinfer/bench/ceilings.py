"""Peak rates of a device, in bytes and operations per second, measured in the run that uses them.

On a GPU, the bytes are those that a copy reads and writes, timed on the device itself. On a CPU, memory is only read,
in the fastest way for that CPU (`Bandwidth`).
"""

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from specinfer.ops.cpu.peak import multiply_adds_per_second

NUM_BYTES = 2**30  # far more than any cache holds
_COLUMNS = 2**14
_GPU_BYTES = 2 * 2**30  # of each of two buffers, far more than any cache holds
_GPU_SIDE = 8192
_CPU_BYTES = 2**28
_CPU_SIDE = 1024
_CPU_ROUNDS = 2
_REPEATS = 10
_WARMUPS = 3


def now(device: torch.device) -> float:
    """Wait for all work of the device, and return the time in seconds. GPU work outlasts the call that starts it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def time_second(device: torch.device, run: Callable[[], object]) -> float:
    """Run work twice, and return the seconds of the second time, with what it needs in caches."""
    run()
    started = now(device)
    run()
    return now(device) - started


class Bandwidth:
    """Bytes per second of several ways to read one buffer, by round.

    No one operation reads memory fastest on every machine, and the bandwidth of a shared machine varies.
    """

    def __init__(self, device: torch.device, num_bytes: int = NUM_BYTES) -> None:
        assert num_bytes % (8 * _COLUMNS) == 0
        # Ones, because pages of zeros that were never written may all map to one page, which stays in the cache.
        floats = torch.ones(num_bytes // 4, device=device)
        first, second = floats.chunk(2)
        rows, vector = floats.view(-1, _COLUMNS), torch.ones(_COLUMNS, device=device)
        self._ways: dict[str, Callable[[], object]] = {
            "sum of int64": floats.view(torch.int64).sum,
            "sum of float32": floats.sum,
            "sums of rows": lambda: rows.sum(dim=1),
            "dot product": lambda: torch.dot(first, second),
            "matrix by vector": lambda: torch.mv(rows, vector),
            "copy": lambda: first.copy_(second),  # reads one half and writes the other
        }
        self._device, self._num_bytes = device, num_bytes
        self.rates: dict[str, list[float]] = {name: [] for name in self._ways}

    def measure(self) -> None:
        """Measure each way once more."""
        for name, run in self._ways.items():
            started = now(self._device)
            run()
            self.rates[name].append(self._num_bytes / (now(self._device) - started))


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured peak rates of a device.

    Attributes:
        bytes_per_second: Memory bandwidth.
        flops_per_second: Rate of products of large random matrices in the computation dtype; on a CPU in float32 if
            that is faster, because native kernels widen types that have no instructions.
        code_ops_per_second: Rate of a CPU's products of 4-bit codes without loads, two operations each; None on a GPU.
    """

    bytes_per_second: float
    flops_per_second: float
    code_ops_per_second: float | None = None

    def seconds(self, num_bytes: float, num_flops: float) -> float:
        """Return the least time of work that reads `num_bytes` and computes `num_flops` at the same time."""
        rate = max(self.flops_per_second, self.code_ops_per_second or 0.0)
        return max(num_bytes / self.bytes_per_second, num_flops / rate)

    def as_dict(self) -> dict[str, float]:
        rates = {"gb_per_s": self.bytes_per_second / 1e9, "tflop_per_s": self.flops_per_second / 1e12}
        if self.code_ops_per_second is not None:
            rates["top_per_s_of_codes"] = self.code_ops_per_second / 1e12
        return rates

    def __str__(self) -> str:
        rates = f"{self.bytes_per_second / 1e9:,.4g} GB/s, {self.flops_per_second / 1e12:,.3g} TFLOP/s"
        if self.code_ops_per_second is None:
            return rates
        return f"{rates}, {self.code_ops_per_second / 1e12:,.3g} TOP/s of codes"


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measure the peak rates of a device. This takes at most a second, and some GiB that are freed afterwards."""
    if device.type == "cuda":
        flops = _product_rate(device, dtype, _GPU_SIDE)
        torch.cuda.empty_cache()
        return Ceilings(_copy_rate(device), flops)
    flops = max(_product_rate(device, each, _CPU_SIDE) for each in {dtype, torch.float32})
    return Ceilings(_read_rate(device), flops, 2 * multiply_adds_per_second())


def _product_rate(device: torch.device, dtype: torch.dtype, side: int) -> float:
    """Return the floating-point operations per second of a product of random matrices [side, side]."""
    source = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(side, side, device=device, generator=source).to(dtype) for _ in range(2))
    product = torch.empty_like(left)
    return 2 * side**3 / _seconds(device, lambda: torch.mm(left, right, out=product))


def _copy_rate(device: torch.device) -> float:
    size = min(_GPU_BYTES, torch.cuda.mem_get_info(device)[0] // 4)
    one, other = (torch.ones(size // 4, device=device) for _ in range(2))
    return 2 * one.nbytes / _seconds(device, lambda: one.copy_(other))


def _read_rate(device: torch.device) -> float:
    bandwidth = Bandwidth(device, _CPU_BYTES)
    for _ in range(_CPU_ROUNDS):
        bandwidth.measure()
    return max(max(rates) for rates in bandwidth.rates.values())


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Return the seconds of the work after warm-up.

    On a GPU this is the median of times taken on the device. On a CPU, which is shared, it is the best time.
    """
    is_gpu = device.type == "cuda"
    for _ in range(_WARMUPS if is_gpu else 1):
        work()
    if is_gpu:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(_REPEATS + 1)]
        marks[0].record()
        for mark in marks[1:]:
            work()
            mark.record()
        torch.cuda.synchronize(device)
        between: list[float] = [one.elapsed_time(other) for one, other in itertools.pairwise(marks)]  # milliseconds
        return statistics.median(between) / 1000
    times = []
    for _ in range(_WARMUPS):
        started = now(device)
        work()
        times.append(now(device) - started)
    return min(times)

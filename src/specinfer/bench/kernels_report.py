"""Measured pass times of a model, and the statistics computed from them. Nothing is timed or plotted here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from specinfer.bench.environment import Environment
from specinfer.bench.kernels_attention import AttentionTimes
from specinfer.bench.report import Spread


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to compute the model; dtype is a key of `DTYPES`."""

    dtype: str
    native: bool
    quantization: str | None = None

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.dtype, self.quantization, "native" if self.native else "torch")))


class Pass(NamedTuple):
    """Pass to time: a tree or draft level of `size` nodes, a prompt, or one row after a context, of `size` tokens."""

    kind: str
    size: int


TREE, PROMPT, LEVEL, CONTEXT = "tree", "prompt", "level", "context"


@dataclass(frozen=True, slots=True)
class ArmTimes:
    """Seconds of each pass of one arm in each repeat.

    Attributes:
        weight_bytes: Bytes of the target's weights that a pass reads.
    """

    arm: Arm
    weight_bytes: int
    seconds: Mapping[Pass, tuple[float, ...]]

    def ms(self, timed: Pass) -> Spread:
        return Spread.of(1000 * seconds for seconds in self.seconds[timed])

    def sizes(self, kind: str) -> list[int]:
        """Return the measured sizes of one kind, ascending."""
        return sorted(timed.size for timed in self.seconds if timed.kind == kind)

    def ratio(self, timed: Pass, base: Pass) -> Spread:
        """Return the time of one pass divided by that of another, in each repeat."""
        return _ratios(self.seconds[timed], self.seconds[base])

    def relative(self, num_rows: int) -> Spread:
        """Return the time of a tree of `num_rows` nodes divided by that of a single node."""
        return self.ratio(Pass(TREE, num_rows), Pass(TREE, 1))

    def bytes_per_second(self, num_rows: int) -> float:
        """Return the bytes of weights that the median pass reads per second."""
        return 1000 * self.weight_bytes / self.ms(Pass(TREE, num_rows)).median


@dataclass(frozen=True, slots=True)
class KernelsReport:
    """Times of all arms, measured in turns, and the machine's memory bandwidth.

    Attributes:
        bandwidth: Bytes per second of each way to read memory, by round.
        kernels: Description of the available native kernels.
        attention: Times of one layer's attention; empty unless on a GPU.
    """

    arms: tuple[ArmTimes, ...]
    bandwidth: Mapping[str, tuple[float, ...]]
    kernels: str
    options: Mapping[str, object]
    environment: Environment
    attention: tuple[AttentionTimes, ...] = ()

    @property
    def fastest_way(self) -> str:
        """Name of the fastest way to read memory."""
        return max(self.bandwidth, key=lambda name: max(self.bandwidth[name]))

    @property
    def limit(self) -> float:
        """Memory bandwidth in bytes per second: the best of all rounds, since other load can only reduce it."""
        return max(self.bandwidth[self.fastest_way])

    @property
    def rounds(self) -> Spread:
        """Bytes per second of the best way in each round, which shows how steady the machine was."""
        return Spread.of(map(max, zip(*self.bandwidth.values(), strict=True)))

    def over_torch(self, times: ArmTimes, timed: Pass) -> Spread | None:
        """Return PyTorch's time in the same dtype divided by this arm's in each repeat, or None for PyTorch itself."""
        own = Arm(times.arm.dtype, native=False)
        for other in self.arms:
            if other.arm == own != times.arm:
                return _ratios(other.seconds[timed], times.seconds[timed])
        return None

    def of_first(self, times: ArmTimes) -> Spread:
        """Return this arm's time of a single row divided by the first arm's, in each repeat."""
        single = Pass(TREE, 1)
        return _ratios(times.seconds[single], self.arms[0].seconds[single])

    def as_dict(self) -> dict[str, object]:
        """Return the report as values that JSON can hold."""
        return {
            "bandwidth_gb_per_s": self.limit / 1e9,
            "bandwidth_by_way": {name: max(rates) / 1e9 for name, rates in self.bandwidth.items()},
            "bandwidth_rounds": {"median": self.rounds.median / 1e9, "min": self.rounds.min / 1e9},
            "kernels": self.kernels,
            "arms": {times.arm.name: self._arm_as_dict(times) for times in self.arms},
            "attention": [times.as_dict(self.limit) for times in self.attention],
            "options": dict(self.options),
            "environment": self.environment.as_dict(),
        }

    def _arm_as_dict(self, times: ArmTimes) -> dict[str, object]:
        trees = []
        for rows in times.sizes(TREE):
            relative, rate = times.relative(rows), times.bytes_per_second(rows)
            numbers: dict[str, object] = {
                "rows": rows,
                **self._timed_as_dict(times, Pass(TREE, rows)),
                "relative": relative.median,
                "relative_spread": relative.as_dict(),
                "gb_per_s": rate / 1e9,
                "percent_of_bandwidth": 100 * rate / self.limit,
            }
            trees.append(numbers)
        prompts = [
            {"tokens": size, **self._timed_as_dict(times, Pass(PROMPT, size)), "tokens_per_second": prompt_rate(times)}
            for size in times.sizes(PROMPT)
        ]
        return {
            "dtype": times.arm.dtype,
            "native": times.arm.native,
            "quantization": times.arm.quantization,
            "weight_bytes": times.weight_bytes,
            "one_row_of_first_arm": self.of_first(times).median,
            "rows": trees,
            "prompt": prompts[0],
            "draft_level": [
                {"nodes": size, **self._timed_as_dict(times, Pass(LEVEL, size))} for size in times.sizes(LEVEL)
            ],
            "context": [
                {"context": size, **self._timed_as_dict(times, Pass(CONTEXT, size))} for size in times.sizes(CONTEXT)
            ],
        }

    def _timed_as_dict(self, times: ArmTimes, timed: Pass) -> dict[str, object]:
        ms, over_torch = times.ms(timed), self.over_torch(times, timed)
        return {
            "ms": ms.median,
            "ms_spread": ms.as_dict(),
            "speedup_over_torch": None if over_torch is None else over_torch.median,
            "speedup_over_torch_spread": None if over_torch is None else over_torch.as_dict(),
        }


def prompt_rate(times: ArmTimes) -> float:
    """Return the prompt tokens processed per second."""
    (size,) = times.sizes(PROMPT)
    return 1000 * size / times.ms(Pass(PROMPT, size)).median


def _ratios(above: tuple[float, ...], below: tuple[float, ...]) -> Spread:
    return Spread.of(a / b for a, b in zip(above, below, strict=True))

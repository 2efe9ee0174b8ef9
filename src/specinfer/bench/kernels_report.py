"""What passes of a model cost, and the numbers read off it. Values only: nothing here is timed or drawn."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from specinfer.bench.environment import Environment
from specinfer.bench.kernels_attention import AttentionTimes
from specinfer.bench.report import Spread


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to compute the model; dtype is a name that `DTYPES` has."""

    dtype: str
    native: bool
    quantization: str | None = None

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.dtype, self.quantization, "native" if self.native else "torch")))


class Pass(NamedTuple):
    """What is timed: a tree of `size` nodes, a prompt of `size` tokens, a draft level, one row after a long context."""

    kind: str
    size: int


TREE, PROMPT, LEVEL, CONTEXT = "tree", "prompt", "level", "context"


@dataclass(frozen=True, slots=True)
class ArmTimes:
    """Seconds of each pass, repeat by repeat.

    Attributes:
        weight_bytes: What a pass reads of the target's weights.
    """

    arm: Arm
    weight_bytes: int
    seconds: Mapping[Pass, tuple[float, ...]]

    def ms(self, timed: Pass) -> Spread:
        return Spread.of(1000 * seconds for seconds in self.seconds[timed])

    def sizes(self, kind: str) -> list[int]:
        """Those measured of one kind, ascending."""
        return sorted(timed.size for timed in self.seconds if timed.kind == kind)

    def ratio(self, timed: Pass, base: Pass) -> Spread:
        """Time of one pass over that of another, repeat by repeat."""
        return _ratios(self.seconds[timed], self.seconds[base])

    def relative(self, num_rows: int) -> Spread:
        """Time of a tree of so many nodes over that of a single one."""
        return self.ratio(Pass(TREE, num_rows), Pass(TREE, 1))

    def bytes_per_second(self, num_rows: int) -> float:
        """Of weights, in a median pass."""
        return 1000 * self.weight_bytes / self.ms(Pass(TREE, num_rows)).median


@dataclass(frozen=True, slots=True)
class KernelsReport:
    """All arms, measured in turns, and what the machine's memory gives.

    Attributes:
        bandwidth: Way of reading memory -> bytes per second, round by round.
        kernels: The native ones at hand, in words.
        attention: On a GPU: of one layer alone.
    """

    arms: tuple[ArmTimes, ...]
    bandwidth: Mapping[str, tuple[float, ...]]
    kernels: str
    options: Mapping[str, object]
    environment: Environment
    attention: tuple[AttentionTimes, ...] = ()

    @property
    def fastest_way(self) -> str:
        """To read memory."""
        return max(self.bandwidth, key=lambda name: max(self.bandwidth[name]))

    @property
    def limit(self) -> float:
        """Bytes per second that memory gives: the best of all rounds, since other load only ever slows."""
        return max(self.bandwidth[self.fastest_way])

    @property
    def rounds(self) -> Spread:
        """Bytes per second of the best way in each round: how steady the machine was."""
        return Spread.of(map(max, zip(*self.bandwidth.values(), strict=True)))

    def over_torch(self, times: ArmTimes, timed: Pass) -> Spread | None:
        """PyTorch's own time in the same dtype over this arm's, repeat by repeat; None for PyTorch itself."""
        own = Arm(times.arm.dtype, native=False)
        for other in self.arms:
            if other.arm == own != times.arm:
                return _ratios(other.seconds[timed], times.seconds[timed])
        return None

    def of_first(self, times: ArmTimes) -> Spread:
        """This arm's time of a single row over the first arm's, repeat by repeat."""
        single = Pass(TREE, 1)
        return _ratios(times.seconds[single], self.arms[0].seconds[single])

    def as_dict(self) -> dict[str, object]:
        """Ready for JSON."""
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
    """Tokens of a prompt that are read in a second."""
    (size,) = times.sizes(PROMPT)
    return 1000 * size / times.ms(Pass(PROMPT, size)).median


def _ratios(above: tuple[float, ...], below: tuple[float, ...]) -> Spread:
    return Spread.of(a / b for a, b in zip(above, below, strict=True))

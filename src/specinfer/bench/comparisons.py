"""Comparisons of arms with plain decoding: ratios over pairs of runs, whether outputs are equal, and their values."""

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from specinfer.bench.ceilings import Ceilings
from specinfer.bench.options import CompareConfig
from specinfer.bench.results import Arm, Run
from specinfer.bench.stages import floors_text, stages_table
from specinfer.core.text import counted
from specinfer.policy.speedup import Speedup
from specinfer.reporting.environment import Environment
from specinfer.reporting.report import Table, Value, fields_of
from specinfer.reporting.spread import Spread, partings

_KEEP_TOKENS = ("coupled", "target-only")  # rules whose tokens are plain decoding's, with the same seed


@dataclass(frozen=True, slots=True)
class Comparison:
    """Plain decoding and other arms on the same batches."""

    plain: Arm
    trees: tuple[Arm, ...]

    @property
    def arms(self) -> tuple[Arm, ...]:
        return (self.plain, *self.trees)

    @property
    def rows(self) -> tuple["ArmRow", ...]:
        return tuple(ArmRow(self, arm) for arm in self.arms)

    @property
    def size(self) -> int:
        """Number of requests that ran together."""
        return len(self.plain.runs[0].prompts)

    @property
    def best(self) -> Arm:
        """The fastest tree, pair by pair."""
        return max(self.trees, key=lambda arm: self.speedup_of(arm).median)

    @property
    def num_outputs(self) -> int:
        """Number of outputs of each arm."""
        return sum(len(run.outputs) for run in self.plain.runs)

    def arm(self, name: str) -> Arm:
        """Return the arm of this name."""
        return next(arm for arm in self.arms if arm.name == name)

    def of(self, prompts: Collection[int]) -> "Comparison":
        """Return the comparison on these prompts only."""
        return Comparison(self.plain.of(prompts), tuple(arm.of(prompts) for arm in self.trees))

    def ratio(self, arm: Arm, value: Callable[[Run], float]) -> Spread:
        """Return a value of an arm's runs divided by that of plain decoding, for each pair."""
        pairs = zip(self.plain.runs, arm.runs, strict=True)
        return Spread.from_values(value(run) / value(plain) for plain, run in pairs)

    def speedup_of(self, arm: Arm) -> Spread:
        """Return the decoding speed, after the first tokens, divided by that of plain decoding, for each pair."""
        return self.ratio(arm, lambda run: run.tokens_per_second)

    def total_speedup_of(self, arm: Arm) -> Spread:
        """Return the same ratio for the whole time, including prefill."""
        return self.ratio(arm, lambda run: run.total_tokens_per_second)

    def partings(self, arm: Arm) -> list[int]:
        """Return the length of the common prefix with plain decoding, for each output that differs from it.

        Where plain decoding was stopped earlier, outputs are compared up to there.
        """
        return partings(
            (expected, output[: len(expected)])
            for plain, run in zip(self.plain.runs, arm.runs, strict=True)
            for expected, output in zip(plain.outputs, run.outputs, strict=True)
        )

    def kind_of(self, arm: Arm, prompts: Collection[int]) -> tuple[float, float]:
        """Return tokens per pass of the requests with these prompts, and their median speed over plain decoding."""
        pairs = [
            (ours, plain)
            for run, other in zip(arm.runs, self.plain.runs, strict=True)
            for prompt, ours, plain in zip(run.prompts, run.answers, other.answers, strict=True)
            if prompt in prompts
        ]
        if not pairs:
            return math.nan, math.nan
        num_tokens, num_passes = (sum(getattr(one, name) for one, _ in pairs) for name in ("num_tokens", "num_passes"))
        return num_tokens / num_passes, statistics.median(plain.time / ours.time for ours, plain in pairs)


class ArmRow(NamedTuple):
    """An arm of a comparison."""

    result: Comparison
    arm: Arm

    @property
    def is_plain(self) -> bool:
        return self.arm is self.result.plain

    @property
    def speedup(self) -> Spread | None:
        """Speed over plain decoding, or None for plain decoding itself."""
        return None if self.is_plain else self.result.speedup_of(self.arm)

    @property
    def total_speedup(self) -> Spread | None:
        """The same for the whole time, including prefill."""
        return None if self.is_plain else self.result.total_speedup_of(self.arm)

    @property
    def quartiles(self) -> str | None:
        return None if self.speedup is None else self.speedup.quartiles

    @property
    def partings(self) -> list[int] | None:
        return None if self.is_plain else self.result.partings(self.arm)

    @property
    def same_texts(self) -> str | None:
        """Number of outputs that are those of plain decoding, and of all."""
        if (parted := self.partings) is None:
            return None
        return f"{self.result.num_outputs - len(parted)} of {self.result.num_outputs}"


TREE = Value[ArmRow]("", lambda row: row.arm.name, heading="tree", label=True)
TOKENS_PER_PASS = Value[ArmRow]("tokens_per_pass", lambda row: row.arm.tokens_per_pass, "{:.2f}", "tokens/pass")
SPEEDUP = Value[ArmRow]("speedup", lambda row: row.speedup, "{:.2f}", optional=True)
QUARTILES = Value[ArmRow]("", lambda row: row.quartiles, heading="quartiles")
PARTINGS = Value[ArmRow]("tokens_before_parting", lambda row: row.partings, None, optional=True)
STAGES = Value[ArmRow]("stages", lambda row: row.arm.stages.as_dict(), None)
NUM_PASSES = Value[ArmRow]("num_passes", lambda row: row.arm.num_passes, None)


def tokens_per_second(form: str) -> Value[ArmRow]:
    return Value("tokens_per_second", lambda row: row.arm.tokens_per_second, form, "tokens/s")


def arms_dict(values: Iterable[Value[ArmRow]], result: Comparison) -> dict[str, object]:
    """Return the values of each arm by its name."""
    values = tuple(values)
    return {row.arm.name: fields_of(values, row) for row in result.rows}


@dataclass(frozen=True, slots=True)
class Compared:
    """The comparisons of a measurement: one for each batch size, in the requested order.

    Attributes:
        ceilings: Measured limits of the device, from which the floors of stages are computed.
        kinds: Kind of each prompt, by its number. Empty if the prompts are texts to continue.
        speedups: What "auto" expected of a single request before the runs, by arm.
    """

    results: tuple[Comparison, ...]
    config: CompareConfig
    environment: Environment
    ceilings: Ceilings
    kinds: tuple[str, ...] = ()
    speedups: Mapping[str, Speedup] = field(default_factory=dict)

    @property
    def result(self) -> Comparison:
        """The first comparison, or the only one."""
        return self.results[0]

    @property
    def rows(self) -> list[ArmRow]:
        return [row for result in self.results for row in result.rows]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arms. The first is plain decoding."""
        return tuple(arm.name for arm in self.result.arms)

    @property
    def num_prompts(self) -> int:
        return len({run.prompts for run in self.result.plain.runs})

    def by_kind(self) -> "dict[str, Compared]":
        """Return what was measured on the prompts of each kind, if each ran by itself."""
        kinds = numbers_by_kind(self.kinds)
        return {kind: replace(self, results=(self.result.of(numbers),), kinds=()) for kind, numbers in kinds.items()}

    def kinds_of(self, row: ArmRow) -> dict[str, tuple[float, float]]:
        """Return tokens per pass, and speed over plain decoding, of the requests of each kind of prompt."""
        return {kind: row.result.kind_of(row.arm, numbers) for kind, numbers in numbers_by_kind(self.kinds).items()}

    def stages_table(self, labels: Sequence[Value[ArmRow]]) -> Table[ArmRow]:
        return stages_table(labels, self.rows, lambda row: row.arm.stages, self.ceilings)

    def floors_text(self) -> str:
        """Return a line for the title of a plot on the target's passes of the first comparison."""
        return floors_text({arm.name: arm.stages for arm in self.result.arms}, self.result.size)

    def expectations(self) -> list[str]:
        """Return a line for each arm of "auto" on the speed-up that it expected, and the one that came."""
        arms = {arm.name: arm for arm in self.result.trees}
        return [
            f"tree {name}: {speedup.beside(self.result.speedup_of(arms[name]).median)}"
            for name, speedup in self.speedups.items()
            if name in arms
        ]

    def fidelity(self, what: str = "output") -> list[str]:
        """Return a line for each tree on whether its tokens are those of plain decoding in all comparisons."""
        return [self._fidelity_of(name, what) for name in self.names[1:]]

    def _fidelity_of(self, name: str, what: str) -> str:
        rule = self.config.verification
        if rule not in _KEEP_TOKENS and self.config.temperature:
            return (
                f"tree {name}: other tokens than plain decoding, of the same distribution, as with {rule} verification"
            )
        count = sum(result.num_outputs for result in self.results)
        parted = [length for result in self.results for length in result.partings(result.arm(name))]
        if not parted:
            return f"tree {name}: the same tokens as plain decoding in all {counted(count, what)}"
        return (
            f"tree {name}: {len(parted)} of {counted(count, 'output')} part from plain decoding in "
            f"{self.environment.precision} rounding, the earliest after {counted(min(parted), 'token')}"
        )


def numbers_by_kind(kinds: Sequence[str]) -> Mapping[str, set[int]]:
    """Return the numbers of the prompts of each kind."""
    return {kind: {i for i, own in enumerate(kinds) if own == kind} for kind in dict.fromkeys(kinds)}

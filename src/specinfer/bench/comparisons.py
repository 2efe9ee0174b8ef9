"""Comparisons of arms with plain decoding: ratios over pairs of runs, and whether outputs are equal."""

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specinfer.bench.results import Arm, Run
from specinfer.core.text import counted
from specinfer.reporting.environment import Environment
from specinfer.reporting.spread import Spread, partings

_KEEP_TOKENS = ("coupled", "target-only")  # rules whose tokens are plain decoding's, with the same seed


@dataclass(frozen=True, slots=True)
class Comparison:
    """Plain decoding and other arms on the same batches in one situation.

    Attributes:
        situation: What sets this comparison apart from others of the same measurement, such as the temperature.
    """

    plain: Arm
    trees: tuple[Arm, ...]
    situation: Mapping[str, Any] = field(default_factory=dict)

    @property
    def arms(self) -> tuple[Arm, ...]:
        return (self.plain, *self.trees)

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
        return replace(self, plain=self.plain.of(prompts), trees=tuple(arm.of(prompts) for arm in self.trees))

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

    def as_dict(self) -> dict[str, object]:
        arms = {self.plain.name: self.plain.as_dict()}
        for arm in self.trees:
            arms[arm.name] = {
                **self.speedup_of(arm).fields("speedup"),
                **self.total_speedup_of(arm).fields("total_speedup"),
                "tokens_before_parting": self.partings(arm),
                **arm.as_dict(),
            }
        return {"batch_size": self.size, "num_outputs": self.num_outputs, "arms": arms}


def fidelity(
    name: str,
    comparisons: Sequence[Comparison],
    environment: Environment,
    options: Mapping[str, object],
    *,
    what: str = "output",
) -> str:
    """Return a line on whether an arm's tokens are those of plain decoding in all comparisons."""
    rule = options.get("verification", "coupled")
    if rule not in _KEEP_TOKENS and options["temperature"]:
        return f"tree {name}: other tokens than plain decoding, of the same distribution, as with {rule} verification"
    count = sum(one.num_outputs for one in comparisons)
    parted = [length for one in comparisons for length in one.partings(one.arm(name))]
    if not parted:
        return f"tree {name}: the same tokens as plain decoding in all {counted(count, what)}"
    return (
        f"tree {name}: {len(parted)} of {counted(count, 'output')} part from plain decoding in "
        f"{environment.precision} rounding, the earliest after {counted(min(parted), 'token')}"
    )


def numbers_by_kind(kinds: Sequence[str]) -> dict[str, set[int]]:
    """Return the numbers of the prompts of each kind."""
    return {kind: {i for i, own in enumerate(kinds) if own == kind} for kind in dict.fromkeys(kinds)}

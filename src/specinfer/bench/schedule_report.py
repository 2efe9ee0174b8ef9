"""Measurements of a comparison of schedulers and the numbers derived from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specinfer.bench.environment import Environment
from specinfer.bench.report import Run, Spread
from specinfer.bench.schedule_plans import AUTO, LEARNED, OFF_NAME

MIX = "mix"


@dataclass(frozen=True, slots=True)
class ScheduleArm:
    """One way to choose trees, with its runs in the order they were made.

    Attributes:
        parts: Part of the workload that each run belongs to.
    """

    name: str
    runs: tuple[Run, ...]
    parts: tuple[str, ...]

    def of(self, part: str) -> list[Run]:
        """Return the runs on a part of the workload, or all runs for "mix"."""
        return [run for run, own in zip(self.runs, self.parts, strict=True) if part in (own, MIX)]

    def tokens_per_second(self, part: str) -> float:
        """Return all tokens after the first divided by all seconds after the first."""
        runs = self.of(part)
        return sum(run.num_tokens for run in runs) / sum(run.time for run in runs)

    def tokens_per_pass(self, part: str) -> float:
        runs = self.of(part)
        return sum(run.num_tokens for run in runs) / sum(len(run.passes) for run in runs)

    def nodes(self, part: str) -> float:
        """Return the mean number of draft tokens in a pass."""
        passes = [one for run in self.of(part) for one in run.passes]
        return sum(one.num_guessed for one in passes) / len(passes)


@dataclass(frozen=True, slots=True)
class ScheduleReport:
    """All arms on the same prompts. Runs at the same index belong together.

    Attributes:
        fallbacks: Number of choices that the learned scheduler left to the cost policy, by reason. "decided" counts
            the choices that it made itself.
    """

    arms: tuple[ScheduleArm, ...]
    part_names: tuple[str, ...]
    fallbacks: Mapping[str, int]
    options: Mapping[str, object]
    environment: Environment

    def arm(self, name: str) -> ScheduleArm:
        return next(arm for arm in self.arms if arm.name == name)

    @property
    def fixed(self) -> tuple[ScheduleArm, ...]:
        return tuple(arm for arm in self.arms if arm.name not in (AUTO, LEARNED))

    @property
    def best_fixed(self) -> ScheduleArm:
        """The fastest fixed configuration over the mix, where plain decoding counts as one."""
        return max(self.fixed, key=lambda arm: arm.tokens_per_second(MIX))

    def ratio(self, name: str, base: str, part: str) -> float:
        """Return the tokens per second of one arm divided by those of another."""
        return self.arm(name).tokens_per_second(part) / self.arm(base).tokens_per_second(part)

    def paired(self, name: str, base: str, part: str) -> Spread:
        """Return the same ratio for each pair of runs."""
        pairs = zip(self.arm(name).of(part), self.arm(base).of(part), strict=True)
        return Spread.of(run.tokens_per_second / other.tokens_per_second for run, other in pairs)

    def partings(self, name: str) -> int:
        """Return the number of outputs that differ from plain decoding."""
        pairs = zip(self.arm(OFF_NAME).runs, self.arm(name).runs, strict=True)
        return sum(plain.token_ids != run.token_ids for plain, run in pairs)

    def as_dict(self) -> dict[str, object]:
        """Return the report in a form ready for JSON."""
        parts = (*self.part_names, MIX)
        best = self.best_fixed.name
        return {
            "best_fixed": best,
            "learned_over_best_fixed": {part: self.ratio(LEARNED, best, part) for part in parts},
            "learned_over_best_fixed_paired": {
                part: {"median": spread.median, **spread.as_dict()}
                for part in parts
                for spread in (self.paired(LEARNED, best, part),)
            },
            "auto_over_best_fixed": {part: self.ratio(AUTO, best, part) for part in parts},
            "fallbacks": dict(self.fallbacks),
            "arms": {arm.name: self._arm_dict(arm, parts) for arm in self.arms},
            "options": dict(self.options),
            "environment": self.environment.as_dict(),
        }

    def _arm_dict(self, arm: ScheduleArm, parts: Sequence[str]) -> dict[str, object]:
        return {
            "tokens_per_second": {part: arm.tokens_per_second(part) for part in parts},
            "tokens_per_pass": {part: arm.tokens_per_pass(part) for part in parts},
            "nodes_per_pass": {part: arm.nodes(part) for part in parts},
            "num_partings": self.partings(arm.name),
            "runs": [{"part": part, **run.as_dict()} for part, run in zip(arm.parts, arm.runs, strict=True)],
        }

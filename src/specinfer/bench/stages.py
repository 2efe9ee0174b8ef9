"""Times of the stages of sampled steps on the device's own timeline, with the least time of each."""

import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from specinfer.engine.timer import STAGES, TimedStep

HEADINGS = ("draft", "target", "walk", "host")  # names of the stages in tables


@dataclass(frozen=True, slots=True)
class StageSample:
    """Seconds of each stage of one step, and the floors of the stages that have one."""

    seconds: Mapping[str, float]
    floors: Mapping[str, float]

    @classmethod
    def of(cls, timed: TimedStep, floors: Mapping[str, float]) -> "StageSample":
        return cls(dict(timed.seconds), dict(floors))


@dataclass(frozen=True, slots=True)
class Stages:
    """The sampled steps of one arm, possibly none."""

    samples: tuple[StageSample, ...]

    @property
    def total(self) -> float:
        """Mean milliseconds of a step."""
        return sum(self.ms(stage) for stage in STAGES)

    def ms(self, stage: str) -> float:
        """Return the mean milliseconds of a stage."""
        return 1000 * sum(sample.seconds[stage] for sample in self.samples) / len(self.samples)

    def over_floor(self, stage: str) -> float | None:
        """Return the median over steps of a stage's time divided by its floor, or None if it has no floor."""
        ratios = [
            sample.seconds[stage] / floor for sample in self.samples if (floor := sample.floors.get(stage, 0.0)) > 0
        ]
        return statistics.median(ratios) if ratios else None

    @property
    def beside_target(self) -> float:
        """Share of a step outside the target's pass: drafting, verification and commit, and the host."""
        return 1 - self.ms("target") / self.total

    def as_dict(self) -> dict[str, object]:
        """Return a form ready for JSON, which is empty if no step was sampled."""
        if not self.samples:
            return {}
        ratios = {stage: self.over_floor(stage) for stage in STAGES}
        return {
            "num_sampled": len(self.samples),
            "ms": {stage: self.ms(stage) for stage in STAGES},
            "total_ms": self.total,
            "percent_beside_target": 100 * self.beside_target,
            "over_floor": {stage: ratio for stage, ratio in ratios.items() if ratio is not None},
        }

    def cells(self) -> Iterator[str]:
        """Yield table cells: the milliseconds of each stage with its floor as a share of them, then the total."""
        if not self.samples:
            yield from ("-",) * (len(STAGES) + 1)
            return
        for stage in STAGES:
            ratio = self.over_floor(stage)
            share = "" if ratio is None else f" ({1 / ratio:.0%})"
            yield f"{self.ms(stage):.2f}{share}"
        yield f"{self.total:.2f}"


def stages_of(runs: Iterable[Iterable[StageSample]]) -> Stages:
    """Return the samples of all runs of an arm."""
    return Stages(tuple(sample for run in runs for sample in run))

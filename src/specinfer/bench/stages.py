"""Stages of sampled steps on the device's own timeline, beside the least that each could take. Values only."""

import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from specinfer.engine.device.timer import STAGES, TimedStep

HEADINGS = ("draft", "target", "walk", "host")  # what the stages are called in tables


@dataclass(frozen=True, slots=True)
class StageSample:
    """One step: seconds by stage, and of the stages that have one, the floor."""

    seconds: Mapping[str, float]
    floors: Mapping[str, float]

    @classmethod
    def of(cls, timed: TimedStep, floors: Mapping[str, float]) -> "StageSample":
        return cls(dict(timed.seconds), dict(floors))


@dataclass(frozen=True, slots=True)
class Stages:
    """The sampled steps of one arm; there may be none."""

    samples: tuple[StageSample, ...]

    @property
    def total(self) -> float:
        """Mean milliseconds of a step."""
        return sum(self.ms(stage) for stage in STAGES)

    def ms(self, stage: str) -> float:
        """Mean milliseconds."""
        return 1000 * sum(sample.seconds[stage] for sample in self.samples) / len(self.samples)

    def over_floor(self, stage: str) -> float | None:
        """Its time as a multiple of the least possible, median of the steps; None: no step has a floor of it."""
        ratios = [
            sample.seconds[stage] / floor for sample in self.samples if (floor := sample.floors.get(stage, 0.0)) > 0
        ]
        return statistics.median(ratios) if ratios else None

    @property
    def beside_target(self) -> float:
        """The share of a step that is not the target's pass: drafting, walk and commit, and the host."""
        return 1 - self.ms("target") / self.total

    def as_dict(self) -> dict[str, object]:
        """Ready for JSON; empty if no step was sampled."""
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
        """For a table: milliseconds of each stage and the floor's share of it, then of all."""
        if not self.samples:
            yield from ("-",) * (len(STAGES) + 1)
            return
        for stage in STAGES:
            ratio = self.over_floor(stage)
            share = "" if ratio is None else f" ({1 / ratio:.0%})"
            yield f"{self.ms(stage):.2f}{share}"
        yield f"{self.total:.2f}"


def stages_of(runs: Iterable[Iterable[StageSample]]) -> Stages:
    """All samples of an arm's runs."""
    return Stages(tuple(sample for run in runs for sample in run))

"""Times of the stages of sampled steps on the device's own timeline, with the least time of each; their table."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from rich.console import Console

from specinfer.bench.ceilings import Ceilings
from specinfer.engine.timer import STAGES, TimedStep
from specinfer.reporting.tables import Column, print_rows

_HEADINGS = ("draft", "target", "walk", "host")  # names of the stages in tables
T = TypeVar("T")


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
        """Return the median over steps of a stage's time divided by its floor.

        None if it has no floor, or no time of its own: in captured steps the walk is part of the target's pass.
        """
        floors = [sample.floors.get(stage, 0.0) for sample in self.samples]
        ratios = [
            sample.seconds[stage] / floor for sample, floor in zip(self.samples, floors, strict=True) if floor > 0
        ]
        return statistics.median(ratios) if any(ratios) else None

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

    def cell(self, stage: str) -> str:
        """Return the milliseconds of a stage with its floor as a share of them."""
        if not self.samples:
            return "-"
        ratio = self.over_floor(stage)
        return f"{self.ms(stage):.2f}" + ("" if ratio is None else f" ({1 / ratio:.0%})")


class HasStages(Protocol):
    """An arm with steps that were timed on the device."""

    @property
    def name(self) -> str: ...
    @property
    def stages(self) -> Stages: ...


def stages_of(runs: Iterable[Iterable[StageSample]]) -> Stages:
    """Return the samples of all runs of an arm."""
    return Stages(tuple(sample for run in runs for sample in run))


def print_stages(
    ceilings: Ceilings | None,
    labels: Sequence[Column[T]],
    rows: Iterable[T],
    arm_of: Callable[[T], HasStages],
    console: Console,
) -> None:
    """Print the stages of sampled steps, and the ceilings from which floors are computed."""
    columns = [*labels, *(Column(name, _cell_of(arm_of, stage)) for name, stage in zip(_HEADINGS, STAGES, strict=True))]
    columns.append(
        Column("total", lambda row: f"{arm_of(row).stages.total:.2f}" if arm_of(row).stages.samples else "-")
    )
    print_rows(console, "Sampled steps: ms of each stage, and its floor's share of it", columns, rows)
    console.print("floors: weights, keys, values and logits read once, all rows multiplied,", highlight=False)
    console.print(f"at what the device reaches: {ceilings}", highlight=False)


def _cell_of(arm_of: Callable[[T], HasStages], stage: str) -> Callable[[T], str]:
    return lambda row: arm_of(row).stages.cell(stage)


def floors_text(arms: Sequence[HasStages], size: int = 1) -> str:
    """Return a line with the time of the target's passes over their floor, or an empty text if it is unknown."""
    ratios = {arm.name: arm.stages.over_floor("target") for arm in arms}
    known = [f"{name} {ratio:.2f}" for name, ratio in ratios.items() if ratio is not None]
    together = f", {size} together" if size > 1 else ""
    return f"\ntarget's pass over its floor{together}: {', '.join(known)}" if known else ""

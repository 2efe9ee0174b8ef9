"""Times of the stages of sampled steps on the device's own timeline, with the least time of each; their table.

The least time is that of the necessary reads and operations at the device's best measured rates. A pass of a model
reads the weights once, and the keys and values of all tokens before it. A draft is one pass for each level.
Verification reads the logits of every node. All other stages have no floor.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from specinfer.bench.ceilings import Ceilings
from specinfer.core.step_record import StepRecord
from specinfer.engine.timer import STAGES, TimedStep
from specinfer.llm import LLM
from specinfer.model.pass_work import PassWork
from specinfer.reporting.report import Table, Value

_HEADINGS = ("draft", "target", "walk", "host")  # names of the stages in tables
T = TypeVar("T")


class Roofline:
    """Floors of the steps of one engine."""

    def __init__(self, llm: LLM, ceilings: Ceilings) -> None:
        loaded = llm.target.loaded
        drafters = [PassWork.from_loaded(small.loaded) for small in llm.small_models.values()]
        self.ceilings = ceilings
        self._target = PassWork.from_loaded(loaded)
        self._drafters = [work for work in drafters if work is not None]
        self._knows_drafters = len(drafters) == len(self._drafters)
        self._logit_bytes = loaded.vocab_size * loaded.dtype.itemsize

    def floors(self, step: StepRecord) -> dict[str, float]:
        """Return the least seconds of each stage with a floor. Drafting has one if the work of all models is known."""
        found = {"verify": step.num_rows * self._logit_bytes / self.ceilings.bytes_per_second}
        if self._target is not None:
            found["target"] = self._pass_seconds(self._target, step.num_rows, step)
        levels = step.num_model_levels or 0
        if levels and self._knows_drafters:
            rows = step.num_guessed / levels  # rows of a level; reading newly accepted tokens is left out
            found["draft"] = levels * sum(self._pass_seconds(work, rows, step) for work in self._drafters)
        return found

    def _pass_seconds(self, work: PassWork, num_rows: float, step: StepRecord) -> float:
        return self.ceilings.seconds(*work.of_step(num_rows, step.num_context, step.num_requests))


@dataclass(frozen=True, slots=True)
class StageSample:
    """Seconds of each stage of one step, and the floors of the stages that have one."""

    seconds: Mapping[str, float]
    floors: Mapping[str, float]

    @classmethod
    def from_step(cls, timed: TimedStep, floors: Mapping[str, float]) -> "StageSample":
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


def stages_of(runs: Iterable[Iterable[StageSample]]) -> Stages:
    """Return the samples of all runs of an arm."""
    return Stages(tuple(sample for run in runs for sample in run))


def stages_table(
    labels: Sequence[Value[T]], rows: Sequence[T], stages: Callable[[T], Stages], ceilings: Ceilings
) -> Table[T]:
    """Return a table of the stages of sampled steps, with the ceilings from which floors are computed."""

    def of_stage(name: str, stage: str) -> Value[T]:
        return Value("", lambda row: stages(row).cell(stage), heading=name)

    def total(row: T) -> str:
        return f"{stages(row).total:.2f}" if stages(row).samples else "-"

    values = (*labels, *map(of_stage, _HEADINGS, STAGES), Value("", total, heading="total"))
    note = (
        "floors: weights, keys, values and logits read once, all rows multiplied,\n"
        f"at what the device reaches: {ceilings}"
    )
    return Table("", "Sampled steps: ms of each stage, and its floor's share of it", values, rows, note)


def floors_text(stages: Mapping[str, Stages], size: int = 1) -> str:
    """Return a line with the time of the target's passes over their floor, or an empty text if it is unknown.

    Args:
        stages: Sampled steps of each arm, by its name.
        size: Number of requests that ran together.
    """
    ratios = {name: each.over_floor("target") for name, each in stages.items()}
    known = [f"{name} {ratio:.2f}" for name, ratio in ratios.items() if ratio is not None]
    together = f", {size} together" if size > 1 else ""
    return f"\ntarget's pass over its floor{together}: {', '.join(known)}" if known else ""

"""The results of a tuning run, measured on held-out data."""

from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any, Self

from specinfer.hub.files import TUNING_FILE, read_object
from specinfer.learning.tune.evaluation import (
    Arm,
    Coverage,
    HitRates,
    Passes,
    count_passes,
    coverage,
    hit_rates,
    plan_arms,
)
from specinfer.learning.tune.options import TuneConfig
from specinfer.learning.tune.result import Result, StageCallback
from specinfer.reporting.environment import Environment
from specinfer.reporting.files import write_json

_FILE = "report.json"
_KEYS = {"hit_rates": "foresight", "coverage": "shares"}  # names in the file


@dataclass(frozen=True, slots=True)
class TuneReport:
    """The run's numbers, ready for a table, JSON and a plot.

    Attributes:
        training: By drafter: parameters, steps, tokens, seconds and last loss.
        num_left: The number of examples that each drafter was trained on.
    """

    options: dict[str, object]
    environment: Environment
    folders: dict[str, str]
    training: dict[str, dict[str, float]]
    num_examples: int
    num_tokens: int
    num_left: tuple[int, ...]
    num_cut: int
    collecting_seconds: float
    hit_rates: tuple[HitRates, ...]
    coverage: tuple[Coverage, ...]
    passes: tuple[Passes, ...]

    @property
    def gain(self) -> float | None:
        """Tokens per pass with the first drafter alone over those before its training: the mean over modes and trees.

        None if it had no weights before, or was trained for use with others.
        """
        start, tuned = (
            {(each.mode, each.arm.tree): each.tokens_per_pass for each in self.passes if each.arm.drafters == (name,)}
            for name in ("start-1", "drafter-1")
        )
        ratios = [tuned[key] / start[key] for key in start if key in tuned]
        return geometric_mean(ratios) if ratios else None

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers for JSON; `_KEYS` has the names that differ."""
        return {_KEYS.get(name, name): value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, numbers: dict[str, Any]) -> Self:
        """Return the report with these numbers.

        Raises:
            KeyError, TypeError: They are not all there, or others are.
        """
        own = {name: numbers[_KEYS.get(name, name)] for name in cls.__dataclass_fields__}
        passes = [
            each | {"arm": Arm(each["arm"]["kind"], tuple(each["arm"]["drafters"]), each["arm"]["tree"])}
            for each in own["passes"]
        ]
        parts = {
            "environment": Environment(**own["environment"]),
            "num_left": tuple(own["num_left"]),
            "hit_rates": tuple(HitRates(**each) for each in own["hit_rates"]),
            "coverage": tuple(Coverage(**each) for each in own["coverage"]),
            "passes": tuple(Passes(**each) for each in passes),
        }
        return cls(**own | parts)


def measure(config: TuneConfig, result: Result, report: StageCallback) -> TuneReport:
    """Return the report of a run's folder, or measure the drafters before and after, and write it.

    Args:
        report: Receives the progress.

    Raises:
        OSError: The report cannot be written.
    """
    known = read_object(result.folder / _FILE)
    try:
        if known is not None:
            return TuneReport.from_dict(known | {"folders": _folders(result)})
    except (AttributeError, KeyError, TypeError):
        pass  # of another version, or damaged
    made = _measure(config, result, report)
    write_json(result.folder / _FILE, made.as_dict())
    if made.gain is not None:
        write_json(Path(made.folders["drafter-1"]) / TUNING_FILE, {"gain": made.gain})
    return made


def _folders(result: Result) -> dict[str, str]:
    return {drafter.name: str(drafter.folder) for drafter in result.drafters}


def _measure(config: TuneConfig, result: Result, report: StageCallback) -> TuneReport:
    examples = list(result.held_out)
    sets = {"boosted": [*result.beside, *result.drafters]}
    if result.controls:
        sets["independent"] = [*result.beside, *result.controls]
    arms = plan_arms("start", [result.starts[0].name], config.depth)
    parts: list[Coverage] = []
    for kind, drafters in sets.items():
        names = [drafter.name for drafter in drafters]
        arms += plan_arms(kind, names, config.depth)
        parts += coverage(names, [drafter.held_out for drafter in drafters], examples)
    passes, environment = count_passes(config, result, arms, report)
    everyone = {drafter.name: drafter for drafter in result.all_drafters}
    rates = [rate for name, drafter in everyone.items() for rate in hit_rates(name, drafter.held_out, examples)]
    return TuneReport(
        options=asdict(config) | {"model": config.target},
        environment=environment,
        folders=_folders(result),
        training={
            name: {field: getattr(drafter, field) for field in ("parameters", "steps", "tokens", "seconds", "loss")}
            for name, drafter in everyone.items()
            if drafter.steps
        },
        num_examples=result.num_examples,
        num_tokens=result.num_tokens,
        num_left=tuple(result.num_left),
        num_cut=result.num_cut,
        collecting_seconds=result.collecting_seconds,
        hit_rates=tuple(rates),
        coverage=tuple(parts),
        passes=tuple(passes),
    )

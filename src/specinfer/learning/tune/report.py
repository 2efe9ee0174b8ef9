"""The results of a tuning run, measured on held-out data."""

from dataclasses import asdict, dataclass
from typing import Any

from specinfer.learning.tune.evaluation import Coverage, HitRates, Passes, count_passes, coverage, hit_rates, plan_arms
from specinfer.learning.tune.options import TuneConfig
from specinfer.learning.tune.result import Result, StageCallback
from specinfer.reporting.environment import Environment


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

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers for JSON; the keys "foresight" and "shares" are those of the file format."""
        keys = {"hit_rates": "foresight", "coverage": "shares"}
        return {keys.get(name, name): value for name, value in asdict(self).items()}


def measure(config: TuneConfig, result: Result, report: StageCallback) -> TuneReport:
    """Measure a run's drafters, before and after.

    Args:
        report: Receives the progress.
    """
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
        folders={drafter.name: str(drafter.folder) for drafter in result.drafters},
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

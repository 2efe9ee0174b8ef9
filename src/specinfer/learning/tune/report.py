"""The results of a tuning run, measured on held-out data."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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
from specinfer.learning.tune.result import Result, StageCallback, TunedDrafter
from specinfer.llm import LLM
from specinfer.reporting.environment import Environment

EQUAL_NODES = 16  # nodes in the paper's comparison of 1 to 5 drafters
_NUM_PROMPTS = 32  # held-out prompts that passes are counted on


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
    sets = {"boosted": [*result.beside, *result.drafters], "independent": []}
    if result.controls:
        sets["independent"] = [*result.beside, *result.controls]
    everyone = {drafter.name: drafter for drafter in result.all_drafters}
    arms = plan_arms("start", [result.starts[0].name], config.depth, EQUAL_NODES)
    for kind, drafters in sets.items():
        arms += plan_arms(kind, [one.name for one in drafters], config.depth, EQUAL_NODES)
    passes, environment = _count(config, result, everyone, arms, report)
    rates = [rate for drafter in everyone.values() for rate in hit_rates(drafter.name, drafter.held_out, examples)]
    parts: list[Coverage] = []
    for drafters in sets.values():
        parts += coverage([one.name for one in drafters], [one.held_out for one in drafters], examples)
    return TuneReport(
        options=asdict(config) | {"model": config.target},
        environment=environment,
        folders={one.name: str(one.folder) for one in result.drafters},
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


def _count(
    config: TuneConfig,
    result: Result,
    everyone: dict[str, TunedDrafter],
    arms: list[Arm],
    report: StageCallback,
) -> tuple[list[Passes], Environment]:
    """Count passes of arms whose drafters have folders; a start made from nothing has none and would predict little."""
    folders = {name: one.folder for name, one in everyone.items() if one.folder is not None}
    usable = [arm for arm in arms if all(name in folders for name in arm.drafters)]
    used = dict.fromkeys(str(folders[name]) for arm in usable for name in arm.drafters)
    llm = LLM(
        result.target,
        drafters=list(used),
        dtype=config.dtype,
        device=config.device,
        tree="best-first:1",
        max_num_seqs=_NUM_PROMPTS,
        enable_prefix_caching=False,
    )
    prompts = [example.tokens[: example.num_prompt].tolist() for example in result.held_out[:_NUM_PROMPTS]]
    name = "counting passes"
    report(name, 0, len(usable))
    passes = count_passes(
        llm, usable, prompts, {name: Path(folder) for name, folder in folders.items()},
        max_tokens=config.max_tokens, seed=config.seed + 1, note=lambda done: report(name, done, len(usable)),
    )  # fmt: skip
    return passes, Environment.from_llm(llm, {one.name: one.parameters for one in everyone.values()})

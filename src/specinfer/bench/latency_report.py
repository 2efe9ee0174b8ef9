"""The result of a latency measurement: its numbers, its tables on a terminal, and its plot."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from specinfer.bench.ceilings import Ceilings
from specinfer.bench.comparisons import Comparison, fidelity, numbers_by_kind
from specinfer.bench.options import PLAIN
from specinfer.bench.results import Arm
from specinfer.bench.stages import floors_text, print_stages
from specinfer.reporting.environment import Environment
from specinfer.reporting.plots import PART_COLOURS, Panel, Series, draw_plot
from specinfer.reporting.tables import Column, print_models, print_rows

_OTHERS_COLOUR = "#D55E00"
_NAME = Column[Arm]("tree", lambda arm: arm.name, label=True)


@dataclass(frozen=True, slots=True)
class LatencyReport:
    """Plain decoding and each tree on the same prompts.

    Attributes:
        result: The arms, in the requested order. The headline numbers are those of the first tree.
        ceilings: Measured limits of the device, from which the floors of stages are computed.
        kinds: Kind of each prompt, by its number. Empty if the prompts are texts to continue.
    """

    result: Comparison
    options: Mapping[str, object]
    environment: Environment
    ceilings: Ceilings | None = None
    kinds: tuple[str, ...] = ()

    def by_kind(self) -> "dict[str, LatencyReport]":
        """Return a report of the prompts of each kind."""
        kinds = numbers_by_kind(self.kinds)
        return {kind: replace(self, result=self.result.of(numbers), kinds=()) for kind, numbers in kinds.items()}

    @property
    def num_prompts(self) -> int:
        return len({run.prompts for run in self.result.plain.runs})

    @property
    def speedup(self) -> float:
        return self.result.speedup_of(self.result.trees[0]).median

    @property
    def tokens_per_pass(self) -> float:
        return self.result.trees[0].tokens_per_pass

    def as_dict(self) -> dict[str, Any]:
        """Return the report in a form ready for JSON."""
        arms = {arm.name: _arm_dict(self.result, arm) for arm in self.result.arms}
        by_kind = {kind: part.as_kind_dict() for kind, part in self.by_kind().items()}
        return {
            "speedup": self.speedup,
            "tokens_per_pass": self.tokens_per_pass,
            "tree": self.result.trees[0].name,
            "num_prompts": self.num_prompts,
            "num_pairs": len(self.result.plain.runs),
            "plain_target_ms_per_pass": self.result.plain.split["target"],
            "arms": arms,
            "options": dict(self.options),
            "environment": self.environment.as_dict(),
            "ceilings": None if self.ceilings is None else self.ceilings.as_dict(),
            **({"by_kind": by_kind} if self.kinds else {}),
        }

    def as_kind_dict(self) -> dict[str, Any]:
        """Return the numbers that are reported for each kind of prompt, in a form ready for JSON."""
        arms = {arm.name: _summary(arm) for arm in self.result.arms}
        for arm in self.result.trees:
            arms[arm.name] |= self.result.speedup_of(arm).fields("speedup")
        return {"num_prompts": self.num_prompts, "arms": arms, "peers": {}}


def _summary(arm: Arm) -> dict[str, object]:
    return {
        **arm.tokens_per_second.fields("tokens_per_second"),
        **arm.ms_per_token.fields("ms_per_token"),
        "prompt_ms": arm.spread(lambda run: 1000 * run.prompt_time).median,
        "tokens_per_pass": arm.tokens_per_pass,
        "guessed_per_pass": arm.nodes,
    }


def _arm_dict(result: Comparison, arm: Arm) -> dict[str, object]:
    ratios: dict[str, object] = {}
    if arm is not result.plain:
        ratios |= result.speedup_of(arm).fields("speedup") | result.total_speedup_of(arm).fields("request_speedup")
        ratios["tokens_before_parting"] = result.partings(arm)
    total = arm.ms_per_pass
    return ratios | {
        **_summary(arm),
        "acceptance_by_depth": arm.acceptance_by_depth,
        "ms_per_pass": {**arm.split, "total": total},
        "percent_of_pass": {name: 100 * ms / total for name, ms in arm.split.items()},
        "stages": arm.stages.as_dict(),
        "num_tokens": arm.num_tokens,
        "num_passes": arm.num_passes,
        "runs": [run.as_request() for run in arm.runs],
    }


def print_latency(report: LatencyReport, console: Console) -> None:
    """Print the models and environment, speeds, the parts of a pass, and acceptance."""
    result = report.result
    print_models(report, console)
    num_tokens: object = f"at most {report.options['max_tokens']}" if report.kinds else result.plain.runs[0].num_decoded
    print_rows(
        console,
        f"One request at a time: {report.num_prompts} prompts, {len(result.plain.runs)} runs of each tree, "
        f"{num_tokens} tokens after the first; medians",
        (
            _NAME,
            Column("tokens/s", lambda arm: f"{arm.tokens_per_second.median:.4g}"),
            Column("ms/token", lambda arm: f"{arm.ms_per_token.median:.4g}"),
            Column("tokens/pass", lambda arm: f"{arm.tokens_per_pass:.2f}"),
            Column("guessed/pass", lambda arm: f"{arm.nodes:.1f}"),
        ),
        result.arms,
    )
    speedups = (
        Column[Arm]("speedup", lambda arm: f"{result.speedup_of(arm).median:.2f}"),
        Column[Arm]("quartiles", lambda arm: "" if arm is result.plain else result.speedup_of(arm).quartiles),
        Column[Arm]("min-max", lambda arm: "" if arm is result.plain else _range(result, arm)),
        Column[Arm]("with prompt", lambda arm: f"{result.total_speedup_of(arm).median:.2f}"),
    )
    print_rows(console, "Speedup over plain decoding, run by run", (_NAME, *speedups), result.arms)
    if report.kinds:
        _print_kinds(report, console)
    parts = [Column[Arm](name, _part_of(name)) for name in result.plain.split]
    total = Column[Arm]("total", lambda arm: f"{arm.ms_per_pass:.2f}")
    print_rows(console, "Mean time of one pass, ms", (_NAME, *parts, total), result.arms)
    print_stages(report.ceilings, (_NAME,), result.arms, lambda arm: arm, console)
    console.print()
    for arm in result.trees:
        if shares := arm.acceptance_by_depth:
            console.print(
                f"tree {arm.name}: guesses kept at depth 1, 2, ...: " + ", ".join(f"{share:.0%}" for share in shares)
            )
        console.print(fidelity(arm.name, (result,), report.environment, report.options, what="run"))


def _range(result: Comparison, arm: Arm) -> str:
    speedup = result.speedup_of(arm)
    return f"{speedup.min:.2f}-{speedup.max:.2f}"


def _part_of(name: str) -> Any:
    return lambda arm: f"{arm.split[name]:.2f} ({arm.split[name] / arm.ms_per_pass:.0%})"


def _print_kinds(report: LatencyReport, console: Console) -> None:
    rows = [(kind, part.result, arm) for kind, part in report.by_kind().items() for arm in part.result.arms]
    columns: tuple[Column[tuple[str, Comparison, Arm]], ...] = (
        Column("kind", lambda row: row[0], label=True, once=True),
        Column("tree", lambda row: row[2].name, label=True),
        Column("tokens/s", lambda row: f"{row[2].tokens_per_second.median:.4g}"),
        Column("tokens/pass", lambda row: f"{row[2].tokens_per_pass:.2f}"),
        Column("speedup", lambda row: f"{row[1].speedup_of(row[2]).median:.2f}"),
        Column("quartiles", lambda row: "" if row[2].name == PLAIN else row[1].speedup_of(row[2]).quartiles),
    )
    print_rows(console, "By kind of prompt", columns, rows)


def plot_latency(report: LatencyReport, path: str | Path, others: Sequence[Arm] = ()) -> None:
    """Draw the speed of each run, of other engines too, and the parts of the time of a pass.

    Raises:
        ValueError: matplotlib is missing, or the suffix is unknown.
    """
    result = report.result
    arms = (*result.arms, *others)
    splits = [arm.split for arm in result.arms]
    tokens = [f"{arm.tokens_per_pass:.2f} tokens" for arm in result.arms]
    parts = [
        Series(
            name, [split[name] for split in splits], colour=PART_COLOURS[name], notes=tokens if name == "rest" else ()
        )
        for name in splits[0]
    ]
    title = (
        f"{Path(str(report.options['model'])).name}: {report.environment.description}, {report.num_prompts} prompts, "
        f"one request at a time{floors_text(result.arms)}"
    )
    names = [arm.name for arm in arms]
    speeds = Panel("Speed of each run; bar: median", [*_dots(result, others)], horizontal=True, names=names,
                   label="tokens per second", place_label="tree, or other engine" if others else "tree")  # fmt: skip
    split = Panel("Mean time of one pass, and tokens it gave", parts, kind="stacked", horizontal=True, names=names,
                  label="milliseconds", legend="below")  # fmt: skip
    draw_plot(path, title, [speeds, split], width=11, height=2.6 + 0.7 * len(names))


def _dots(result: Comparison, others: Sequence[Arm]) -> Sequence[Series]:
    """Return a dot for each run, spread over a band in the order of the runs, and a mark at each median."""
    series = []
    for row, arm in enumerate((*result.arms, *others)):
        colour = _OTHERS_COLOUR if arm in others else "#0072B2"
        speeds = [run.tokens_per_second for run in arm.runs]
        band = [row - 0.18 + 0.36 * (i + 0.5) / len(speeds) for i in range(len(speeds))]
        note = f"  (speedup {result.speedup_of(arm).median:.2f})" if arm in result.trees else ""
        median = arm.tokens_per_second.median
        series.append(Series(arm.name, speeds, x=band, colour=colour, line="none"))
        series.append(Series("", [median], x=[row], colour="#000000", line="none", marker="|",
                             notes=[f"{median:.1f}{note}"]))  # fmt: skip
    return series

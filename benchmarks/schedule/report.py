"""The result of a comparison of speculation policies: its numbers, its tables on a terminal, and its plot."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.schedule.plans import AUTO, LEARNED
from specinfer.bench.comparisons import Comparison
from specinfer.bench.results import Arm
from specinfer.reporting.environment import Environment
from specinfer.reporting.plots import PART_COLOURS, Panel, Series, draw_plot
from specinfer.reporting.spread import Spread
from specinfer.reporting.tables import Column, print_models, print_rows

MIX = "mix"


def rate_of(arm: Arm) -> float:
    """Return all tokens after the first divided by all seconds after the first."""
    return arm.num_tokens / sum(run.time for run in arm.runs)


@dataclass(frozen=True, slots=True)
class ScheduleReport:
    """All arms on the same prompts.

    Attributes:
        parts: Part of the workload that each prompt belongs to.
        fallbacks: Number of choices that the learned policy left to the cost policy, by reason. "decided" counts the
            choices that it made itself.
    """

    result: Comparison
    parts: tuple[str, ...]
    part_names: tuple[str, ...]
    fallbacks: Mapping[str, int]
    options: Mapping[str, object]
    environment: Environment

    @property
    def arms(self) -> tuple[Arm, ...]:
        return self.result.arms

    def arm(self, name: str, part: str = MIX) -> Arm:
        """Return an arm with its runs on a part of the workload, or all runs for "mix"."""
        return self.result.arm(name).of([number for number, own in enumerate(self.parts) if part in (own, MIX)])

    @property
    def best_fixed(self) -> Arm:
        """The fastest fixed configuration over the mix, where plain decoding counts as one."""
        return max((arm for arm in self.arms if arm.name not in (AUTO, LEARNED)), key=rate_of)

    def ratio(self, name: str, base: str, part: str) -> float:
        """Return the tokens per second of one arm divided by those of another."""
        return rate_of(self.arm(name, part)) / rate_of(self.arm(base, part))

    def paired(self, name: str, base: str, part: str) -> Spread:
        """Return the same ratio for each pair of runs."""
        pairs = zip(self.arm(name, part).runs, self.arm(base, part).runs, strict=True)
        return Spread.from_values(run.tokens_per_second / other.tokens_per_second for run, other in pairs)

    def num_partings(self, name: str) -> int:
        """Return the number of outputs that differ from plain decoding."""
        return len(self.result.partings(self.arm(name)))

    def as_dict(self) -> dict[str, Any]:
        """Return the report in a form ready for JSON."""
        parts, best = (*self.part_names, MIX), self.best_fixed.name
        paired = {part: self.paired(LEARNED, best, part) for part in parts}
        return {
            "best_fixed": best,
            "learned_over_best_fixed": {part: self.ratio(LEARNED, best, part) for part in parts},
            "learned_over_best_fixed_paired": {
                part: {"median": spread.median, **spread.as_dict()} for part, spread in paired.items()
            },
            "auto_over_best_fixed": {part: self.ratio(AUTO, best, part) for part in parts},
            "fallbacks": dict(self.fallbacks),
            "arms": {arm.name: self._arm_dict(arm.name) for arm in self.arms},
            "options": dict(self.options),
            "environment": self.environment.as_dict(),
        }

    def _arm_dict(self, name: str) -> dict[str, object]:
        parts = {part: self.arm(name, part) for part in (*self.part_names, MIX)}
        return {
            "tokens_per_second": {part: rate_of(arm) for part, arm in parts.items()},
            "tokens_per_pass": {part: arm.tokens_per_pass for part, arm in parts.items()},
            "nodes_per_pass": {part: arm.nodes for part, arm in parts.items()},
            "num_partings": self.num_partings(name),
            "runs": [{"part": self.parts[run.prompts[0]], **run.as_request()} for run in parts[MIX].runs],
        }


def print_schedule(report: ScheduleReport, console: Console) -> None:
    """Print the speeds by part, and compare "auto" and the learned policy with the best fixed configuration."""
    print_models(report, console)
    parts, best, num_runs = (*report.part_names, MIX), report.best_fixed.name, len(report.arms[0].runs)

    def shown(name: str) -> str:
        return f"[bold]{name}[/bold]" if name in (best, AUTO, LEARNED) else name

    name = Column[Arm]("arm", lambda arm: shown(arm.name), label=True)

    def speed(part: str) -> Column[Arm]:
        return Column(part, lambda arm: f"{rate_of(report.arm(arm.name, part)):.1f}")

    heading = f"Tokens per second, {num_runs} runs of each arm, {report.options['max_tokens']} tokens each"
    print_rows(console, heading, (name, *map(speed, parts)), report.arms)
    console.print("tokens over seconds after the first token, all runs of a part together")
    passes = (
        Column[Arm]("per pass", lambda arm: f"{arm.tokens_per_pass:.2f}"),
        Column[Arm]("nodes", lambda arm: f"{arm.nodes:.1f}"),
    )
    print_rows(console, "Tokens and guesses per pass over the mix", (name, *passes), report.arms)

    def paired(policy: str, part: str) -> str:
        spread = report.paired(policy, best, part)
        return f"{spread.median:.3f} ({spread.quartiles})"

    ratios = (
        Column[str]("part", str, label=True),
        Column[str](AUTO, lambda part: f"{report.ratio(AUTO, best, part):.3f}"),
        Column[str]("by prompt", lambda part: paired(AUTO, part)),
        Column[str](LEARNED, lambda part: f"{report.ratio(LEARNED, best, part):.3f}"),
        Column[str]("by prompt", lambda part: paired(LEARNED, part)),
    )
    print_rows(console, f"Against {best}, the best single configuration over the mix", ratios, parts)
    console.print()
    console.print("the learned policy: " + ", ".join(f"{count} {name}" for name, count in report.fallbacks.items()))
    for arm in report.arms[1:]:
        if count := report.num_partings(arm.name):
            console.print(
                f"{arm.name}: {count} of {num_runs} outputs part from plain decoding in "
                f"{report.environment.precision} rounding"
            )


def plot_schedule(report: ScheduleReport, path: str | Path) -> None:
    """Draw the speed of every arm on every part of the workload.

    Raises:
        ValueError: matplotlib is missing, or the suffix is unknown.
    """
    best, names = report.best_fixed.name, [arm.name for arm in report.arms]
    colours = {LEARNED: "draft", AUTO: "verify", best: "target"}
    panels = []
    for part in (*report.part_names, MIX):
        series = []
        for place, name in enumerate(names):
            rate = rate_of(report.arm(name, part))
            colour = PART_COLOURS[colours.get(name, "rest")]
            series.append(Series(name, [rate], x=[place], colour=colour, notes=[f"{rate:.0f}"]))
        title = f"{part}: learned {report.ratio(LEARNED, best, part):.2f} of {best}"
        panels.append(Panel(title, series, kind="stacked", horizontal=True, names=names, label="tokens per second"))
    title = f"{Path(str(report.options['model'])).name}: {report.environment.description}, one request at a time"
    draw_plot(path, title, panels, width=13, height=1.6 + 0.28 * len(names), shares_places=True)

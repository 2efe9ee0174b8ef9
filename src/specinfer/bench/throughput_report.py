"""The result of a throughput measurement: its numbers, its tables on a terminal, and its plot."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from specinfer.bench.ceilings import Ceilings
from specinfer.bench.comparisons import Comparison, fidelity, numbers_by_kind
from specinfer.bench.results import PARTS, Arm
from specinfer.bench.stages import floors_text, print_stages
from specinfer.reporting.environment import Environment
from specinfer.reporting.plots import PART_COLOURS, SERIES_COLOURS, Panel, Series, draw_plot
from specinfer.reporting.spread import Spread
from specinfer.reporting.tables import Column, print_models, print_rows


@dataclass(frozen=True, slots=True)
class ThroughputReport:
    """Results of all batch sizes, in the requested order.

    Attributes:
        ceilings: Measured limits of the device, from which the floors of stages are computed.
        kinds: Kind of each prompt, by its number. Empty if the prompts are texts to continue.
    """

    results: tuple[Comparison, ...]
    options: Mapping[str, object]
    environment: Environment
    ceilings: Ceilings | None = None
    kinds: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arms. The first is plain decoding."""
        return tuple(arm.name for arm in self.results[0].arms)

    def by_kind(self, result: Comparison, arm: Arm) -> dict[str, tuple[float, float]]:
        """Return tokens per pass, and speed over plain decoding, of the requests of each kind of prompt."""
        return {kind: result.kind_of(arm, numbers) for kind, numbers in numbers_by_kind(self.kinds).items()}

    def as_dict(self) -> dict[str, Any]:
        """Return the report in a form ready for JSON."""
        batches = [result.as_dict() for result in self.results]
        if self.kinds:
            for batch, result in zip(batches, self.results, strict=True):
                batch["by_kind"] = {arm.name: self._kind_dict(result, arm) for arm in result.trees}
        return {
            "batches": batches,
            "options": dict(self.options),
            "environment": self.environment.as_dict(),
            "ceilings": None if self.ceilings is None else self.ceilings.as_dict(),
        }

    def _kind_dict(self, result: Comparison, arm: Arm) -> dict[str, object]:
        """Return the numbers of the kinds with prompts in these batches, ready for JSON."""
        return {
            kind: {"tokens_per_pass": tokens, "request_speedup": speedup}
            for kind, (tokens, speedup) in self.by_kind(result, arm).items()
            if not math.isnan(tokens)
        }


class _Row(NamedTuple):
    result: Comparison
    arm: Arm

    @property
    def is_plain(self) -> bool:
        return self.arm is self.result.plain


_LABELS = (
    Column[_Row]("batch", lambda row: str(row.result.size), label=True, once=True),
    Column[_Row]("tree", lambda row: row.arm.name, label=True),
)
_SPEEDS = (
    Column[_Row]("nodes", lambda row: f"{row.arm.nodes:.1f}"),
    Column[_Row]("tokens/s", lambda row: f"{row.arm.tokens_per_second.median:.1f}"),
    Column[_Row]("ratio", lambda row: f"{row.result.speedup_of(row.arm).median:.2f}"),
    Column[_Row]("quartiles", lambda row: "" if row.is_plain else row.result.speedup_of(row.arm).quartiles),
    Column[_Row]("in all", lambda row: f"{row.arm.total_tokens_per_second.median:.1f}"),
    Column[_Row]("ratio", lambda row: f"{row.result.total_speedup_of(row.arm).median:.2f}"),
)


def print_throughput(report: ThroughputReport, console: Console) -> None:
    """Print speeds, the parts of the time, and whether the tokens equal those of plain decoding."""
    print_models(report, console)
    rows = [_Row(result, arm) for result in report.results for arm in result.arms]
    tokens = f"{report.options['max_tokens']} tokens each"
    print_rows(console, f"Requests that run together, {tokens}; medians of batches", (*_LABELS, *_SPEEDS), rows)
    console.print(
        "nodes: guesses of a request in a pass; tokens/s: of decoding, after all prompts were read, and in all; "
        "ratio: over plain decoding, batch by batch"
    )
    passes = (
        Column[_Row]("tokens", lambda row: f"{row.arm.tokens_per_pass:.2f}"),
        Column[_Row]("ms", lambda row: f"{row.arm.ms_per_pass:.1f}"),
        *(Column[_Row](part, _share_of(part)) for part in PARTS),
    )
    print_rows(
        console, "Tokens of a request in a pass, its time, and the share of each part", (*_LABELS, *passes), rows
    )
    if report.kinds:
        columns = [*_LABELS, *(Column(kind, _kind_of(report, kind)) for kind in dict.fromkeys(report.kinds))]
        title = "By kind of prompt: tokens of a request in a pass, its speed over plain decoding"
        print_rows(console, title, columns, [row for row in rows if not row.is_plain])
    print_stages(report.ceilings, _LABELS, rows, lambda row: row.arm, console)
    console.print()
    for name in report.names[1:]:
        console.print(fidelity(name, report.results, report.environment, report.options))


def _share_of(part: str) -> Callable[[_Row], str]:
    return lambda row: f"{row.arm.shares[part]:.0%}"


def _kind_of(report: ThroughputReport, kind: str) -> Callable[[_Row], str]:
    def cell(row: _Row) -> str:
        tokens, speedup = report.by_kind(row.result, row.arm)[kind]
        return "" if math.isnan(tokens) else f"{tokens:.2f} {speedup:.2f}"

    return cell


def plot_throughput(report: ThroughputReport, path: str | Path) -> None:
    """Draw speed by batch size, ratio to plain decoding, and the parts of the time.

    Raises:
        ValueError: matplotlib is missing, or the suffix is unknown.
    """
    results, sizes = report.results, [result.size for result in report.results]
    first = [f"{result.speedup_of(result.arms[1]).median:.2f}\n{result.arms[1].nodes:.1f} nodes" for result in results]

    def lines(value: Callable[[Comparison, Arm], Spread], names: tuple[str, ...], notes: list[str]) -> list[Series]:
        return [
            Series(name, [value(one, one.arm(name)) for one in results], x=sizes, notes=notes if number == 0 else (),
                   colour=SERIES_COLOURS[report.names.index(name) % len(SERIES_COLOURS)])
            for number, name in enumerate(names)
        ]  # fmt: skip

    stacks = [(result.arms[side], f"{result.size} {result.arms[side].name}") for result in results for side in (0, 1)]
    parts = [Series(part, [100 * arm.shares[part] for arm, _ in stacks], colour=PART_COLOURS[part]) for part in PARTS]
    together = "requests that run together"
    panels = [
        Panel("Decoding; bars: quartiles", lines(lambda _, arm: arm.tokens_per_second, report.names, []), counts=True,
              label="tokens per second, all requests", place_label=together, legend="inside", legend_title="tree"),
        Panel("Ratio to plain decoding, and nodes of a request",
              lines(lambda result, arm: result.speedup_of(arm), report.names[1:], first), counts=True,
              label="ratio, median over batches", place_label=together, levels=(1.0,)),
        Panel("Where the time of decoding went", parts, kind="stacked", horizontal=True, label="percent",
              names=[name for _, name in stacks], place_label="requests together, tree", top=100, legend="below"),
    ]  # fmt: skip
    title = (
        f"{Path(str(report.options['model'])).name}: {report.environment.description}, {report.options['max_tokens']} "
        f"tokens for each request{floors_text(results[0].arms, results[0].size)}"
    )
    draw_plot(path, title, panels)

"""The tables of a tuning report on a terminal, and its plot: hit rates, and tokens per pass by number of drafters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from specinfer.learning.tune.evaluation import MODES, RANKS, Passes
from specinfer.learning.tune.report import TuneReport
from specinfer.reporting.plots import SERIES_COLOURS, check_plot, new_figure
from specinfer.reporting.tables import models_line, new_table, print_table

if TYPE_CHECKING:  # matplotlib is an extra: only drawing needs it
    from matplotlib.axes import Axes

_LINES = {"start": ":", "boosted": "-", "independent": "--"}


def print_report(report: TuneReport, console: Console) -> None:
    """Print the hit rates of each drafter, what it adds to those before, and passes with one, two, ... of them."""
    console.print(models_line(str(report.options["model"]), report.environment))
    cut = f"; {report.num_cut} prompts were too long and were cut to their ends" if report.num_cut else ""
    console.print(
        f"{report.num_examples} examples with {report.num_tokens / 1e6:.2f} M tokens of the target, generated in "
        f"{report.collecting_seconds:.0f} s; examples trained on, by drafter: "
        + ", ".join(map(str, report.num_left))
        + cut
    )
    print_table(console, "Training", _training_table(report))
    for mode in MODES:
        for title, table in _tables(report, mode):
            print_table(console, f"{mode.capitalize()} held-out text: {title}", table)
    console.print()
    for name, folder in report.folders.items():
        console.print(f"{name}: {folder}", soft_wrap=True)
    if report.gain is not None and report.gain <= 1:
        console.print(
            f"drafter-1 got worse: {report.gain:.2f} times the tokens per pass that it had before. Use its initial "
            "weights, or train it on more text or with a smaller --learning-rate."
        )


def _training_table(report: TuneReport) -> Table:
    table = new_table("drafter", "parameters", "steps", "tokens", "seconds", "loss, nats")
    for name, numbers in report.training.items():
        table.add_row(
            name,
            f"{numbers['parameters'] / 1e6:.2f} M",
            f"{numbers['steps']:.0f}",
            f"{numbers['tokens'] / 1e6:.2f} M",
            f"{numbers['seconds']:.0f}",
            f"{numbers['loss']:.3f}",
        )
    return table


def _tables(report: TuneReport, mode: str) -> Iterator[tuple[str, Table]]:
    """Yield the titles and tables of a mode."""
    if rates := [rate for rate in report.hit_rates if rate.mode == mode]:
        table = new_table("drafter", *(f"k={k}" for k in range(1, RANKS + 1)))
        for rate in rates:
            table.add_row(rate.drafter, *(f"{value:.1%}" for value in rate.hit_rates))
        yield "target tokens among the k best tokens of the drafter", table
    if parts := [part for part in report.coverage if part.mode == mode]:
        table = new_table("drafter", "alone", "added", "overlap")
        for part in parts:
            table.add_row(part.drafter, f"{part.alone:.1%}", f"{part.added:.1%}", f"{part.overlap:.1%}")
        yield "target tokens predicted by the drafters of a set", table
    if passes := [each for each in report.passes if each.mode == mode]:
        yield "tokens per target pass (draft tokens per pass, after merging)", _passes_table(passes)


def _passes_table(passes: Sequence[Passes]) -> Table:
    counts = sorted({len(each.arm.drafters) for each in passes})
    table = new_table("drafters", "tree of each", *map(str, counts), labels=(0, 1))
    for kind, tree in dict.fromkeys((each.arm.kind, each.arm.tree) for each in passes):
        cells = {
            len(each.arm.drafters): f"{each.tokens_per_pass:.3f} ({each.nodes:.1f})"
            for each in passes
            if (each.arm.kind, each.arm.tree) == (kind, tree)
        }
        table.add_row(kind, shown_tree(tree), *(cells.get(count, "") for count in counts))
    return table


def shown_tree(tree: str) -> str:
    """Return a readable name of a tree."""
    return tree if ":" in tree else f"chain of {tree.count(',') + 1}"


def plot_report(report: TuneReport, path: str | Path) -> None:
    """Plot a report to a file.

    Raises:
        ValueError: matplotlib is missing, or the suffix is unknown.
    """
    check_plot(path)
    modes = [mode for mode in MODES if any(rate.mode == mode for rate in report.hit_rates)]
    figure = new_figure(11, 3.6 * len(modes))
    figure.suptitle(f"{report.options['target']}: {len(report.folders)} tuned drafters; held-out text")
    panels = figure.subplots(len(modes), 2, squeeze=False)
    for mode, (left, right) in zip(modes, panels, strict=True):
        _draw_hit_rates(left, report, mode)
        _draw_passes(right, report, mode)
    figure.savefig(path, dpi=150)


def _draw_hit_rates(axes: Axes, report: TuneReport, mode: str) -> None:
    names = list(dict.fromkeys(rate.drafter for rate in report.hit_rates))
    for rate in report.hit_rates:
        if rate.mode == mode:
            kind = {"start": "start", "control": "independent"}.get(rate.drafter.split("-")[0], "boosted")
            colour = SERIES_COLOURS[names.index(rate.drafter) % len(SERIES_COLOURS)]
            axes.plot(
                range(1, RANKS + 1), [100 * value for value in rate.hit_rates],
                _LINES[kind], marker="o", markersize=3, color=colour, label=rate.drafter,
            )  # fmt: skip
    axes.set_ylabel("include the target's token, %")
    _finish(axes, f"{mode} text: hit rate by rank", "k best tokens of the drafter", RANKS)


def _draw_passes(axes: Axes, report: TuneReport, mode: str) -> None:
    passes = [each for each in report.passes if each.mode == mode]
    trees = list(dict.fromkeys(each.arm.tree for each in passes))
    boosted = Counter(each.arm.tree for each in passes if each.arm.kind == "boosted")
    for tree in [tree for tree in trees if boosted[tree] > 1] or trees[:1]:
        colour = SERIES_COLOURS[trees.index(tree) % len(SERIES_COLOURS)]
        for kind, line in _LINES.items():
            points = [
                (len(each.arm.drafters), each.tokens_per_pass)
                for each in passes
                if (each.arm.kind, each.arm.tree) == (kind, tree)
            ]
            if points:
                axes.plot(
                    *zip(*points, strict=True), line, marker="s", markersize=4, color=colour,
                    label=f"{kind}, {shown_tree(tree)}",
                )  # fmt: skip
    axes.set_ylabel("tokens per pass")
    _finish(axes, f"{mode} text: tokens per target pass", "drafters, merged", len(report.folders))


def _finish(axes: Axes, title: str, label: str, count: int) -> None:
    """Set the title and the axis from 1 to a count."""
    axes.set_xticks(range(1, count + 1))
    axes.set_xlabel(label)
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)

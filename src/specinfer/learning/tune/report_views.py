"""The tables of a tuning report on a terminal, and its plot: hit rates, and tokens per pass by number of drafters."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from specinfer.learning.tune.evaluation import MODES, RANKS
from specinfer.learning.tune.report import TuneReport
from specinfer.reporting.plots import SERIES_COLOURS, check_plot, new_figure
from specinfer.reporting.tables import new_table, print_models, print_table

if TYPE_CHECKING:  # matplotlib is an extra: only drawing needs it
    from matplotlib.axes import Axes

_LINES = {"start": ":", "boosted": "-", "independent": "--"}


def print_report(report: TuneReport, console: Console) -> None:
    """Print the hit rates of each drafter, what it adds to those before, and passes with one, two, ... of them."""
    print_models(report, console)
    cut = f"; {report.num_cut} prompts were too long and were cut to their ends" if report.num_cut else ""
    console.print(
        f"{report.num_examples} examples with {report.num_tokens / 1e6:.2f} M tokens of the target, generated in "
        f"{report.collecting_seconds:.0f} s; examples trained on, by drafter: "
        + ", ".join(map(str, report.num_left))
        + cut
    )
    print_table(console, "Training", _training_table(report))
    for mode in MODES:
        tables = (
            (report.hit_rates, "target tokens among the k best tokens of the drafter", _hit_rate_table),
            (report.coverage, "target tokens predicted by the drafters of a set", _coverage_table),
            (report.passes, "tokens per target pass (draft tokens per pass, after merging)", _passes_table),
        )
        for values, title, make_table in tables:
            if any(one.mode == mode for one in values):
                heading = f"{mode.capitalize()} held-out text: {title}"
                print_table(console, heading, make_table(report, mode))
    console.print()
    for name, folder in report.folders.items():
        console.print(f"{name}: {folder}", soft_wrap=True)


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


def _hit_rate_table(report: TuneReport, mode: str) -> Table:
    table = new_table("drafter", *(f"k={k}" for k in range(1, RANKS + 1)))
    for one in report.hit_rates:
        if one.mode == mode:
            table.add_row(one.drafter, *(f"{rate:.1%}" for rate in one.hit_rates))
    return table


def _coverage_table(report: TuneReport, mode: str) -> Table:
    table = new_table("drafter", "alone", "added", "overlap")
    for one in report.coverage:
        if one.mode == mode:
            table.add_row(one.drafter, f"{one.alone:.1%}", f"{one.added:.1%}", f"{one.overlap:.1%}")
    return table


def _passes_table(report: TuneReport, mode: str) -> Table:
    chosen = [one for one in report.passes if one.mode == mode]
    counts = sorted({len(one.arm.drafters) for one in chosen})
    table = new_table("drafters", "tree of each", *(str(count) for count in counts), num_labels=2)
    for kind in dict.fromkeys(one.arm.kind for one in chosen):
        of_kind = [one for one in chosen if one.arm.kind == kind]
        for tree in dict.fromkeys(one.arm.tree for one in of_kind):
            cells = {
                len(one.arm.drafters): f"{one.tokens_per_pass:.3f} ({one.nodes:.1f})"
                for one in of_kind
                if one.arm.tree == tree
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
    modes = [mode for mode in MODES if any(one.mode == mode for one in report.hit_rates)]
    figure = new_figure(11, 3.6 * len(modes))
    figure.suptitle(f"{report.options['target']}: {len(report.folders)} tuned drafters; held-out text")
    panels = figure.subplots(len(modes), 2, squeeze=False)
    for mode, (left, right) in zip(modes, panels, strict=True):
        _draw_hit_rates(left, report, mode)
        _draw_passes(right, report, mode)
    figure.savefig(path, dpi=150)


def _draw_hit_rates(axes: Axes, report: TuneReport, mode: str) -> None:
    names = list(dict.fromkeys(one.drafter for one in report.hit_rates))
    for one in report.hit_rates:
        if one.mode == mode:
            kind = {"start": "start", "control": "independent"}.get(one.drafter.split("-")[0], "boosted")
            colour = SERIES_COLOURS[names.index(one.drafter) % len(SERIES_COLOURS)]
            axes.plot(
                range(1, RANKS + 1), [100 * rate for rate in one.hit_rates],
                _LINES[kind], marker="o", markersize=3, color=colour, label=one.drafter,
            )  # fmt: skip
    axes.set_xticks(range(1, RANKS + 1))
    axes.set_xlabel("k best tokens of the drafter")
    axes.set_ylabel("include the target's token, %")
    axes.set_title(f"{mode} text: hit rate by rank", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)


def _draw_passes(axes: Axes, report: TuneReport, mode: str) -> None:
    chosen = [one for one in report.passes if one.mode == mode]
    trees = list(dict.fromkeys(one.arm.tree for one in chosen))
    kept = [tree for tree in trees if sum(one.arm.tree == tree and one.arm.kind == "boosted" for one in chosen) > 1]
    for tree in kept or trees[:1]:
        colour = SERIES_COLOURS[trees.index(tree) % len(SERIES_COLOURS)]
        for kind, line in _LINES.items():
            points = [
                (len(one.arm.drafters), one.tokens_per_pass)
                for one in chosen
                if one.arm.tree == tree and one.arm.kind == kind
            ]
            if points:
                axes.plot(
                    *zip(*points, strict=True), line, marker="s", markersize=4, color=colour,
                    label=f"{kind}, {shown_tree(tree)}",
                )  # fmt: skip
    axes.set_xticks(range(1, len(report.folders) + 1))
    axes.set_xlabel("drafters, merged")
    axes.set_ylabel("tokens per pass")
    axes.set_title(f"{mode} text: tokens per target pass", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)

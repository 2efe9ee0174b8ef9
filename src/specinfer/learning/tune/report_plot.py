"""A plot of a tuning report: hit rates before and after, and tokens per pass by the number of drafters."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from specinfer.learning.tune.evaluation import MODES, RANKS
from specinfer.learning.tune.report import TuneReport
from specinfer.learning.tune.report_table import shown_tree
from specinfer.reporting.plots import SERIES_COLOURS, check_plot, new_figure

if TYPE_CHECKING:  # matplotlib is an extra: only drawing needs it
    from matplotlib.axes import Axes

_LINES = {"start": ":", "boosted": "-", "independent": "--"}


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

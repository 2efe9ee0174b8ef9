"""Plot of pass times by rows: absolute, relative to one row, and as weight bandwidth against the memory limit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from specinfer.bench.kernels_report import TREE, KernelsReport, Pass
from specinfer.bench.plot import SERIES_COLOURS, check_plot, count_axis, draw_spreads, new_figure

if TYPE_CHECKING:  # matplotlib is an optional extra, which only plotting needs
    from matplotlib.axes import Axes


def plot_kernels(report: KernelsReport, path: str | Path) -> None:
    """Draw a report into a file.

    Raises:
        ValueError: matplotlib is missing, or the suffix is unknown.
    """
    check_plot(path)
    figure = new_figure(14, 4.4)
    times, relative, rates = figure.subplots(1, 3)
    environment, model = report.environment, Path(str(report.options["model"])).name
    figure.suptitle(
        f"{model}: {environment.target_parameters / 1e6:,.0f} M parameters, {environment.device}, "
        f"{environment.num_threads} threads; a pass over a tree after {report.options['context']} tokens"
    )
    _draw_times(times, report)
    _draw_relative(relative, report)
    _draw_rates(rates, report)
    for axes in (times, relative, rates):
        count_axis(axes, report.arms[0].sizes(TREE), "rows: nodes of the tree")
    figure.savefig(path, dpi=150)


def _colour(place: int) -> str:
    return SERIES_COLOURS[1:][place % (len(SERIES_COLOURS) - 1)]


def _draw_times(axes: Axes, report: KernelsReport) -> None:
    for place, times in enumerate(report.arms):
        sizes = times.sizes(TREE)
        spreads = [times.ms(Pass(TREE, size)) for size in sizes]
        draw_spreads(axes, sizes, spreads, _colour(place), times.arm.name)
    axes.set_ylim(bottom=0)
    axes.set_title("Time of a pass; bars: quartiles")
    axes.set_ylabel("milliseconds")
    axes.legend(frameon=False)


def _draw_relative(axes: Axes, report: KernelsReport) -> None:
    for place, times in enumerate(report.arms):
        sizes = times.sizes(TREE)
        draw_spreads(axes, sizes, [times.relative(size) for size in sizes], _colour(place), times.arm.name)
    axes.axhline(1.0, color="black", linewidth=1)
    axes.set_ylim(bottom=0)
    axes.set_title("Time of a pass over that of one row")
    axes.set_ylabel("ratio, median of pairs")


def _draw_rates(axes: Axes, report: KernelsReport) -> None:
    for place, times in enumerate(report.arms):
        sizes = times.sizes(TREE)
        rates = [times.bytes_per_second(size) / 1e9 for size in sizes]
        axes.plot(sizes, rates, marker="o", markersize=4, color=_colour(place), label=times.arm.name)
    axes.axhline(report.limit / 1e9, color="black", linewidth=1, linestyle="--")
    axes.annotate(
        "what memory gives", (1, report.limit / 1e9), (0, 3), textcoords="offset points", ha="left", va="bottom"
    )
    axes.set_ylim(0, 1.15 * max(report.limit, *(times.bytes_per_second(1) for times in report.arms)) / 1e9)
    axes.set_title("Weights read")
    axes.set_ylabel("GB per second")

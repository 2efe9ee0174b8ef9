"""Plot of a report on split targets: ratios, predicted and measured speeds, and memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from specinfer.bench.parallel_plans import WHOLE
from specinfer.bench.parallel_report import ParallelReport, ParallelResult
from specinfer.bench.plot import SERIES_COLOURS, check_plot, new_figure

if TYPE_CHECKING:  # matplotlib is an optional extra that only drawing needs
    from matplotlib.axes import Axes

_WIDTH = 0.8  # total width of the bars of one situation


def plot_parallel(report: ParallelReport, path: str | Path) -> None:
    """Draw a report to a file.

    Raises:
        ValueError: matplotlib is missing, or the suffix is unknown.
    """
    check_plot(path)
    figure = new_figure(6 + 0.9 * len(report.split_results), 4.8)
    ratios, predictions, memory = figure.subplots(1, 3, width_ratios=(2.2, 1, 0.9))
    environment, model = report.environment, Path(str(report.options["model"])).name
    figure.suptitle(
        f"{model}: {environment.target_parameters / 1e6:,.0f} M parameters, {environment.precision}, split over "
        "processes"
    )
    _draw_ratios(ratios, report)
    _draw_predictions(predictions, report)
    _draw_memory(memory, report)
    figure.savefig(path, dpi=150)


def _draw_ratios(axes: Axes, report: ParallelReport) -> None:
    """Draw the median ratios with quartiles as bars."""
    results, width = report.split_results, _WIDTH / (len(report.names) - 1)
    for place, name in enumerate(report.names[1:]):
        spreads = [result.ratio(result.trees[place]) for result in results]
        medians = [spread.median for spread in spreads]
        below = [spread.median - spread.lower_quartile for spread in spreads]
        above = [spread.upper_quartile - spread.median for spread in spreads]
        left = [row - _WIDTH / 2 + (place + 0.5) * width for row in range(len(results))]
        bars = axes.bar(left, medians, width, color=_colour(place + 1), yerr=(below, above), capsize=3, label=name)
        axes.bar_label(bars, fmt="%.2f", fontsize=7)
    axes.axhline(1.0, color="black", linewidth=1)
    axes.set_xticks(range(len(results)), [_label(result) for result in results], fontsize=7)
    axes.set_title("Speed over plain decoding, split alike")
    axes.set_ylabel("ratio, median over batches; bars: quartiles")
    axes.margins(y=0.12)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False)


def _draw_predictions(axes: Axes, report: ParallelReport) -> None:
    """Draw a dot for each arm. Predictions within the dashed lines are at most 20 % off."""
    most = 0.0
    for place, name in enumerate(report.names):
        arms = [result.arms[place] for result in report.split_results]
        measured = [arm.batches.tokens_per_second.median for arm in arms]
        predicted = [arm.predicted or 0.0 for arm in arms]
        most = max(most, *measured, *predicted)
        axes.scatter(measured, predicted, s=18, color=_colour(place), label=name)
    for factor, style in ((1.0, "-"), (0.8, "--"), (1.2, "--")):
        axes.plot((0, 1.1 * most), (0, 1.1 * factor * most), color="black", linewidth=1, linestyle=style)
    axes.set_title("Simulated; dashed: 20 % off")
    axes.set_xlabel("tokens per second, measured")
    axes.set_ylabel("tokens per second, foreseen")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def _draw_memory(axes: Axes, report: ParallelReport) -> None:
    whole = report.memory[WHOLE.split][0]
    names, shares = [], []
    for split, ranks in report.memory.items():
        for number, rank in enumerate(ranks):
            names.append(WHOLE.name if split == WHOLE.split else f"{split}, rank {number}")
            shares.append(100 * rank.peak / max(whole.peak, 1))
    bars = axes.barh(range(len(names)), shares, 0.6, color="#0072B2")
    axes.bar_label(bars, fmt="%.0f", fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_title("Held at most, % of one process")
    axes.grid(axis="x", alpha=0.3)


def _label(result: ParallelResult) -> str:
    setting = f"{result.setting.split}\n{result.setting.latency}".strip()
    return f"{setting}\n{result.size} together\ntemp {result.temperature:g}"


def _colour(place: int) -> str:
    return SERIES_COLOURS[place % len(SERIES_COLOURS)]

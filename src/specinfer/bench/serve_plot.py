"""Plot of a serving report: throughput and latencies of each arm by request rate."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from specinfer.bench.plot import SERIES_COLOURS, check_plot, draw_spreads, new_figure
from specinfer.bench.report import Spread
from specinfer.bench.serve_report import ServeArm, ServeReport

if TYPE_CHECKING:  # matplotlib is an optional extra that only drawing needs
    from collections.abc import Callable

    from matplotlib.axes import Axes

_METRICS = {"ttft": "time to first token, ms", "tpot": "time per output token, ms", "e2el": "whole request, ms"}


def plot_serve(report: ServeReport, path: str | Path) -> None:
    """Draw a report to a file.

    Raises:
        ValueError: matplotlib is missing, or the suffix is unknown.
    """
    check_plot(path)
    figure = new_figure(15, 4.2)
    throughput, *latencies = figure.subplots(1, 4)
    options = report.options
    figure.suptitle(
        f"{report.environment['served_model']}: {options['num_prompts']} requests of {options['max_tokens']} tokens, "
        f"{options['repeats']} rounds"
    )
    _draw(throughput, report, "output tokens per second", _throughput)
    for axes, (metric, label) in zip(latencies, _METRICS.items(), strict=True):
        _draw(axes, report, label, partial(_milliseconds, metric))
    throughput.legend(title="tree", frameon=False)
    figure.savefig(path, dpi=150)


def _throughput(arm: ServeArm) -> Spread:
    return Spread.of(each.output_throughput for each in arm.rounds)


def _milliseconds(metric: str, arm: ServeArm) -> Spread:
    return Spread.of(arm.values(metric) or [0.0])


def _draw(axes: Axes, report: ServeReport, label: str, spread: Callable[[ServeArm], Spread]) -> None:
    """Draw a line for each arm. Rates are at even steps, since one of them may be infinite."""
    places = range(len(report.results))
    for number, first in enumerate(report.results[0].arms):
        spreads = [spread(result.arms[number]) for result in report.results]
        draw_spreads(axes, places, spreads, SERIES_COLOURS[number % len(SERIES_COLOURS)], first.name)
    rates = ["all at once" if math.isinf(result.rate) else f"{result.rate:g}" for result in report.results]
    axes.set_xticks(places, rates)
    axes.set_xlabel("requests per second")
    axes.set_title(label)
    axes.set_ylim(bottom=0)
    axes.margins(x=0.2)
    axes.grid(alpha=0.3)

"""Plot of a simulation: speed by number of machines, and the share of communication."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from specinfer.bench.plot import SERIES_COLOURS, check_plot, count_axis, new_figure
from specinfer.bench.simulation_report import SimulationReport

if TYPE_CHECKING:  # matplotlib is an optional extra that only drawing needs
    from matplotlib.axes import Axes


def plot_simulation(report: SimulationReport, path: str | Path) -> None:
    """Draw a simulation to a file.

    Raises:
        ValueError: matplotlib is missing, or the suffix is unknown.
    """
    check_plot(path)
    figure = new_figure(13, 4.4)
    rates, latencies, shares = figure.subplots(1, 3)
    options, plan = report.options, report.plan
    figure.suptitle(
        f"{Path(str(plan.options['model'])).name}: {plan.environment.target_parameters / 1e6:,.0f} M parameters, "
        f"machines joined by {options['link_latency']} and {options['link_bandwidth']}, simulated"
    )
    for place, size in enumerate(report.batch_sizes):
        found, colour = report.of_batch(size), SERIES_COLOURS[place % len(SERIES_COLOURS)]
        machines, style = [one.machines for one in found], {"marker": "o", "markersize": 4, "color": colour}
        label = f"{size} together"
        rates.plot(machines, [one.tokens_per_second for one in found], label=label, **style)
        latencies.plot(machines, [1000 * one.seconds_per_token for one in found], label=label, **style)
        shares.plot(machines, [100 * one.communication for one in found], label=label, **style)
        for one in found:
            split = f"{one.tensor}x{one.pipeline}"
            rates.annotate(split, (one.machines, one.tokens_per_second), fontsize=7, ha="center", va="bottom")
    _finish(rates, report, "Throughput; split: tensor x pipeline", "tokens per second, all requests")
    _finish(latencies, report, "Time of a token of one request", "milliseconds")
    _finish(shares, report, "Messages under way", "% of a step")
    rates.set_yscale("log")
    latencies.set_yscale("log")
    shares.set_ylim(0, 100)
    rates.legend(frameon=False)
    figure.savefig(path, dpi=150)


def _finish(axes: Axes, report: SimulationReport, title: str, label: str) -> None:
    axes.set_title(title)
    axes.set_ylabel(label)
    count_axis(axes, sorted({one.machines for one in report.predictions}), "machines")

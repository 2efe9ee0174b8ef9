"""Plot of a plan: costs of passes, and expected speedup by batch size."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from specinfer.bench.plan_report import PlanReport
from specinfer.bench.plot import check_plot, new_figure

if TYPE_CHECKING:  # matplotlib is an optional extra that only drawing needs
    from matplotlib.axes import Axes


def plot_plan(report: PlanReport, path: str | Path) -> None:
    """Draw a plan to a file.

    Raises:
        ValueError: matplotlib is missing, or the suffix is unknown.
    """
    check_plot(path)
    figure = new_figure(11, 4.2)
    costs, gains = figure.subplots(1, 2)
    environment = report.environment
    figure.suptitle(
        f"{Path(str(report.options['model'])).name}: {environment.target_parameters / 1e6:,.0f} M parameters, "
        f"{environment.precision}, {environment.device}"
    )
    _draw_costs(costs, report)
    _draw_gains(gains, report)
    figure.savefig(path, dpi=150)


def _draw_costs(axes: Axes, report: PlanReport) -> None:
    for label, points, colour in (
        ("a target pass over so many tokens", report.target_ms, "#0072B2"),
        ("a draft level of so many nodes", report.draft_ms, "#E69F00"),
    ):
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, color=colour, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_title("Cost of the parts of a step")
    axes.set_xlabel("tokens or nodes")
    axes.set_ylabel("milliseconds")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def _draw_gains(axes: Axes, report: PlanReport) -> None:
    places = range(len(report.choices))
    axes.bar(places, [choice.speedup for choice in report.choices], 0.6, color="#0072B2")
    for place, choice in zip(places, report.choices, strict=True):
        sizes = ((choice.num_nodes, "node"), (choice.num_levels, "level"))
        tree = "\n".join(f"{n} {unit}{'s' * (n > 1)}" for n, unit in sizes) if choice.num_nodes else "off"
        axes.annotate(f"{choice.speedup:.2f}\n{tree}", (place, choice.speedup), ha="center", va="bottom", fontsize=8)
    axes.axhline(1.0, color="black", linewidth=1)
    axes.set_xticks(places, [str(choice.num_requests) for choice in report.choices])
    axes.set_ylim(0, 1.3 * max(choice.speedup for choice in report.choices))
    axes.set_title("Expected speedup, and the tree of each request")
    axes.set_xlabel("requests that run together")
    axes.grid(axis="y", alpha=0.3)

"""Plot of a comparison of schedulers: the speed of every arm on every part of the workload."""

from __future__ import annotations

from pathlib import Path

from specinfer.bench.plot import PART_COLOURS, check_plot, new_figure
from specinfer.bench.schedule_plans import AUTO, LEARNED
from specinfer.bench.schedule_report import MIX, ScheduleReport


def plot_schedule(report: ScheduleReport, path: str | Path) -> None:
    """Draw a report to a file.

    Raises:
        ValueError: matplotlib is missing, or the suffix is unknown.
    """
    check_plot(path)
    parts = (*report.part_names, MIX)
    names = [arm.name for arm in report.arms]
    figure = new_figure(13, 1.6 + 0.28 * len(names))
    environment, model = report.environment, Path(str(report.options["model"])).name
    figure.suptitle(
        f"{model}: {environment.target_parameters / 1e6:,.0f} M parameters, {environment.precision}, "
        f"{environment.device}, one request at a time"
    )
    best = report.best_fixed.name
    for axes, part in zip(figure.subplots(1, len(parts), sharey=True), parts, strict=True):
        speeds = [arm.tokens_per_second(part) for arm in report.arms]
        colours = [_colour(name, best) for name in names]
        axes.barh(range(len(names)), speeds, 0.6, color=colours)
        for row, speed in enumerate(speeds):
            axes.annotate(f" {speed:.0f}", (speed, row), va="center", fontsize=8)
        axes.set_title(f"{part}: learned {report.ratio(LEARNED, best, part):.2f} of {best}", fontsize=9)
        axes.set_xlabel("tokens per second")
        axes.set_xlim(0, 1.2 * max(speeds))
        axes.grid(axis="x", alpha=0.3)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.4, -0.6)
    figure.savefig(path, dpi=150)


def _colour(name: str, best: str) -> str:
    if name in (LEARNED, AUTO):
        return PART_COLOURS["draft" if name == LEARNED else "verify"]
    return PART_COLOURS["target" if name == best else "rest"]

"""Plot of a latency report: the speed of each arm and peer, and the parts of the time of a pass."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from specinfer.bench.report import LatencyReport, Run, Spread
from specinfer.bench.stages import Stages

if TYPE_CHECKING:  # matplotlib is an optional extra that only drawing needs
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class HasStages(Protocol):
    """An arm with steps that were timed on the device."""

    @property
    def name(self) -> str: ...
    @property
    def stages(self) -> Stages: ...


SUFFIXES = (".png", ".svg", ".pdf")
# Colours that colour-blind readers can distinguish: Okabe and Ito's palette, and a grey.
PART_COLOURS = {"draft": "#E69F00", "target": "#0072B2", "verify": "#009E73", "rest": "#999999", "host": "#999999"}
SERIES_COLOURS = ("#000000", "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")


def check_plot(path: str | Path) -> None:
    """Check that a plot can be drawn to this path.

    Raises:
        ValueError: matplotlib is missing, or the suffix is unknown.
    """
    if Path(path).suffix.lower() not in SUFFIXES:
        raise ValueError(f"plot: {path} must end in one of {', '.join(SUFFIXES)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError("plot: matplotlib is missing; pip install 'specinfer[plot]'") from error


def floors_text(arms: Sequence[HasStages], size: int = 1) -> str:
    """Return a line with the time of the target's passes over their floor, or an empty text if it is unknown."""
    ratios = {arm.name: arm.stages.over_floor("target") for arm in arms}
    known = [f"{name} {ratio:.2f}" for name, ratio in ratios.items() if ratio is not None]
    together = f", {size} together" if size > 1 else ""
    return f"\ntarget's pass over its floor{together}: {', '.join(known)}" if known else ""


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of this size in inches, without a window."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def draw_spreads(axes: Axes, sizes: Sequence[int], spreads: Sequence[Spread], colour: str, label: str) -> None:
    """Draw a line through the medians, with bars between the quartiles."""
    medians = [spread.median for spread in spreads]
    below = [spread.median - spread.lower_quartile for spread in spreads]
    above = [spread.upper_quartile - spread.median for spread in spreads]
    axes.errorbar(sizes, medians, (below, above), marker="o", markersize=4, capsize=3, color=colour, label=label)


def count_axis(axes: Axes, sizes: Sequence[int], label: str) -> None:
    """Set up the x axis for counts: a log 2 scale with a tick for each measured count."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel(label)
    axes.grid(alpha=0.3)


def plot_report(report: LatencyReport, path: str | Path) -> None:
    """Draw a report to a file.

    Raises:
        ValueError: matplotlib is missing, or the suffix is unknown.
    """
    check_plot(path)
    peers = report.peers.arms if report.peers else ()
    names = [arm.name for arm in report.arms] + [peer.name for peer in peers]
    figure = new_figure(11, 2.6 + 0.7 * len(names))
    speed, split = figure.subplots(1, 2, sharey=True)
    environment, model = report.environment, Path(str(report.options["model"])).name
    figure.suptitle(
        f"{model}: {environment.target_parameters / 1e6:,.0f} M parameters, {environment.precision}, "
        f"{environment.device}, {report.num_prompts} prompts, one request at a time{floors_text(report.arms)}"
    )
    _draw_speed(speed, report)
    _draw_split(split, report)
    speed.set_yticks(range(len(names)), names)
    speed.set_ylabel("tree, or peer" if peers else "tree")
    speed.set_ylim(len(names) - 0.5, -0.7)  # from top to bottom, with room for the first label
    figure.savefig(path, dpi=150)


def _draw_speed(axes: Axes, report: LatencyReport) -> None:
    """Draw a dot for each run and a line at the median. Peers are below our arms, in another colour."""
    for row, arm in enumerate(report.arms):
        note = f"  (speedup {report.speedup_of(arm).median:.2f})" if row else ""
        _draw_runs(axes, row, arm.runs, note, "#0072B2")
    peers = report.peers.arms if report.peers else ()
    for row, peer in enumerate(peers, len(report.arms)):
        _draw_runs(axes, row, peer.runs, "", "#D55E00")
    axes.set_title("Speed of each run; bar: median")
    axes.set_xlabel("tokens per second")
    # Leave room for a label centred on the fastest arm.
    runs = [run for arm in report.arms for run in arm.runs] + [run for peer in peers for run in peer.runs]
    axes.set_xlim(0, 1.2 * max(run.tokens_per_second for run in runs))
    axes.grid(axis="x", alpha=0.3)


def _draw_runs(axes: Axes, row: int, runs: Sequence[Run], note: str, colour: str) -> None:
    speeds = [run.tokens_per_second for run in runs]
    # Dots of one arm are spread over a band, in the order of the runs.
    band = [row - 0.18 + 0.36 * (i + 0.5) / len(speeds) for i in range(len(speeds))]
    axes.scatter(speeds, band, s=16, alpha=0.5, color=colour, edgecolors="none")
    median = statistics.median(speeds)
    axes.vlines(median, row - 0.28, row + 0.28, color="black", linewidth=2)
    axes.annotate(f"{median:.1f}{note}", (median, row - 0.3), ha="center", va="bottom")


def _draw_split(axes: Axes, report: LatencyReport) -> None:
    """Draw the stacked parts of a mean pass, and its number of tokens."""
    splits = [arm.split for arm in report.arms]
    left = [0.0] * len(splits)
    for part in ("draft", "target", "rest"):
        widths = [getattr(split, part) for split in splits]
        axes.barh(range(len(splits)), widths, 0.45, left=left, color=PART_COLOURS[part], label=part)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for row, arm in enumerate(report.arms):
        axes.annotate(f"  {arm.tokens_per_pass:.2f} tokens", (left[row], row), va="center")
    axes.set_title("Mean time of one pass, and tokens it gave")
    axes.set_xlabel("milliseconds")
    axes.set_xlim(0, 1.3 * max(left))
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="upper right", bbox_to_anchor=(1, -0.12), ncols=3, frameon=False)

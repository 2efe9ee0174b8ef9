"""Plot of an offload report: speedup over plain decoding, disk bandwidth used, and peak memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from specinfer.bench.offload_peers import OffloadPeer
from specinfer.bench.offload_report import OffloadReport, OffloadResult
from specinfer.bench.plot import SERIES_COLOURS, check_plot, new_figure

if TYPE_CHECKING:  # matplotlib is an optional extra, which only plotting needs
    from matplotlib.axes import Axes

_PEER_COLOUR = "#D55E00"
_NOTE_BOX = {"boxstyle": "square,pad=0.1", "facecolor": "white", "alpha": 0.8, "linewidth": 0}
_LABEL_HEIGHT = 0.055  # fraction of the axes: labels closer than this would overlap
_WIDTH = 0.8  # total width of the bars of one situation


def plot_offload(report: OffloadReport, path: str | Path) -> None:
    """Draw a report into a file.

    Raises:
        ValueError: matplotlib is missing, or the suffix is unknown.
    """
    check_plot(path)
    figure = new_figure(14, 4.4)
    ratios, disk, memory = figure.subplots(1, 3)
    environment, model = report.environment, Path(str(report.options["model"])).name
    figure.suptitle(
        f"{model}: {environment.target_parameters / 1e6:,.0f} M parameters, {environment.precision}, "
        f"{environment.device}, streamed within {report.memory_budget / 2**30:.2f} GiB"
    )
    _draw_ratios(ratios, report)
    _draw_disk(disk, report)
    _draw_memory(memory, report)
    for axes in (ratios, disk, memory):
        axes.set_xticks(range(len(report.results)), [_label(result) for result in report.results])
        axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=150)


def _draw_ratios(axes: Axes, report: OffloadReport) -> None:
    """Draw medians with quartiles, and peers at the situation of one request at a time."""
    for place in range(1, len(report.names)):
        spreads = [result.batches.speedup_of(result.arms[place].batches) for result in report.results]
        medians = [spread.median for spread in spreads]
        below = [spread.median - spread.lower_quartile for spread in spreads]
        above = [spread.upper_quartile - spread.median for spread in spreads]
        bars = axes.bar(_places(report, place - 1, 1), medians, _width(report, 1), color=_colour(place),
                        yerr=(below, above), capsize=3)  # fmt: skip
        axes.bar_label(bars, fmt="%.2f", fontsize=8)
    found = sorted((_peer_place(report, peer), peer.name) for peer in report.peers)
    for (row, ratio), _ in found:
        axes.hlines(ratio, row - _WIDTH / 2, row + _WIDTH / 2, color=_PEER_COLOUR, linestyle="--", zorder=3)
    axes.axhline(1.0, color="black", linewidth=1)
    axes.margins(y=0.12)
    axes.set_ylim(bottom=0)
    apart, free = _LABEL_HEIGHT * axes.get_ylim()[1], dict.fromkeys((row for (row, _), _ in found), 0.0)
    for (row, ratio), name in found:
        height = max(ratio, free[row])
        free[row] = height + apart
        axes.annotate(name, (row - _WIDTH / 2, height), va="bottom", fontsize=7, zorder=4, bbox=_NOTE_BOX)
    axes.set_title("Speed over plain decoding; dashed: peers")
    axes.set_ylabel("ratio, median over batches; bars: quartiles")


def _peer_place(report: OffloadReport, peer: OffloadPeer) -> tuple[int, float]:
    """Return the place of the situation of one request, and the peer's speedup over our plain decoding there."""
    result = report.alone(peer.temperature)
    return report.results.index(result), 1 / peer.ratio(result.plain.batches).median


def _draw_disk(axes: Axes, report: OffloadReport) -> None:
    for place, name in enumerate(report.names):
        rates = [result.arms[place].bandwidth.median / 1e9 for result in report.results]
        bars = axes.bar(_places(report, place), rates, _width(report), color=_colour(place), label=name)
        axes.bar_label(bars, [f"{result.arms[place].disk_share.median:.0%}" for result in report.results], fontsize=8)
    axes.axhline(report.disk_rate / 1e9, color="black", linestyle="--", linewidth=1)
    most = [arm.bandwidth.median for result in report.results for arm in result.arms]
    axes.set_ylim(0, 1.2 * max(report.disk_rate, *most) / 1e9)
    axes.set_title(f"Streamed while decoding; dashed: the {report.source}'s best")
    axes.set_ylabel(f"GB per second, and share of the {report.source}'s")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=4, frameon=False)


def _draw_memory(axes: Axes, report: OffloadReport) -> None:
    for place, name in enumerate(report.names):
        held = [result.arms[place].peak_resident / 2**20 for result in report.results]
        axes.bar(_places(report, place), held, _width(report), color=_colour(place), label=name)
    axes.axhline(report.memory_budget / 2**20, color="black", linestyle="--", linewidth=1)
    axes.set_title("Held at most; dashed: the budget")
    axes.set_ylabel("MiB")


def _label(result: OffloadResult) -> str:
    return f"{result.size} together\ntemp {result.temperature:g}"


def _colour(place: int) -> str:
    return SERIES_COLOURS[place % len(SERIES_COLOURS)]


def _width(report: OffloadReport, fewer: int = 0) -> float:
    return _WIDTH / (len(report.names) - fewer)


def _places(report: OffloadReport, place: int, fewer: int = 0) -> list[float]:
    """Return the positions of one arm's bars, side by side with those of the others."""
    width = _width(report, fewer)
    return [row - _WIDTH / 2 + (place + 0.5) * width for row in range(len(report.results))]

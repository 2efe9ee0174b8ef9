"""Plot of a throughput report: speed by batch size, ratio to plain decoding, and the parts of the time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from specinfer.bench.plot import (
    PART_COLOURS,
    SERIES_COLOURS,
    check_plot,
    count_axis,
    draw_spreads,
    floors_text,
    new_figure,
)
from specinfer.bench.throughput_report import PARTS, ThroughputReport

if TYPE_CHECKING:  # matplotlib is an optional extra that only drawing needs
    from matplotlib.axes import Axes


def plot_throughput(report: ThroughputReport, path: str | Path) -> None:
    """Draw a report to a file.

    Raises:
        ValueError: matplotlib is missing, or the suffix is unknown.
    """
    check_plot(path)
    figure = new_figure(14, 4.4)
    speeds, ratios, shares = figure.subplots(1, 3)
    environment, model = report.environment, Path(str(report.options["model"])).name
    figure.suptitle(
        f"{model}: {environment.target_parameters / 1e6:,.0f} M parameters, {environment.dtype}, "
        f"{environment.device}, {report.options['max_tokens']} tokens for each request"
        f"{floors_text(report.results[0].arms, report.results[0].size)}"
    )
    _draw_speeds(speeds, report)
    _draw_ratios(ratios, report)
    _draw_shares(shares, report)
    figure.savefig(path, dpi=150)


def _draw_speeds(axes: Axes, report: ThroughputReport) -> None:
    sizes = [result.size for result in report.results]
    for place, name in enumerate(report.names):
        spreads = [result.arms[place].tokens_per_second for result in report.results]
        draw_spreads(axes, sizes, spreads, SERIES_COLOURS[place % len(SERIES_COLOURS)], name)
    axes.set_ylim(bottom=0)
    axes.set_title("Decoding; bars: quartiles")
    axes.set_ylabel("tokens per second, all requests")
    count_axis(axes, sizes, "requests that run together")
    axes.legend(title="tree", frameon=False)


def _draw_ratios(axes: Axes, report: ThroughputReport) -> None:
    sizes = [result.size for result in report.results]
    for place, name in enumerate(report.names[1:], start=1):
        spreads = [result.speedup_of(result.arms[place]) for result in report.results]
        draw_spreads(axes, sizes, spreads, SERIES_COLOURS[place % len(SERIES_COLOURS)], name)
        if place == 1:  # labels of several trees would overlap
            for size, spread, result in zip(sizes, spreads, report.results, strict=True):
                label = f"{spread.median:.2f}\n{result.arms[1].nodes:.1f} nodes"
                axes.annotate(label, (size, spread.median), (3, -26), textcoords="offset points", fontsize=8)
    axes.axhline(1.0, color="black", linewidth=1)
    axes.set_ylim(0, 1.25 * max(result.speedup_of(arm).upper_quartile for result in report.results
                                for arm in result.trees))  # fmt: skip
    axes.set_title("Ratio to plain decoding, and nodes of a request")
    axes.set_ylabel("ratio, median over batches")
    count_axis(axes, sizes, "requests that run together")
    axes.margins(x=0.12)  # room for the last label


def _draw_shares(axes: Axes, report: ThroughputReport) -> None:
    """Draw the stacked parts of the time, with plain decoding and the first tree side by side."""
    for side, name in enumerate(report.names[:2]):
        places = [row + 0.4 * side - 0.2 for row in range(len(report.results))]
        bottom = [0.0] * len(places)
        for part in PARTS:
            heights = [100 * result.arms[side].shares[part] for result in report.results]
            label = part if side else None
            axes.bar(places, heights, 0.36, bottom=bottom, color=PART_COLOURS[part], label=label)
            bottom = [start + height for start, height in zip(bottom, heights, strict=True)]
        for place in places:
            axes.annotate(name, (place, 101), ha="center", va="bottom", fontsize=7, rotation=90)
    axes.set_xticks(range(len(report.results)), [str(result.size) for result in report.results])
    axes.set_ylim(0, 116)
    axes.set_yticks(range(0, 101, 20))
    axes.set_title("Where the time of decoding went")
    axes.set_xlabel("requests that run together")
    axes.set_ylabel("percent")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=4, frameon=False)

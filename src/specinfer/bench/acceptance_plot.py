"""Plot of an acceptance report, with one panel for each table."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specinfer.bench.acceptance_report import TOP, AcceptanceReport, Estimate, HitRates, Row, ShiftArm
from specinfer.bench.plot import check_plot, new_figure

if TYPE_CHECKING:  # matplotlib is an optional extra, which only plotting needs
    from matplotlib.axes import Axes

# The palette of Okabe and Ito, which colour-blind readers can tell apart.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")
_MARKS = "osD^vPX"


def plot_acceptance(report: AcceptanceReport, path: str | Path) -> None:
    """Draw a report into a file.

    Raises:
        ValueError: matplotlib is missing, or the suffix is unknown.
    """
    check_plot(path)
    panels: list[tuple[str, Sequence[Row]]] = []
    for part, all_rows in report.parts.items():
        for group in dict.fromkeys(row.group for row in all_rows):
            panels.append((f"{part}: {group}", [row for row in all_rows if row.group == group]))
    num_panels = len(panels) + bool(report.hit_rates) + bool(report.shift)
    num_columns = min(2, num_panels)
    num_rows = math.ceil(num_panels / num_columns)
    heights = [1.2 + 0.32 * max((len(rows) for _, rows in panels), default=0)] * num_rows
    figure = new_figure(6.4 * num_columns, sum(max(height, 3.0) for height in heights))
    environment = report.environment
    figure.suptitle(
        f"{report.options['model']}: {environment.target_parameters / 1e6:.0f} M parameters, {environment.precision}, "
        f"{report.options['num_prompts']} prompts of {report.options['max_tokens']} tokens; bars: standard error"
    )
    axes = iter(figure.subplots(num_rows, num_columns, squeeze=False).flat)
    if report.hit_rates:
        _draw_hit_rates(next(axes), report.hit_rates)
    for title, rows in panels:
        _draw_rows(next(axes), title, rows)
    if report.shift:
        _draw_shift(next(axes), report.shift)
    for unused in axes:
        unused.set_axis_off()
    figure.savefig(path, dpi=150)


def _draw_hit_rates(axes: Axes, hit_rates: Sequence[HitRates]) -> None:
    ks = range(1, TOP + 1)
    drafters = list(dict.fromkeys(rates.drafter for rates in hit_rates))
    for rates in hit_rates:
        i = drafters.index(rates.drafter)
        shares = [rates.within(k) for k in ks]
        axes.errorbar(
            ks, [100 * share.value for share in shares], [100 * (share.error or 0.0) for share in shares],
            color=_COLOURS[i % len(_COLOURS)], marker="o", linestyle="--" if rates.temperature else "-", capsize=2,
            label=f"{rates.drafter}, {'sampled' if rates.temperature else 'greedy'}",
        )  # fmt: skip
    axes.set_title("table1: the target's next token among a drafter's best k", fontsize=9)
    axes.set_xlabel("k")
    axes.set_xticks(list(ks))
    axes.set_ylabel("%")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="lower right")


def _draw_shift(axes: Axes, arms: Sequence[ShiftArm]) -> None:
    for i, arm in enumerate(arms):
        axes.plot(
            [block.start for block in arm.blocks], [block.tokens_per_pass for block in arm.blocks],
            color=_COLOURS[i % len(_COLOURS)], marker=_MARKS[i % len(_MARKS)], markersize=4, label=arm.label,
        )  # fmt: skip
    axes.axvline(0, color="grey", linestyle=":")
    axes.set_title("shift: held-out code, then another domain", fontsize=9)
    axes.set_xlabel("tokens from the shift")
    axes.set_ylabel("tokens per pass")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)


def _draw_rows(axes: Axes, title: str, rows: Sequence[Row]) -> None:
    """Draw a line of marks for each row of the table, with one colour for each column."""
    columns = list(dict.fromkeys(column for row in rows for column in row.cells))
    for i, column in enumerate(columns):
        shown: list[tuple[float, Estimate]] = []
        for place, row in enumerate(rows):
            if column in row.cells:
                shown.append((place + 0.5 * ((i + 0.5) / len(columns) - 0.5), row.cells[column].tokens_per_pass))
        axes.errorbar(
            [estimate.value for _, estimate in shown], [place for place, _ in shown],
            xerr=[estimate.error or 0.0 for _, estimate in shown],
            color=_COLOURS[i % len(_COLOURS)], marker=_MARKS[i % len(_MARKS)], linestyle="none", capsize=2,
            markersize=5, label=column,
        )  # fmt: skip
    axes.set_yticks(range(len(rows)), [row.label for row in rows], fontsize=7)
    axes.set_ylim(len(rows) - 0.5, -0.5)  # the first row at the top, as in the table
    axes.set_xlim(left=0)
    axes.set_xlabel("tokens per pass")
    axes.set_title(textwrap.fill(title, 64), fontsize=9)
    axes.grid(axis="x", alpha=0.3)
    if len(columns) > 1:
        axes.legend(fontsize=7, loc="center left")  # free space, since a pass yields at least one token

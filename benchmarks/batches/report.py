"""The table of simulated batches: for each machine, batch size and temperature, over all lengths."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from rich.console import Console

from benchmarks.batches.run import BatchesReport, Result
from specinfer.reporting.tables import Column, print_rows

LEAST = 0.98  # of the speed of plain decoding


class _Row(NamedTuple):
    machine: str
    batch: int
    temperature: int
    results: Sequence[Result]

    @property
    def worst(self) -> Result:
        return min(self.results, key=lambda one: one.speed)

    @property
    def decoding(self) -> float:
        return float(np.nanmedian([one.decoding for one in self.results]))

    @property
    def best(self) -> float:
        return float(np.nanmedian([np.nan if one.best is None else one.best for one in self.results]))

    @property
    def in_all(self) -> tuple[float, float]:
        """Return the speed of "auto" with prompts where the best was tried, and that of the best: medians."""
        tried = [(one.speed, one.best_speed) for one in self.results if one.best_speed is not None]
        auto, best = np.median(tried, axis=0).tolist()
        return auto, best


def print_batches(report: BatchesReport, console: Console) -> None:
    """Print the speeds over plain decoding."""
    groups: dict[tuple[str, int, int], list[Result]] = {}
    for one in report.results:
        groups.setdefault((one.cell.machine.name, one.cell.batch, one.cell.temperature), []).append(one)
    rows = [_Row(*key, results) for key, results in groups.items()]
    columns = [
        Column[_Row]("machine", lambda row: row.machine, label=True, once=True),
        Column[_Row]("batch", lambda row: str(row.batch), once=True),
        Column[_Row]("temp.", lambda row: str(row.temperature)),
        Column[_Row]("least", lambda row: f"{row.worst.speed:.2f}"),
        Column[_Row]("at", lambda row: f"{row.worst.cell.prompt}+{row.worst.cell.output}"),
        Column[_Row]("decoding", lambda row: f"{row.decoding:.2f}"),
    ]
    if any(one.best is not None for one in report.results):
        columns.append(Column[_Row]("best", lambda row: f"{row.best:.2f}"))
        columns.append(Column[_Row]("in all", lambda row: f"{row.in_all[0]:.2f}"))
        columns.append(Column[_Row]("best", lambda row: f"{row.in_all[1]:.2f}"))
    print_rows(console, "auto over plain decoding, simulated", columns, rows)
    low = sum(one.speed < LEAST for one in report.results)
    console.print(
        "least: the lowest speed of all lengths, with prompts, at a prompt + output; decoding: median of steps of the "
        "full batch;\nin all: median speed with prompts; best: the same with the least probability of a draft token "
        "that is best for it; "
        f"below {LEAST}: {low} of {len(report.results)} cells"
    )

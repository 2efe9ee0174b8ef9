"""An acceptance report on a terminal, in tables that fit 80 columns, and as a plot with a panel for each table."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from specinfer.bench.acceptance_report import (
    COMPARED,
    SAME_TIME,
    TOP,
    AcceptanceReport,
    Counts,
    Estimate,
    HitRates,
    Row,
    ratios,
)
from specinfer.core.tree_shape import BEST_FIRST
from specinfer.reporting.plots import MARKERS, SERIES_COLOURS, Panel, Series, draw_plot
from specinfer.reporting.tables import Column, millions, print_rows

_TITLES = {
    "table2": "Table 2: tokens per pass, by width of the third level",
    "table3": "Table 3: naive and multi-step sampling, trees of one shape",
    "rules": "Rules and trees of the same number of nodes: tokens per pass",
    "drafters": "One drafter and several, the same number of nodes: tokens per pass",
    SAME_TIME: "One drafter and several, the same time for a step: tokens per pass, nodes:depth",
}


def print_acceptance(report: AcceptanceReport, console: Console) -> None:
    """Print the models and drafters, then one table for each part and group."""
    environment, options = report.environment, report.options
    console.print(
        f"[bold]{options['model']}[/bold]: target of {millions(environment.target_parameters)}, "
        f"{environment.precision}; {options['num_prompts']} prompts, {options['max_tokens']} tokens each; "
        "± is a standard error over prompts"
    )
    for name, meaning in report.drafters.items():
        console.print(f"drafter [bold]{name}[/bold]: {meaning}", highlight=False)
    if report.hit_rates:
        _print_hit_rates(report.hit_rates, console)
    for part, group, rows in _groups(report):
        shown = _with_shape if part == SAME_TIME else _tokens_per_pass
        _print_rows(f"{_TITLES[part]}\n{group}", rows, console, shown)
        if part in COMPARED:
            _print_ratios(part, rows, console)
        if part == "drafters":
            title = "The same runs, all prompts at once: tokens per second"
            _print_rows(title, rows, console, lambda counts: f"{counts.tokens_per_second:.1f}")
    if report.kinds:
        _print_kinds(report, console)


def _groups(report: AcceptanceReport) -> list[tuple[str, str, list[Row]]]:
    """Return (part, group, rows) of each table."""
    return [
        (part, group, [row for row in rows if row.group == group])
        for part, rows in report.parts.items()
        for group in dict.fromkeys(row.group for row in rows)
    ]


def _columns(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(column for row in rows for column in row.cells))


def _print_hit_rates(hit_rates: Sequence[HitRates], console: Console) -> None:
    def within(k: int) -> Column[HitRates]:
        return Column(f"k={k}", lambda rates: _shown(rates.within(k), 100, 1))

    labels = (
        Column[HitRates]("drafter", lambda rates: rates.drafter, label=True),
        Column[HitRates]("text", lambda rates: "sampled" if rates.temperature else "greedy", label=True),
    )
    title = "Table 1: the target's next token is among the drafter's best k, %"
    print_rows(console, title, (*labels, *map(within, range(1, TOP + 1))), hit_rates)


def _print_rows(title: str, rows: Sequence[Row], console: Console, cell: Callable[[Counts], str]) -> None:
    def shown(column: str) -> Column[Row]:
        return Column(column, lambda row: cell(row.cells[column]) if column in row.cells else "")

    print_rows(console, title, (Column[Row]("", lambda row: row.label, label=True), *map(shown, _columns(rows))), rows)


def _print_ratios(part: str, rows: Sequence[Row], console: Console) -> None:
    compared = {(id(row), column): arm.over(base) for row, column, arm, base in ratios(part, rows)}
    if not compared:
        return

    def shown(column: str) -> Column[Row]:
        return Column(column, lambda row: _shown(compared[key]) if (key := (id(row), column)) in compared else "1")

    columns = [column for column in _columns(rows) if any(column == other for _, other in compared)]
    base = "the best single drafter" if part in ("drafters", SAME_TIME) else rows[0].label
    title = f"... as a multiple of {base}, on the same prompts"
    shown_rows = [row for row in rows if any(number == id(row) for number, _ in compared)]
    print_rows(console, title, (Column[Row]("", lambda row: row.label, label=True), *map(shown, columns)), shown_rows)


def _print_kinds(report: AcceptanceReport, console: Console) -> None:
    """Print a table of the drafters part for each temperature."""
    rows = report.parts.get("drafters", ())
    for column in _columns(rows):

        def of_kind(kind: str, column: str = column) -> Column[Row]:
            def cell(row: Row) -> str:
                rate = report.by_kind(row.cells[column])[kind]
                return "" if rate is None else f"{rate:.2f}"

            return Column(kind, cell)

        label = Column[Row]("", lambda row: row.label, label=True)
        title = f"By kind of prompt: tokens per pass, {column}"
        print_rows(console, title, (label, *map(of_kind, dict.fromkeys(report.kinds))), rows)


def _tokens_per_pass(counts: Counts) -> str:
    return _shown(counts.tokens_per_pass)


def _with_shape(counts: Counts) -> str:
    return f"{_shown(counts.tokens_per_pass)} {counts.setup.tree.removeprefix(f'{BEST_FIRST}:')}"


def _shown(estimate: Estimate, factor: float = 1.0, digits: int = 2) -> str:
    value = f"{factor * estimate.value:.{digits}f}"
    return value if estimate.error is None else f"{value}±{factor * estimate.error:.{digits}f}"


def plot_acceptance(report: AcceptanceReport, path: str | Path) -> None:
    """Draw a panel for each table; bars are standard errors.

    Raises:
        ValueError: matplotlib is missing, or the suffix is unknown.
    """
    panels = [_rows_panel(f"{part}: {group}", rows) for part, group, rows in _groups(report)]
    if report.hit_rates:
        panels.insert(0, _hit_rates_panel(report.hit_rates))
    num_columns = min(2, len(panels))
    most = max((len(rows) for _, _, rows in _groups(report)), default=0)
    title = (
        f"{report.options['model']}: {report.environment.description}, {report.options['num_prompts']} prompts of "
        f"{report.options['max_tokens']} tokens; bars: standard error"
    )
    height = math.ceil(len(panels) / num_columns) * max(1.2 + 0.32 * most, 3.0)
    draw_plot(path, title, panels, width=6.4 * num_columns, height=height, num_columns=num_columns)


def _hit_rates_panel(hit_rates: Sequence[HitRates]) -> Panel:
    drafters = list(dict.fromkeys(rates.drafter for rates in hit_rates))
    series = []
    for rates in hit_rates:
        shares = [rates.within(k) for k in range(1, TOP + 1)]
        series.append(
            Series(
                f"{rates.drafter}, {'sampled' if rates.temperature else 'greedy'}",
                [100 * share.value for share in shares],
                x=range(1, TOP + 1),
                errors=[100 * (share.error or 0.0) for share in shares],
                colour=SERIES_COLOURS[drafters.index(rates.drafter) % len(SERIES_COLOURS)],
                line="--" if rates.temperature else "-",
            )
        )
    title = "table1: the target's next token among a drafter's best k"
    return Panel(title, series, label="%", place_label="k", from_zero=False, legend="inside")


def _rows_panel(title: str, rows: Sequence[Row]) -> Panel:
    """Return a panel with a line of marks for each row of the table, and one colour for each column."""
    columns = _columns(rows)
    series = []
    for i, column in enumerate(columns):
        shown = [(place, row.cells[column].tokens_per_pass) for place, row in enumerate(rows) if column in row.cells]
        series.append(
            Series(
                column,
                [estimate.value for _, estimate in shown],
                x=[place + 0.5 * ((i + 0.5) / len(columns) - 0.5) for place, _ in shown],
                errors=[estimate.error or 0.0 for _, estimate in shown],
                line="none",
                marker=MARKERS[i % len(MARKERS)],
            )
        )
    legend = "inside" if len(columns) > 1 else ""
    names = [row.label for row in rows]
    return Panel(title, series, horizontal=True, names=names, label="tokens per pass", legend=legend)  # type: ignore[arg-type]

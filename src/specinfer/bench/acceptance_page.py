"""The page of an acceptance measurement: tables that fit 80 columns, and a plot with a panel for each table."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from specinfer.bench.acceptance_report import COMPARED, SAME_TIME, TOP, Counted, Counts, Estimate, HitRates, Row, ratios
from specinfer.core.tree_shape import BEST_FIRST
from specinfer.reporting.plots import MARKERS, SERIES_COLOURS, Panel, Series, draw_plot
from specinfer.reporting.report import Report, Table, Value
from specinfer.reporting.tables import millions

_TITLES = {
    "table2": "Table 2: tokens per pass, by width of the third level",
    "table3": "Table 3: naive and multi-step sampling, trees of one shape",
    "rules": "Rules and trees: tokens per pass",
    "drafters": "One drafter and several, the same number of nodes: tokens per pass",
    SAME_TIME: "One drafter and several, the same time for a step: tokens per pass, nodes:depth",
}


def acceptance_page(measured: Counted) -> Report[Counted]:
    """Return the report: the models and drafters, then a table for each part and group."""
    environment, config = measured.environment, measured.config
    lines = [
        f"[bold]{config.model}[/bold]: target of {millions(environment.target_parameters)}, "
        f"{environment.precision}; {config.num_prompts} prompts, {config.max_tokens} tokens each; "
        "± is a standard error over prompts",
        *(f"drafter [bold]{name}[/bold]: {meaning}" for name, meaning in measured.drafters.items()),
    ]
    tables: list[Table[HitRates] | Table[Row]] = [_hit_rates_table(measured.hit_rates)]
    for part, group, rows in measured.groups:
        shown = _with_shape if part == SAME_TIME else _tokens_per_pass
        tables.append(_table(f"{_TITLES[part]}\n{group}", rows, shown))
        if part in COMPARED:
            tables.append(_ratios_table(part, rows))
        if part == "drafters":
            title = "The same runs, all prompts at once: tokens per second"
            tables.append(_table(title, rows, lambda counts: f"{counts.tokens_per_second:.1f}"))
    if measured.kinds:
        tables += _kinds_tables(measured)
    plot = partial(plot_acceptance, measured)
    return Report(lines, tables, measured, environment, measured.as_dict(), plot=plot)


_LABEL = Value[Row]("", lambda row: row.label)


def _columns(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(column for row in rows for column in row.cells))


def _table(title: str, rows: Sequence[Row], cell: Callable[[Counts], str]) -> Table[Row]:
    def shown(column: str) -> Value[Row]:
        return Value(column, lambda row: cell(row.cells[column]) if column in row.cells else None)

    return Table("", title, (_LABEL, *map(shown, _columns(rows))), rows)


def _hit_rates_table(hit_rates: Sequence[HitRates]) -> Table[HitRates]:
    def within(k: int) -> Value[HitRates]:
        return Value(f"k={k}", lambda rates: _shown(rates.within(k), 100, 1))

    drafter = Value[HitRates]("drafter", lambda rates: rates.drafter)
    text = Value[HitRates]("text", lambda rates: "sampled" if rates.temperature else "greedy", label=True)
    title = "Table 1: the target's next token is among the drafter's best k, %"
    return Table("", title, (drafter, text, *map(within, range(1, TOP + 1))), hit_rates)


def _ratios_table(part: str, rows: Sequence[Row]) -> Table[Row]:
    compared = {(id(row), column): arm.over(base) for row, column, arm, base in ratios(part, rows)}

    def shown(column: str) -> Value[Row]:
        return Value(column, lambda row: _shown(compared[key]) if (key := (id(row), column)) in compared else "1")

    columns = [column for column in _columns(rows) if any(column == other for _, other in compared)]
    base = "the best single drafter" if part in ("drafters", SAME_TIME) else rows[0].label
    title = f"... as a multiple of {base}, on the same prompts"
    shown_rows = [row for row in rows if any(number == id(row) for number, _ in compared)]
    return Table("", title, (_LABEL, *map(shown, columns)), shown_rows)


def _kinds_tables(measured: Counted) -> list[Table[Row]]:
    """Return a table of the drafters part for each temperature."""
    rows = measured.parts.get("drafters", ())

    def of_kind(kind: str, column: str) -> Value[Row]:
        return Value(kind, lambda row: measured.by_kind(row.cells[column])[kind], "{:.2f}")

    return [
        Table(
            "",
            f"By kind of prompt: tokens per pass, {column}",
            (_LABEL, *(of_kind(kind, column) for kind in dict.fromkeys(measured.kinds))),
            rows,
        )
        for column in _columns(rows)
    ]


def _tokens_per_pass(counts: Counts) -> str:
    return _shown(counts.tokens_per_pass)


def _with_shape(counts: Counts) -> str:
    return f"{_shown(counts.tokens_per_pass)} {counts.setup.tree.removeprefix(f'{BEST_FIRST}:')}"


def _shown(estimate: Estimate, factor: float = 1.0, digits: int = 2) -> str:
    value = f"{factor * estimate.value:.{digits}f}"
    return value if estimate.error is None else f"{value}±{factor * estimate.error:.{digits}f}"


def plot_acceptance(measured: Counted, path: str | Path) -> None:
    """Draw a panel for each table; bars are standard errors.

    Raises:
        ValueError: matplotlib is missing, or the suffix is unknown.
    """
    config = measured.config
    panels = [_rows_panel(f"{part}: {group}", rows) for part, group, rows in measured.groups]
    if measured.hit_rates:
        panels.insert(0, _hit_rates_panel(measured.hit_rates))
    num_columns = min(2, len(panels))
    most = max((len(rows) for _, _, rows in measured.groups), default=0)
    title = (
        f"{config.model}: {measured.environment.description}, {config.num_prompts} prompts of {config.max_tokens} "
        "tokens; bars: standard error"
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

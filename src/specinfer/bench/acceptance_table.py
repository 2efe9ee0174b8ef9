"""Terminal tables of an acceptance report; each fits 80 columns."""

from collections.abc import Sequence

from rich.console import Console

from specinfer.bench.acceptance_report import (
    COMPARED,
    TOP,
    AcceptanceReport,
    Estimate,
    HitRates,
    Row,
    ShiftArm,
    ratios,
)
from specinfer.bench.table import millions, new_table, print_table

_TITLES = {
    "table2": "Table 2: tokens per pass, by width of the third level",
    "table3": "Table 3: naive and multi-step sampling, trees of one shape",
    "rules": "Rules and trees of the same number of nodes: tokens per pass",
    "drafters": "One drafter and several, the same number of nodes: tokens per pass",
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
    for part, rows in report.parts.items():
        for group in dict.fromkeys(row.group for row in rows):
            members = [row for row in rows if row.group == group]
            _print_rows(f"{_TITLES[part]}\n{group}", members, console)
            if part in COMPARED:
                _print_ratios(part, members, console)
    if report.kinds:
        _print_kinds(report, console)
    if report.shift:
        _print_shift(report.shift, console)


def _print_hit_rates(hit_rates: Sequence[HitRates], console: Console) -> None:
    table = new_table("drafter", "text", *(f"k={k}" for k in range(1, TOP + 1)), num_labels=2)
    for rates in hit_rates:
        mode = "sampled" if rates.temperature else "greedy"
        shares = (rates.within(k) for k in range(1, TOP + 1))
        table.add_row(rates.drafter, mode, *(_shown(share, 100, 1) for share in shares))
    print_table(console, "Table 1: the target's next token is among the drafter's best k, %", table)


def _print_rows(title: str, rows: Sequence[Row], console: Console) -> None:
    columns = list(dict.fromkeys(column for row in rows for column in row.cells))
    table = new_table("", *columns)
    for row in rows:
        cells = (row.cells.get(column) for column in columns)
        table.add_row(row.label, *("" if cell is None else _shown(cell.tokens_per_pass) for cell in cells))
    print_table(console, title, table)


def _print_ratios(part: str, rows: Sequence[Row], console: Console) -> None:
    compared = ratios(part, rows)
    if not compared:
        return
    columns = list(dict.fromkeys(column for _, column, _, _ in compared))
    table = new_table("", *columns)
    for row in rows:
        cells = {column: arm.over(base) for other, column, arm, base in compared if other is row}
        if cells:
            table.add_row(row.label, *(_shown(cells[column]) if column in cells else "1" for column in columns))
    base = "the best single drafter" if part == "drafters" else rows[0].label
    print_table(console, f"... as a multiple of {base}, on the same prompts", table)


def _print_kinds(report: AcceptanceReport, console: Console) -> None:
    """Print a table of the drafters part for each temperature."""
    rows = report.parts.get("drafters", ())
    for column in dict.fromkeys(column for row in rows for column in row.cells):
        table = new_table("", *dict.fromkeys(report.kinds))
        for row in rows:
            rates = report.by_kind(row.cells[column]).values()
            table.add_row(row.label, *("" if rate is None else f"{rate:.2f}" for rate in rates))
        print_table(console, f"By kind of prompt: tokens per pass, {column}", table)


def _print_shift(arms: Sequence[ShiftArm], console: Console) -> None:
    """Print a row for each block, since there may be many of them."""
    table = new_table("tokens from the shift", *(arm.label for arm in arms))
    rates = [{block.start: block.tokens_per_pass for block in arm.blocks} for arm in arms]
    for start in sorted({start for known in rates for start in known}):
        cells = (f"{known[start]:.2f}" if start in known else "" for known in rates)
        table.add_row(f"{start:+d}", *cells)
    print_table(console, "Held-out code, then another domain: tokens per pass, in blocks of 100 tokens", table)


def _shown(estimate: Estimate, factor: float = 1.0, digits: int = 2) -> str:
    value = f"{factor * estimate.value:.{digits}f}"
    return value if estimate.error is None else f"{value}±{factor * estimate.error:.{digits}f}"

"""Tables on a terminal. A table is data: its columns are functions of a row.

print_rows(console, "Speeds", (Column("tree", lambda arm: arm.name, label=True), ...), arms)
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table

from specinfer.reporting.environment import Environment

_UNBOUNDED = 1000  # columns
T = TypeVar("T")


@dataclass(frozen=True)
class Column(Generic[T]):
    """One column of a table.

    Attributes:
        cell: Text of a row's cell.
        label: Whether the column is a label, which is aligned to the left.
        once: Whether the cell is left blank where it, and all such cells to its left, repeat the row above. A new value
            begins a section.
    """

    heading: str
    cell: Callable[[T], str]
    label: bool = False
    once: bool = False


def make_table(columns: Sequence[Column[T]], rows: Iterable[T]) -> Table:
    """Return a table with a line between the sections that its `once` columns form."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column.heading, justify="left" if column.label else "right", overflow="fold")
    above: list[str] | None = None
    for row in rows:
        cells = [column.cell(row) for column in columns]
        shown, repeats = list(cells), above is not None
        for place, column in enumerate(columns):
            if column.once:
                repeats = repeats and above is not None and cells[place] == above[place]
                shown[place] = "" if repeats else cells[place]
        if above is not None and not repeats and any(column.once for column in columns):
            table.add_section()
        table.add_row(*shown)
        above = cells
    return table


def new_table(*headings: str, num_labels: int = 1) -> Table:
    """Return an empty table. Its first `num_labels` columns are labels, the others numbers."""
    return make_table([Column(heading, str, label=i < num_labels) for i, heading in enumerate(headings)], ())


def print_rows(console: Console, title: str, columns: Sequence[Column[T]], rows: Iterable[T]) -> None:
    """Print a title and a table."""
    print_table(console, title, make_table(columns, rows))


def print_table(console: Console, title: str, table: Table) -> None:
    """Print a title and a table. Narrow terminals fold cells, and output to a file is not limited in width."""
    console.print(f"\n[bold]{title}[/bold]")
    console.print(table, width=None if console.is_terminal else _UNBOUNDED, crop=False)


def models_line(model: str, environment: Environment) -> str:
    """Return a line on the models and the environment of a measurement."""
    counts = environment.drafter_parameters.items()
    drafters = ", ".join(f"{name} {millions(n)}" if n else name for name, n in counts)
    return (
        f"[bold]{model}[/bold]: target of {millions(environment.target_parameters)}, "
        f"drafters: {drafters or 'none'}; {environment.precision} on {environment.device}, "
        f"{environment.num_threads} threads, {environment.cpu}, peak memory {environment.peak_memory / 2**30:.2f} GiB"
    )


def millions(count: int) -> str:
    return f"{count / 1e6:,.1f} M parameters"

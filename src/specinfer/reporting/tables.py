"""Tables on a terminal."""

from collections.abc import Container

from rich import box
from rich.console import Console
from rich.table import Table

from specinfer.reporting.environment import Environment

_UNBOUNDED = 1000  # columns


def new_table(*headings: str, labels: Container[int] = (0,)) -> Table:
    """Return an empty table. The columns whose numbers are in `labels` are aligned to the left."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number in labels else "right", overflow="fold")
    return table


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

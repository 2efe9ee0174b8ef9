"""The report of a measurement: tables whose values are written as JSON, too.

A measurement is a configuration whose fields are its flags, a function that measures, and the tables of its report.

    @reported
    def run_passes(config: PassesConfig, progress: StageBar) -> Report:
        values = (Value("rows", lambda times: times.rows), Value("ms", lambda times: times.ms, "{:.2f}"))
        return Report([config.model], [Table("passes", "A pass by its rows", values, measured)])
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from rich.console import Console

from specinfer.reporting.environment import Environment, surroundings
from specinfer.reporting.files import check_files, options_of, write_files
from specinfer.reporting.progress_bar import stage_bar
from specinfer.reporting.spread import Spread
from specinfer.reporting.tables import new_table, print_table

C = TypeVar("C", contravariant=True)
M = TypeVar("M")
R = TypeVar("R")


@dataclass(frozen=True)  # types of generics are set as attributes, which slots do not take
class Value(Generic[R]):
    """A value of each row: a column of the table, and a field of a JSON object.

    Attributes:
        key: Name in JSON, and the heading unless there is another. Empty for a value that is only printed.
        read: Function that returns the value of a row. Of a `Spread` the table shows the median; None is left blank.
        form: Format of the table's cell, or None for a value that is only written.
        label: Whether the column is aligned to the left, as the first one is.
        once: Whether the cell is left blank where it, and all such cells to its left, repeat the row above. A new value
            begins a section.
        optional: Whether JSON has no field where there is no value.
    """

    key: str
    read: Callable[[R], Any]
    form: str | None = "{}"
    heading: str | None = None
    label: bool = False
    once: bool = False
    optional: bool = False

    @property
    def title(self) -> str:
        return self.key.replace("_", " ") if self.heading is None else self.heading

    def cell(self, row: R) -> str:
        value, form = self.read(row), self.form
        assert form is not None
        return "" if value is None else form.format(value.median if isinstance(value, Spread) else value)

    def fields(self, row: R) -> dict[str, object]:
        value = self.read(row)
        if not self.key or (value is None and self.optional):
            return {}
        return value.fields(self.key) if isinstance(value, Spread) else {self.key: value}


def fields_of(values: Iterable[Value[R]], row: R) -> dict[str, object]:
    """Return the JSON object of a row."""
    return {key: field for value in values for key, field in value.fields(row).items()}


@dataclass(frozen=True)  # types of generics are set as attributes, which slots do not take
class Table(Generic[R]):
    """Rows of values under a title.

    Attributes:
        name: Name in JSON. Empty for a table that is only printed.
        note: Explanation that is printed below.
    """

    name: str
    title: str
    values: Sequence[Value[R]]
    rows: Sequence[R]
    note: str = ""

    def as_list(self) -> list[dict[str, object]]:
        return [fields_of(self.values, row) for row in self.rows]

    @property
    def _shown(self) -> list[Value[R]]:
        return [value for value in self.values if value.form is not None]

    def as_markdown(self) -> str:
        """Return the title and the table in Markdown."""
        values = self._shown
        lines = [[value.title for value in values]]
        lines.append(["---" if value.label or not number else "---:" for number, value in enumerate(values)])
        lines += [[value.cell(row).replace("|", "\\|") for value in values] for row in self.rows]
        table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        return "\n\n".join(filter(None, (f"{self.title}:", table, self.note)))

    def print(self, console: Console) -> None:
        """Print the table, with a line between the sections that its `once` columns form."""
        values = self._shown
        labels = [number for number, value in enumerate(values) if value.label or number == 0]
        table, above = new_table(*(value.title for value in values), labels=labels), list[str]()
        for row in self.rows:
            cells = [value.cell(row) for value in values]
            shown, repeats = list(cells), bool(above)
            for number, value in enumerate(values):
                if value.once:
                    repeats = repeats and cells[number] == above[number]
                    shown[number] = "" if repeats else cells[number]
            if above and not repeats and any(value.once for value in values):
                table.add_section()
            table.add_row(*shown)
            above = cells
        print_table(console, self.title, table)
        if self.note:
            console.print(self.note, highlight=False)


@dataclass(frozen=True)  # types of generics are set as attributes, which slots do not take
class Report(Generic[M]):
    """The result of a measurement, ready to print and to write.

    Attributes:
        lines: What is printed before the tables.
        measured: What the tables are made of, for callers that compute with it.
        numbers: Further values, which are only written.
        last: What is printed after the tables.
        plot: Function that draws the report into a file, or None.
        options: Options of the measurement; `reported` sets them.
    """

    lines: Sequence[str]
    tables: Sequence[Table[Any]]
    measured: M = None  # type: ignore[assignment]  # most measurements have nothing more
    environment: Environment | Mapping[str, object] = field(default_factory=surroundings)
    numbers: Mapping[str, object] = field(default_factory=dict)
    last: Sequence[str] = ()
    plot: Callable[[str | Path], None] | None = None
    options: Mapping[str, object] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the report in a form ready for JSON."""
        tables = {table.name: table.as_list() for table in self.tables if table.name}
        environment = self.environment.as_dict() if isinstance(self.environment, Environment) else self.environment
        return {**self.numbers, **tables, "options": dict(self.options), "environment": dict(environment)}

    def value(self, table: str, key: str, **where: object) -> Any:
        """Return a value of the first row of a table in which these values are found."""
        rows = next(each for each in self.tables if each.name == table).as_list()
        return next(row for row in rows if all(row[name] == value for name, value in where.items()))[key]

    def as_markdown(self) -> str:
        """Return the tables in Markdown."""
        return "\n\n".join(table.as_markdown() for table in self.tables if table.rows) + "\n"

    def draw(self, path: str | Path) -> None:
        """Draw the report into a file.

        Raises:
            ValueError: matplotlib is missing, or the suffix is unknown.
        """
        assert self.plot is not None
        self.plot(path)

    def print(self, console: Console) -> None:
        for line in self.lines:
            console.print(line, highlight=False)
        for table in self.tables:
            if table.rows:
                table.print(console)
        for line in self.last:
            console.print(line, highlight=False)


class ReportedMeasurement(Protocol[C, M]):
    """A measurement that shows its stages and writes its files."""

    def __call__(self, config: C, console: Console | None = None, **more: Any) -> Report[M]: ...


def reported(measure: Callable[..., Report[M]]) -> ReportedMeasurement[Any, M]:
    """Return a measurement that checks the files of a configuration, shows its stages, and writes the files.

    Args:
        measure: Function of a configuration with the field `json`, and `plot` if it draws, and of a `StageBar`. The
            field `markdown` names a file for the tables.
    """

    @functools.wraps(measure)
    def run(config: Any, console: Console | None = None, **more: Any) -> Report[M]:
        files = {name: getattr(config, name, None) for name in ("json", "plot", "markdown")}
        check_files(**files)
        with stage_bar(console) as progress:
            report = replace(measure(config, progress, **more), options=options_of(config))
        write_files(report, **files)
        return report

    return run

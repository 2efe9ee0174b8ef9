"""The report of a measurement: tables whose values are written as JSON, too.

A measurement is a page: a configuration whose fields are its flags, a function that measures, and the tables of what it
found.

    values = (Value("rows", lambda times: times.rows), Value("ms", lambda times: times.ms, "{:.2f}"))
    Table("passes", "A pass by its rows", values, measured)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from rich.console import Console

from specinfer.bench.loop import write_files
from specinfer.reporting.environment import surroundings
from specinfer.reporting.files import options_of
from specinfer.reporting.spread import Spread
from specinfer.reporting.tables import Column, print_rows

R = TypeVar("R")


@dataclass(frozen=True)  # types of generics are set as attributes, which slots do not take
class Value(Generic[R]):
    """A value of each row: a column of the table, and a field of a JSON object.

    Attributes:
        key: Name in JSON, and the heading unless there is another.
        read: Function that returns the value of a row. Of a `Spread` the table shows the median; None is left blank.
        form: Format of the table's cell, or None for a value that is only written.
    """

    key: str
    read: Callable[[R], Any]
    form: str | None = "{}"
    heading: str | None = None

    def cell(self, row: R) -> str:
        value, form = self.read(row), self.form
        assert form is not None
        return "" if value is None else form.format(value.median if isinstance(value, Spread) else value)

    def fields(self, row: R) -> dict[str, object]:
        value = self.read(row)
        return value.fields(self.key) if isinstance(value, Spread) else {self.key: value}


@dataclass(frozen=True)  # types of generics are set as attributes, which slots do not take
class Table(Generic[R]):
    """Rows of values under a title.

    Attributes:
        name: Name in JSON.
        note: Explanation that is printed below.
    """

    name: str
    title: str
    values: Sequence[Value[R]]
    rows: Sequence[R]
    note: str = ""

    def as_list(self) -> list[dict[str, object]]:
        return [{key: field for value in self.values for key, field in value.fields(row).items()} for row in self.rows]

    def print(self, console: Console) -> None:
        columns = [
            Column[R](value.heading or value.key.replace("_", " "), value.cell, label=number == 0)
            for number, value in enumerate(each for each in self.values if each.form is not None)
        ]
        print_rows(console, self.title, columns, self.rows)
        if self.note:
            console.print(self.note, highlight=False)


@dataclass(frozen=True, slots=True)
class Report:
    """What a measurement found.

    Attributes:
        lines: What is printed before the tables.
        numbers: Further values, which are only written.
        last: What is printed after the tables.
    """

    lines: Sequence[str]
    tables: Sequence[Table[Any]]
    options: Mapping[str, object]
    environment: Mapping[str, object] = field(default_factory=surroundings)
    numbers: Mapping[str, object] = field(default_factory=dict)
    last: Sequence[str] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the report in a form ready for JSON."""
        tables = {table.name: table.as_list() for table in self.tables}
        ends = {"options": dict(self.options), "environment": dict(self.environment)}
        return {**self.numbers, **tables, **ends}

    def value(self, table: str, key: str, **where: object) -> Any:
        """Return a value of the first row of a table in which these values are found."""
        rows = next(one for one in self.tables if one.name == table).as_list()
        return next(row for row in rows if all(row[name] == value for name, value in where.items()))[key]


def print_report(report: Report, console: Console) -> None:
    """Print what was found."""
    for line in report.lines:
        console.print(line, highlight=False)
    for table in report.tables:
        if table.rows:
            table.print(console)
    for line in report.last:
        console.print(line, highlight=False)


def finish(report: Report, config: Any) -> Report:
    """Write the JSON file that a configuration names, and return the report.

    Raises:
        UnwrittenError: The file cannot be written.
    """
    write_files(report, config.json, None, lambda report, path: None)
    return report


def described(config: Any) -> dict[str, object]:
    """Return the options of a configuration for a report."""
    return options_of(config)

"""Tables are made of columns, which are functions of a row."""

from reports import shown
from specinfer.reporting.report import Report, Table, Value

Row = tuple[int, str, float]
VALUES = (
    Value[Row]("batch", lambda row: row[0], once=True),
    Value[Row]("tree", lambda row: row[1], label=True, once=True),
    Value[Row]("speed", lambda row: row[2], "{:.1f}"),
)


def lines(*rows: Row) -> list[str]:
    text = shown(Report([], [Table("speeds", "Speeds", VALUES, rows)]), 40)
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def test_a_table_has_a_title_headings_and_a_line_for_each_row() -> None:
    title, headings, rule, *rows = lines((1, "off", 10.0), (2, "auto", 7.5))
    assert title == "Speeds"
    assert headings.split() == ["batch", "tree", "speed"]
    assert set(rule) == {"─"}
    assert [row.split() for row in rows] == [["1", "off", "10.0"], ["2", "auto", "7.5"]]


def test_a_label_that_repeats_the_row_above_is_blank_while_the_labels_before_it_do() -> None:
    rows = lines((1, "off", 1.0), (1, "off", 2.0), (1, "auto", 3.0), (2, "auto", 4.0))[3:]
    assert [row.split() for row in rows] == [["1", "off", "1.0"], ["2.0"], ["auto", "3.0"], ["2", "auto", "4.0"]]


def test_a_cell_that_is_too_wide_is_folded_and_not_cut() -> None:
    assert sum(line.count("x") for line in lines((1, 200 * "x", 1.0))) == 200


def test_a_table_in_markdown_has_every_cell_and_aligns_labels_to_the_left() -> None:
    table = Table("speeds", "Speeds", VALUES, [(1, "off", 1.0), (1, "a|b", 2.0)], "note")
    assert Report([], [table, Table("", "Empty", VALUES, [])]).as_markdown().splitlines() == [
        "Speeds:", "", "| batch | tree | speed |", "| --- | --- | ---: |", "| 1 | off | 1.0 |",
        "| 1 | a\\|b | 2.0 |", "", "note",
    ]  # fmt: skip

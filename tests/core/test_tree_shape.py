"""The `tree` option: what its forms mean, and what is refused."""

from typing import Any

import pytest

from specinfer.core.config import SpeculativeConfig
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree_shape import BEST_FIRST_DEPTH, TreeShape, parse_tree


@pytest.mark.parametrize(
    ("tree", "shape"),
    [
        ("auto", TreeShape(is_auto=True)),
        ("off", TreeShape()),
        ("1", TreeShape((1,), 1, 1)),
        ("1,1,3,1", TreeShape((1, 1, 3, 1), 8, 4)),
        ("< 2, 2 >", TreeShape((2, 2), 6, 2)),
        ("1024", TreeShape((1024,), 1024, 1)),
        (",".join(["1"] * 1024), TreeShape((1,) * 1024, 1024, 1024)),
        ("best-first:32", TreeShape((), 32, BEST_FIRST_DEPTH)),
        ("best-first:1", TreeShape((), 1, 1)),
        ("best-first:5", TreeShape((), 5, 5)),
        ("best-first:32:3", TreeShape((), 32, 3)),
        ("best-first:4:9", TreeShape((), 4, 4)),
        ("best-first:1024:1024", TreeShape((), 1024, 1024)),
    ],
)
def test_forms_of_a_tree(tree: str, shape: TreeShape) -> None:
    assert parse_tree(tree) == shape
    assert shape.is_off == (tree == "off")
    assert SpeculativeConfig(tree=tree).shape == shape
    assert SamplingParams(tree=tree).tree == tree


NOT_UNDERSTOOD, TOO_MANY = (
    r'.* is not understood; use "auto", "off", .*"best-first:32"',
    "must have from 1 to 1024 nodes",
)
REFUSED: dict[str, tuple[Any, ...]] = {
    NOT_UNDERSTOOD: (
        *(
            "",
            " ",
            "Off",
            "AUTO",
            "1,,2",
            "1,",
            ",",
            "1;2",
            "a",
            "1.0",
            "1e3",
            "-1",
            "+1",
            "0x4",
            "\u0661",
            "<",
            "auto,1",
        ),
        *("best-first", "best-first:", "best-first:x", "best-first:-1", "best-first:1.5", "best-first:4:5:6"),
        *("best-first::4", "best-first:4:", "best-first32", "best-first-4", "best-firsts:4", "bestfirst:4"),
        *("best-first:\u0664", "9" * 5000 + "x"),
    ),
    f'.* {TOO_MANY}, or use "off"': (
        *("best-first:0", "best-first:1000000", "best-first:1025", "best-first:0:4", "best-first:" + "9" * 5000),
    ),
    "the depth of .* must be from 1 to 1024": ("best-first:8:0", "best-first:8:1025"),
    ".* has more than 1024 nodes; make it smaller": (
        *("1025", "10,10,10", "999999", "1000000", "2000001", "9" * 9, "1" + "0" * 5000),
        *(",".join(["1"] * 1025), ",".join(["99"] * 5000)),
    ),
    'a level of .* has no children; .* use "off"': ("0", "1,0", "0,5", "00", "0" * 5000),
    ".* is not a string": (3, None, [1, 2], (1,), True, b"1", 1.0),
}


@pytest.mark.parametrize(
    ("tree", "message"),
    [(tree, message) for message, trees in REFUSED.items() for tree in trees],
    ids=lambda value: repr(value)[:20],
)
def test_trees_that_are_refused(tree: Any, message: str) -> None:
    """The message names every form there is, and does not repeat a text without end."""
    with pytest.raises(ValueError, match=f"^tree: {message}") as error:
        parse_tree(tree)
    assert len(str(error.value)) < 300


def test_noughts_before_a_number_change_nothing() -> None:
    assert parse_tree("0000000002,01") == parse_tree("2,1")

"""Pieces of a pass as numbers: what is read is what was written, whatever went before."""

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specinfer.model.batch import Piece
from specinfer.model.sharding.wire import NUM_LISTS, PieceReader, PieceWriter
from tiny import trees

_SLOT = st.integers(0, 2**31 - 1)


def _slots(length: int) -> st.SearchStrategy[Any]:
    return st.lists(_SLOT, min_size=length, max_size=length).map(lambda s: np.asarray(s, dtype=np.int64))


@st.composite
def _pieces(draw: st.DrawFn) -> Piece:
    """Any numbers, also such as no engine would make."""
    new, earlier, prefix = draw(st.integers(1, 40)), draw(st.integers(0, 5)), draw(st.integers(0, 30))
    numbers = st.lists(st.integers(0, 2**31 - 1), min_size=new, max_size=new)
    bits = draw(st.lists(st.booleans(), min_size=new * (new + earlier), max_size=new * (new + earlier)))
    return Piece(
        draw(numbers),
        draw(numbers),
        draw(_slots(prefix)),
        draw(_slots(new)),
        np.asarray(bits, dtype=np.bool_).reshape(new, earlier + new),
        draw(st.integers(0, new)),
        draw(_slots(earlier)),
        draw(st.lists(_SLOT, min_size=earlier, max_size=earlier)),
        num_known=draw(st.integers(0, new)),
        prefix_positions=draw(_slots(prefix)) if prefix and draw(st.booleans()) else None,
    )


def _same(one: Piece, other: Piece) -> bool:
    return all(np.array_equal(getattr(one, field.name), getattr(other, field.name)) for field in fields(Piece))


@settings(max_examples=12, deadline=None)
@given(st.lists(st.lists(_pieces(), min_size=1, max_size=4), min_size=1, max_size=4))
def test_any_pieces_come_through(passes: list[list[Piece]]) -> None:
    writer, reader = PieceWriter(), PieceReader()
    for pieces in passes:
        read = reader.read(writer.write(pieces))
        assert len(read) == len(pieces)
        assert all(map(_same, read, pieces))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_requests_that_grow_shrink_and_share_come_through(data: st.DataObject) -> None:
    """Prefixes as an engine has them: each longer than before, or cut, put back, or begun like another's."""
    writer, reader = PieceWriter(), PieceReader()
    prefixes: list[list[int]] = [[] for _ in range(3)]
    free = iter(range(10**6))
    for _ in range(data.draw(st.integers(1, 8))):
        pieces = []
        for i, prefix in enumerate(prefixes):
            match data.draw(st.sampled_from(["more", "more", "cut", "other's", "none"])):
                case "more":
                    prefix = [*prefix, *(next(free) for _ in range(data.draw(st.integers(1, 20))))]
                case "cut":
                    prefix = prefix[: data.draw(st.integers(0, len(prefix)))]
                case "other's":
                    prefix = list(prefixes[data.draw(st.integers(0, 2))])
                case _:
                    prefix = []
            prefixes[i] = prefix
            tree = data.draw(trees())
            slots = np.asarray([next(free) for _ in range(len(tree))], dtype=np.int64)
            pieces.append(Piece.from_span([tree.tokens[0]], tree, np.asarray(prefix, dtype=np.int64), slots))
        assert all(map(_same, reader.read(writer.write(pieces)), pieces))


def test_more_requests_than_rows_come_through() -> None:
    writer, reader = PieceWriter(), PieceReader()
    for step in range(3):
        pieces = [_chain(range(1000 * i, 1000 * i + 5 + step), 2) for i in range(2 * NUM_LISTS)]
        assert all(map(_same, reader.read(writer.write(pieces)), pieces))


@pytest.mark.parametrize("prefix", [0, 5000])
def test_a_step_of_one_token_is_sent_in_few_numbers(prefix: int) -> None:
    """However long the text before it is."""
    writer = PieceWriter()
    writer.write([_chain(range(prefix), 1)])
    assert len(writer.write([_chain(range(prefix + 1), 1)])) < 20


def test_a_chunk_of_a_prompt_is_sent_without_its_mask() -> None:
    assert len(PieceWriter().write([_chain(range(0), 512)])) < 4 * 512


def _chain(prefix: range, length: int) -> Piece:
    slots = np.arange(length, dtype=np.int64) + 10**6
    return Piece.from_span(list(range(length)), None, np.asarray(prefix, dtype=np.int64), slots)

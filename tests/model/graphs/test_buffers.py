"""Sizes that passes are padded to, and the buffers and the table of slots that passes of a size share."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specinfer.model.batch import Piece
from specinfer.model.graphs.buffers import Buffers
from specinfer.model.graphs.sizes import REQUESTS, TOKENS, Size, at_least, is_chain, loaded_sizes
from specinfer.model.graphs.slot_table import SlotTable
from specinfer.model.kv_cache import NO_SLOTS
from specinfer.ops.tree_layout import unpack_bits
from tiny import VOCAB, trees

CPU = torch.device("cpu")

# ------------------------------------------------------------------------------------------------ sizes


@st.composite
def _pieces(draw: st.DrawFn) -> list[Piece]:
    """Any passes: chunks, trees, frontiers; their slots lie anywhere."""
    made = []
    free = iter(np.random.default_rng(draw(st.integers(0, 9))).permutation(5000))

    def slots(count: int) -> Any:
        return np.fromiter(free, dtype=np.int64, count=count)

    for _ in range(draw(st.integers(1, 6))):
        chain = [draw(st.integers(0, VOCAB - 1)) for _ in range(draw(st.integers(1, 40)))]
        tree = draw(st.none() | trees(root=chain[-1], vocab=5))
        prefix = slots(draw(st.integers(0, 30)))
        piece = Piece.from_span(chain, tree, prefix, slots(len(chain) + (tree.num_guessed if tree else 0)))
        if draw(st.booleans()) and len(piece.tokens) > 1:  # the first of them were computed before
            count = draw(st.integers(1, len(piece.tokens) - 1))
            piece = Piece(
                piece.tokens[count:], piece.positions[count:], prefix, piece.slots[count:], piece.visible[count:],
                min(piece.num_logits, len(piece.tokens) - count), piece.slots[:count], piece.positions[:count],
            )  # fmt: skip
        made.append(piece)
    return made


@given(_pieces())
def test_a_pass_fits_into_its_padded_size(pieces: list[Piece]) -> None:
    exact = Size.from_pieces(pieces)
    size = exact.padded()
    assert size is not None
    assert size.is_chain == exact.is_chain == all(map(is_chain, pieces))
    for name in ("tokens", "requests", "new", "nodes", "rows"):
        assert getattr(size, name) >= getattr(exact, name), name
    assert size.tokens in TOKENS
    assert size.requests in REQUESTS
    assert size.padded() == size, "what was made larger fits as it is"


def test_few_sizes_are_enough_for_plain_decoding() -> None:
    def plain(count: int) -> Size | None:
        return Size(count, count, 1, 1, count, is_chain=True).padded()

    sizes = {plain(count) for count in range(1, 65)}
    assert len(sizes) < 16
    assert {size for size in loaded_sizes(16) if size.new == 1} <= sizes
    assert {plain(count) for count in (1, 2, 4, 8, 16)} <= set(loaded_sizes(16))


def test_what_is_too_large_has_no_size() -> None:
    assert Size(513, 1, 513, 513, 1, is_chain=True).padded() is None
    assert Size(300, 300, 1, 1, 300, is_chain=True).padded() is None
    assert at_least(TOKENS, 513) is None
    assert [at_least(TOKENS, count) for count in (1, 3, 512)] == [1, 4, 512]


def test_sizes_of_recurrent_layers_have_room_for_what_is_computed_once_more() -> None:
    chain, tree = (Size(16, 1, 16, 32, 16, is_chain=is_chain) for is_chain in (True, False))
    assert [replace(chain, scanned=scanned).padded() for scanned in (16, 17, 500)] == [
        replace(chain, scanned=scanned) for scanned in (16, 24, 512)
    ]
    assert replace(tree, scanned=90).padded() == replace(tree, scanned=96)
    assert replace(tree, scanned=97).padded() is None  # too many states of nodes at a time
    assert replace(chain, scanned=513).padded() is None


@pytest.mark.parametrize(
    ("visible", "wanted"),
    [
        ([[1]], True),
        ([[1, 1, 1]], True),
        ([[1, 0, 1]], False),
        ([[1, 1, 0], [1, 1, 1]], True),
        ([[1, 1, 0], [1, 0, 1]], False),
        ([[1, 1], [1, 1]], False),
    ],
)
def test_chains_are_known(visible: list[list[int]], wanted: bool) -> None:
    sees = np.asarray(visible, dtype=np.bool_)
    count = len(sees)
    piece = Piece([0] * count, range(count), NO_SLOTS, np.arange(count), sees, 0)
    assert is_chain(piece) == wanted


# ---------------------------------------------------------------------------------------------- buffers


def _check(buffers: Buffers, pieces: list[Piece]) -> None:
    """The buffers contain the pieces, and padding."""
    batch, layout = buffers.batch(None), buffers.layout  # type: ignore[arg-type]  # nothing is stored
    start = num_rows = 0
    for i, piece in enumerate(pieces):
        end, earlier = start + len(piece.tokens), len(piece.earlier_slots)
        nodes = earlier + len(piece.tokens)
        assert layout.starts[i].item() == start
        assert batch.token_ids[start:end].tolist() == list(piece.tokens)
        assert batch.positions[start:end].tolist() == layout.positions[start:end].tolist() == list(piece.positions)
        assert batch.slots[start:end].tolist() == piece.slots.tolist()
        assert layout.slot_table[i, : layout.prefix_lens[i]].tolist() == piece.prefix_slots.tolist()
        assert layout.node_lens[i].item() == nodes
        assert layout.node_slots[i, :nodes].tolist() == [*piece.earlier_slots, *piece.slots]
        assert layout.node_positions[i, :nodes].tolist() == [*piece.earlier_positions, *piece.positions]
        if not layout.is_chain:
            assert unpack_bits(layout.visible[start:end], nodes).tolist() == piece.visible.tolist()
        end_rows = num_rows + piece.num_logits
        assert batch.logit_rows[num_rows:end_rows].tolist() == list(range(end - piece.num_logits, end))
        start, num_rows = end, end_rows
    assert set(layout.starts[len(pieces) :].tolist()) == {start}
    assert not layout.prefix_lens[len(pieces) :].any()
    assert not layout.node_lens[len(pieces) :].any()
    assert (batch.slots[start:] == -1).all()
    assert not batch.token_ids[start:].any()


@settings(max_examples=30)
@given(st.lists(_pieces(), min_size=1, max_size=4))
def test_buffers_are_filled_by_one_pass_after_the_other(passes: list[list[Piece]]) -> None:
    """In one buffer and one table; each pass comes after a larger or a smaller one."""
    table = SlotTable(8, 30, CPU)
    # The smallest that fits them all.
    size = Size(512, 8, 64, 64, 512, is_chain=False)
    buffers = Buffers(size, table, CPU)
    places = [tensor.data_ptr() for tensor in _tensors(buffers)]
    for pieces in passes:
        buffers.fill(pieces)
        buffers.update_table()
        _check(buffers, pieces)
    assert [tensor.data_ptr() for tensor in _tensors(buffers)] == places


def _tensors(buffers: Buffers) -> Iterator[torch.Tensor]:
    batch = buffers.batch(None)  # type: ignore[arg-type]  # nothing is stored
    yield from (batch.token_ids, batch.positions, batch.slots, batch.logit_rows)
    layout = buffers.layout
    yield from (layout.slot_table, layout.prefix_lens, layout.starts, layout.node_slots, layout.node_positions)
    yield from (layout.node_lens, layout.visible, layout.positions)


def test_only_what_is_new_is_written_to_the_table() -> None:
    table = SlotTable(2, 8, CPU)

    def changes(*prefixes: list[int]) -> list[tuple[int, list[int]]]:
        return [(cell, new.tolist()) for cell, new in table.changes([np.asarray(one) for one in prefixes])]

    assert changes([5, 6, 7], [1]) == [(0, [5, 6, 7]), (8, [1])]
    assert changes([5, 6, 7, 8], [1, 2, 3]) == [(3, [8]), (9, [2, 3])]
    assert changes([5, 6], [1, 2, 3]) == [], "a shorter prefix stands there already"
    assert changes([5, 6, 9, 8]) == [(2, [9, 8])], "up to its end, since all behind a change is another's"
    assert changes([1, 2, 3], [5, 6]) == [(0, [1, 2, 3]), (8, [5, 6])]
    table.forget()
    assert changes([1, 2, 3]) == [(0, [1, 2, 3])]

"""Packing: what a token may see, where it stands, and how requests share one padded call."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specinfer.core.tree import TokenTree
from specinfer.model.batch import MAX_GROUPED_TOKENS, ForwardBatch, Piece, pack
from specinfer.model.kv_tensors import KVTensors
from tiny import trees

STORE = KVTensors([], 0, torch.float32, torch.device("cpu"))
CPU = torch.device("cpu")


def _piece(prefix: int, chain: list[int], tree: TokenTree | None, first_slot: int = 0) -> Piece:
    """Slots are taken in falling order, so that no slot equals its position."""
    num_new = len(chain) + (tree.num_guessed if tree else 0)
    slots = np.arange(first_slot + prefix + num_new - 1, first_slot - 1, -1)
    return Piece.from_span(chain, tree, slots[:prefix], slots[prefix:])


@given(prefix=st.integers(0, 4), num_chain=st.integers(1, 4), tree=trees(max_nodes=8))
def test_a_node_sees_the_chain_and_its_own_path(prefix: int, num_chain: int, tree: TokenTree) -> None:
    chain = [*range(20, 20 + num_chain - 1), tree.tokens[0]]
    piece = _piece(prefix, chain, tree)
    assert list(piece.tokens) == [*chain, *tree.tokens[1:]]
    assert piece.num_logits == len(tree)
    assert piece.num_context == prefix + len(piece.tokens)
    for row in range(len(piece.tokens)):
        node = max(0, row - num_chain + 1)
        seen = [*range(min(row, num_chain - 1) + 1), *(num_chain - 1 + n for n in tree.path(node))]
        assert np.flatnonzero(piece.visible[row]).tolist() == seen
        assert piece.positions[row] == prefix + len(seen) - 1, "a token stands after all that it sees"


def test_a_chunk_of_a_prompt_has_no_logits() -> None:
    piece = _piece(3, [5, 6, 7], None)
    assert piece.num_logits == 0
    assert list(piece.positions) == [3, 4, 5]
    assert np.array_equal(piece.visible, np.tri(3, dtype=bool))


def _rebuilt(batch: ForwardBatch) -> dict[int, tuple[list[int], list[int], int]]:
    """For each packed token: slots it sees, their positions, its own position; each token in one group."""
    seen: dict[int, tuple[list[int], list[int], int]] = {}
    for group in batch.groups:
        num_new = group.rows.shape[1]
        for out_row, packed in zip(group.out_rows.tolist(), group.packed_rows.tolist(), strict=True):
            i, j = divmod(out_row, num_new)
            assert group.rows[i, j] == packed
            assert packed not in seen
            mask = group.visible[i, j]
            positions = group.key_positions[i, mask].tolist()
            seen[packed] = (group.kv_slots[i, mask].tolist(), positions, int(group.query_positions[i, j]))
    return seen


PARTS = st.tuples(st.integers(0, 5), st.integers(1, 6), trees(max_nodes=5), st.booleans())


@given(st.lists(PARTS, min_size=1, max_size=5))
def test_packing_keeps_every_request_apart(parts: list[tuple[int, int, TokenTree, bool]]) -> None:
    pieces = []
    for i, (prefix, num_chain, tree, says) in enumerate(parts):
        chain = [*range(num_chain - 1), tree.tokens[0]]
        pieces.append(_piece(prefix, chain, tree if says else None, first_slot=100 * i))
    batch = pack(pieces, STORE, CPU)
    assert batch.token_ids.tolist() == [token for piece in pieces for token in piece.tokens]
    assert batch.positions.tolist() == [p for piece in pieces for p in piece.positions]
    assert batch.slots.tolist() == [slot for piece in pieces for slot in piece.slots.tolist()]
    rebuilt, row, logit_rows = _rebuilt(batch), 0, []
    for piece in pieces:
        logit_rows += range(row + len(piece.tokens) - piece.num_logits, row + len(piece.tokens))
        context = [*piece.prefix_slots.tolist(), *piece.slots.tolist()]
        prefix = len(piece.prefix_slots)
        for j in range(len(piece.tokens)):
            new = np.flatnonzero(piece.visible[j])
            slots = context[:prefix] + [context[prefix + n] for n in new]
            positions = [*range(prefix), *(piece.positions[n] for n in new)]
            assert rebuilt.pop(row) == (slots, positions, piece.positions[j])
            row += 1
    assert not rebuilt
    assert batch.logit_rows.tolist() == logit_rows


def test_long_pieces_have_a_group_of_their_own() -> None:
    long, short = list(range(MAX_GROUPED_TOKENS + 1)), [1, 2]
    batch = pack([_piece(0, short, None), _piece(0, long, None), _piece(1, short, None)], STORE, CPU)
    assert sorted(tuple(group.rows.shape) for group in batch.groups) == [(1, len(long)), (2, 2)]
    assert len(_rebuilt(batch)) == len(long) + 4
    alone = pack([_piece(0, long, None)], STORE, CPU)
    assert [group.is_whole for group in alone.groups] == [True]


def test_every_token_is_in_a_group_whatever_the_length_of_its_piece() -> None:
    lengths = [MAX_GROUPED_TOKENS - 1, MAX_GROUPED_TOKENS, MAX_GROUPED_TOKENS + 1]
    for some in ([length] for length in lengths), (lengths,):
        for sizes in some:
            batch = pack([_piece(0, list(range(size)), None) for size in sizes], STORE, CPU)
            assert sorted(_rebuilt(batch)) == list(range(sum(sizes)))


def test_padding_sees_something() -> None:
    """A row that sees nothing would be NaN in its softmax."""
    batch = pack([_piece(0, [1], None), _piece(2, [1, 2, 3], None)], STORE, CPU)
    (group,) = batch.groups
    assert bool(group.visible.any(dim=-1).all())


@pytest.mark.parametrize("window", [1, 2, 3, 100, None])
def test_windows_count_positions_not_slots(window: int | None) -> None:
    tree = TokenTree((9, 1, 2, 3), (-1, 0, 1, 0))
    (group,) = pack([_piece(3, [8, 9], tree)], STORE, CPU).groups
    allowed = group.bias(window, 2, torch.float32)[0, 0] == 0
    assert allowed.shape == (2 * 5, 8)
    assert torch.equal(allowed[:5], allowed[5:]), "once for each query head of a key head"
    context = [0, 1, 2, 3, 4, 5, 6, 5]  # positions: prefix, chain, then nodes of depth 1, 2 and 1
    paths = [[0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 7]]
    for row, path in zip(allowed[:5], paths, strict=True):
        last = context[path[-1]]
        assert row.nonzero().flatten().tolist() == [i for i in path if window is None or last - context[i] < window]

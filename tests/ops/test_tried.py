"""Counts of drafted tokens: the same, in one native call and token by token."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from specinfer.ops.cpu.tried import Verified, count_tried

EDGES = np.array([0.1, 0.5, 0.9])
NUM_SOURCES, RANKS = 3, 2


@st.composite
def _verified(draw: st.DrawFn) -> Verified:
    size = draw(st.integers(1, 12))
    parents = [-1, *(draw(st.integers(0, node - 1)) for node in range(1, size))]
    path, node = list[int](), draw(st.integers(0, size - 1))
    while node:
        path.insert(0, node)
        node = parents[node]
    sources = draw(st.lists(st.integers(0, NUM_SOURCES - 1), min_size=1, max_size=3, unique=True))
    each_node = draw(st.booleans())
    nodes = None
    if not each_node:
        nodes = np.array(draw(st.lists(st.integers(1, size - 1), max_size=20)) if size > 1 else [], dtype=np.int64)
    count = size if nodes is None else len(nodes)
    whole = st.lists(st.integers(0, RANKS), min_size=count, max_size=count).map(lambda ranks: np.array(ranks, np.int64))
    makers = st.lists(st.integers(0, len(sources) - 1), min_size=count, max_size=count)
    confidence = st.lists(st.sampled_from([0.0, 0.1, 0.3, 0.9, 1.0]), min_size=count, max_size=count)
    return Verified(
        np.array(parents),
        path,
        sources,
        np.array(draw(confidence)),
        nodes,
        None if each_node else np.array(draw(makers), dtype=np.int64),
        draw(whole) if each_node else None,
    )


def _token_by_token(verified: Sequence[Verified]) -> npt.NDArray[np.float64]:
    counts = np.zeros((NUM_SOURCES, 2, RANKS, len(EDGES) + 1))
    for one in verified:
        reached, seen = {0, *one.path}, dict[tuple[int, int], int]()
        for i, confidence in enumerate(one.confidence.tolist()):
            node = i if one.nodes is None else int(one.nodes[i])
            above = int(one.parents[node])
            if above not in reached:
                continue
            source = one.sources[0 if one.makers is None else int(one.makers[i])]
            rank = seen[above, source] = seen.get((above, source), -1) + 1
            if one.ranks is not None:
                rank = int(one.ranks[i])
            cell = source, slice(None), min(rank, RANKS - 1), int(np.searchsorted(EDGES, confidence))
            counts[cell] += (1.0, float(node in reached))
    return counts


@given(st.lists(_verified(), min_size=1, max_size=5))
def test_counts_are_those_token_by_token(verified: list[Verified]) -> None:
    assert (count_tried(verified, NUM_SOURCES, EDGES, RANKS) == _token_by_token(verified)).all()


def test_only_children_of_accepted_nodes_are_tried() -> None:
    """A root with the children 1 and 2, of which 1 is accepted and has the child 3; 2 has the child 4."""
    parents, confidence = np.array([-1, 0, 0, 1, 2]), np.array([0.95, 0.2, 0.6, 0.2])
    nodes, makers = np.array([1, 2, 3, 4]), np.zeros(4, dtype=np.int64)
    (tried_ones, accepted), *_ = count_tried(
        [Verified(parents, (1,), (0,), confidence, nodes, makers)], 1, EDGES, RANKS
    )
    assert tried_ones.tolist() == [[0, 0, 1, 1], [0, 1, 0, 0]]
    assert accepted.tolist() == [[0, 0, 0, 1], [0, 0, 0, 0]]

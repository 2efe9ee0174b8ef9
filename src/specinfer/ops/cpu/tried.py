"""Counts of the drafted tokens of verified trees that were tried and accepted, made in one native call: see tried.h."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specinfer.core.draws import Floats, Ints
from specinfer.ops.cpu.library import address, addresses, library


class _Tried(ctypes.Structure):
    _fields_ = (
        ("trees", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("of", "paths", "sources", "edges", "counts")),
        *((name, ctypes.c_int64) for name in ("num_sources", "num_edges", "ranks")),
    )


class Verified(NamedTuple):
    """A verified tree, and its drafted tokens.

    Attributes:
        parents: [nodes] the parent of each node.
        path: The accepted nodes.
        sources: Number of the source of each drafter.
        confidence: [tokens].
        nodes: [tokens] the node of each, or None if each node is one; the root, which comes first, counts for nothing.
        makers: [tokens] the drafter of each, or None for the first one.
        ranks: [tokens] the rank of each among its siblings, or None for the order of its source's at the same parent.
    """

    parents: Ints
    path: Sequence[int]
    sources: Sequence[int]
    confidence: Floats
    nodes: Ints | None = None
    makers: Ints | None = None
    ranks: Ints | None = None


def count_tried(verified: Sequence[Verified], num_sources: int, edges: Floats, ranks: int) -> Floats:
    """Return how many tokens whose parents were accepted were tried, and accepted, [sources, 2, ranks, edges + 1].

    Args:
        edges: Upper bounds of the confidences that are counted together, rising.
        ranks: Number of ranks; the last one stands for all later ones.
    """
    counts = np.zeros((num_sources, 2, ranks, len(edges) + 1))
    loaded = library()
    if loaded is None:
        for one in verified:
            _count_plainly(one, counts, edges)
        return counts
    paths, sources = list[int](), list[int]()
    rows = []
    for one in verified:
        columns = addresses((one.parents, one.nodes, one.makers, one.ranks, one.confidence))
        sizes = len(one.parents), len(one.confidence), len(paths), len(one.path), len(sources)
        rows.append((*columns, *sizes))
        paths += one.path
        sources += one.sources
    numbers = [np.array(column, dtype=np.int64) for column in (rows, paths, sources)]
    call = _Tried(len(verified), *map(address, (*numbers, edges, counts)), num_sources, len(edges), ranks)
    loaded.specinfer_count_tried(ctypes.addressof(call))
    return counts


def _count_plainly(one: Verified, counts: Floats, edges: Floats) -> None:
    """Add the counts of one tree, token by token."""
    reached, seen = {0, *one.path}, dict[tuple[int, int], int]()
    num_ranks = counts.shape[2]
    for i, confidence in enumerate(one.confidence.tolist()):
        node = i if one.nodes is None else int(one.nodes[i])
        above = int(one.parents[node])
        if above not in reached:
            continue
        source = one.sources[0 if one.makers is None else int(one.makers[i])]
        rank = seen[above, source] = seen.get((above, source), -1) + 1
        if one.ranks is not None:
            rank = int(one.ranks[i])
        cell = source, slice(None), min(rank, num_ranks - 1), int(np.searchsorted(edges, confidence))
        counts[cell] += (1.0, float(node in reached))

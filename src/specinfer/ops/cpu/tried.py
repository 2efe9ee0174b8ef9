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
    paths, sources = list[int](), list[int]()
    rows = []
    for tree in verified:
        columns = addresses((tree.parents, tree.nodes, tree.makers, tree.ranks, tree.confidence))
        sizes = len(tree.parents), len(tree.confidence), len(paths), len(tree.path), len(sources)
        rows.append((*columns, *sizes))
        paths += tree.path
        sources += tree.sources
    numbers = [np.array(column, dtype=np.int64) for column in (rows, paths, sources)]
    call = _Tried(len(verified), *map(address, (*numbers, edges, counts)), num_sources, len(edges), ranks)
    loaded.specinfer_count_tried(ctypes.addressof(call))
    return counts

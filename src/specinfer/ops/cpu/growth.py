"""Growth of several trees by a level, in one native call: see growth.h."""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from specinfer.ops.cpu.library import address, addresses, library

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
# Columns of the numbers of growing trees, as in types.h; those from `FIXED` to `MIN_GAIN` are for native code only.
START, OPEN_START, FIXED, HEIGHTS, SLOPES, BY_RANK, MIN_PATH_PROB, MIN_GAIN = range(8)
MAX_DEPTH, NUM_LEFT, SIZE, LEVELS, FIRST, END, WIDTH, NUM_OPEN = range(8, 16)
_GUESS = 5  # numbers that a guess takes


class _Growth(ctypes.Structure):
    _fields_ = (
        ("count", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("trees", "tokens", "parents", "depths", "path_prob", "confidence")),
        *((name, ctypes.c_void_p) for name in ("sources", "ancestry")),
        ("ancestry_columns", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("open", "edges", "middles")),
        *((name, ctypes.c_int64) for name in ("bins", "middles_count", "ranks", "breadth")),
        *((name, ctypes.c_void_p) for name in ("candidates", "sure")),
        *((name, ctypes.c_int64) for name in ("columns", "level")),
    )


class NodeArrays(NamedTuple):
    """The nodes of several trees, tree by tree; rows and entries are theirs."""

    tokens: Ints
    parents: Ints
    depths: Ints
    path_prob: Floats
    confidence: Floats
    sources: Ints  # [nodes, 3] level, row and rank of the candidate that became the node
    ancestry: npt.NDArray[np.bool_]  # [nodes, most nodes of a tree]


class TreeRules(NamedTuple):
    """Limits on the growth of a tree, and the numbers that rank its guesses.

    Attributes:
        widths: The children of each node by level, or none to grow best first.
        lines: Heights and slopes of a calibration, [ranks * (middles + 1)] each.
        by_rank: [ranks] acceptance probabilities of the calibration.
        most_guesses: Largest number of guesses that it can be offered.
    """

    widths: Sequence[int]
    lines: tuple[Floats, Floats]
    by_rank: Floats
    min_path_prob: float
    min_gain: float
    most_guesses: int


class GrowthCall:
    """The arrays of trees that grow together, ready for calls that extend them by a level.

    Args:
        trees: [trees, 16] numbers of each tree by the columns above: written to.
        nodes: Arrays of all nodes: written to.
        rules: The rules of each tree.
        edges: [bins - 1] the greatest path probability of each bin but the first, falling.
        middles: [middles] confidences at which the lines of the acceptance probability meet.
        breadth: Most children of a node, best first.
    """

    def __init__(
        self, trees: Ints, nodes: NodeArrays, rules: Sequence[TreeRules], edges: Floats, middles: Floats, breadth: int
    ) -> None:
        fixed = [np.array(one.widths, dtype=np.int64) if one.widths else None for one in rules]
        lines = [
            (*one.lines, one.by_rank) if widths is None else (None,) * 3
            for one, widths in zip(rules, fixed, strict=True)
        ]
        for column, pointed in zip(range(FIXED, BY_RANK + 1), (fixed, *zip(*lines, strict=True)), strict=True):
            trees[:, column] = addresses(pointed)
        numbers = trees.view(np.float64)
        numbers[:, MIN_PATH_PROB : MIN_GAIN + 1] = [(one.min_path_prob, one.min_gain) for one in rules]
        counts = [one.most_guesses for one in rules]
        trees[1:, OPEN_START] = np.cumsum(counts[:-1])
        guesses = np.empty((sum(counts), _GUESS), dtype=np.int64)
        arrays: list[npt.NDArray[Any]] = [*nodes, guesses, edges, middles]
        assert all(array.flags.c_contiguous for array in (trees, *arrays))
        self._alive = (trees, arrays, rules, fixed)  # keeps the arrays alive as long as their addresses
        at = [address(array) for array in arrays]
        ranks = next((len(one.by_rank) for one in rules if not one.widths), 1)
        assert all(len(one.lines[0]) == ranks * (len(middles) + 1) for one in rules if not one.widths)
        self._growth = _Growth(
            len(rules), address(trees), *at[:7], nodes.ancestry.shape[1], *at[7:], len(edges) + 1, len(middles), ranks,
            breadth,
        )  # fmt: skip
        self._address = ctypes.addressof(self._growth)

    def extend(self, candidates: Ints, confidence: npt.NDArray[np.float32]) -> None:
        """Offer guesses below the frontiers, and make nodes of those that are wanted.

        Args:
            candidates, confidence: [nodes of the frontiers, columns].
        """
        candidates, confidence = np.ascontiguousarray(candidates), np.ascontiguousarray(confidence)
        assert candidates.dtype == np.int64
        assert confidence.dtype == np.float32
        assert candidates.shape == confidence.shape
        growth, loaded = self._growth, library()
        growth.candidates, growth.sure = address(candidates), address(confidence)
        growth.columns = candidates.shape[1]
        assert loaded is not None
        loaded.specinfer_grow(self._address)

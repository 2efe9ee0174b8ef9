"""Growth of several trees by a level, in one native call: see growth.h."""

import ctypes
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from specinfer.core.draws import Floats, Ints
from specinfer.ops.cpu.library import address, addresses, library

# Columns of the numbers of growing trees, as in types.h.
START, OPEN_START, FIXED, HEIGHTS, SLOPES, BY_RANK, MIN_PATH_PROB, MIN_GAIN = range(8)
MAX_DEPTH, NUM_LEFT, SIZE, LEVELS, FIRST, END, WIDTH, NUM_OPEN = range(8, 16)
_GUESS = 5  # numbers that a guess takes
_STEPS, _NUM_BINS = 4, 64  # bins of path probabilities, so many to each halving


def bins_of(path_prob: Floats) -> Ints:
    """Return the bin of each path probability; the first one is that of the greatest."""
    steps = -np.log2(np.maximum(path_prob, 1e-9)) * _STEPS
    return np.asarray(np.clip(steps, 0, _NUM_BINS - 1), dtype=np.int64)


def _bin_edges() -> Floats:
    """Return the greatest path probability of each bin but the first, [bins - 1], found by halving."""
    bins = np.arange(1, _NUM_BINS)
    low, high = (np.full(_NUM_BINS - 1, bound).view(np.int64) for bound in (0.0, 1.0))
    while (high - low > 1).any():
        middle = (low + high) // 2
        is_inside = bins_of(middle.view(np.float64)) >= bins
        low, high = np.where(is_inside, middle, low), np.where(is_inside, high, middle)
    return low.view(np.float64)


BIN_EDGES = _bin_edges()


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
        *((name, ctypes.c_void_p) for name in ("draws", "draw_confidence", "num_draws")),
    )


class TreeRules(NamedTuple):
    """The root of a tree, the limits on its growth, and the numbers that rank its guesses.

    Attributes:
        widths: The children of each node by level, or none to grow best first.
        lines: Heights and slopes of a calibration, [ranks * (middles + 1)] each.
        by_rank: [ranks] acceptance probabilities of the calibration.
    """

    root: int
    max_nodes: int
    max_depth: int
    widths: Sequence[int]
    lines: tuple[Floats, Floats]
    by_rank: Floats
    min_path_prob: float
    min_gain: float


class GrowthCall:
    """Trees that grow together, in common arrays, ready for calls that extend them by a level.

    Each tree has a range of the arrays and numbers its nodes from its root, 0.

    Args:
        rules: The rules of each tree.
        middles: [middles] confidences at which the lines of the acceptance probability meet.
        breadth: Most children of a node, best first.

    Attributes:
        starts: Place of each tree's root in the arrays.
        tokens, parents, depths, path_prob, confidence: [nodes].
        sources: [nodes, 3] level, row and rank of the candidate that became the node.
        ancestry: [nodes, most nodes of a tree] whether a column's node is the row's, or an ancestor of it.
    """

    def __init__(self, rules: Sequence[TreeRules], middles: Floats, breadth: int) -> None:
        self._rules, self._middles, self._breadth = rules, middles, breadth
        capacities = [rule.max_nodes + 1 for rule in rules]
        self.starts = list(accumulate(capacities, initial=0))
        count, first = self.starts[-1], self.starts[:-1]
        self.tokens, self.parents, self.depths = np.empty((3, count), dtype=np.int64)
        self.path_prob, self.confidence = np.empty((2, count))
        self.sources = np.empty((count, 3), dtype=np.int64)
        self.ancestry = np.empty((count, max(capacities, default=1)), dtype=np.bool_)
        self.tokens[first] = [rule.root for rule in rules]
        self.parents[first], self.depths[first], self.path_prob[first] = -1, 0, 1.0
        self.ancestry[first] = False
        self.ancestry[first, 0] = True
        # A fixed expansion is offered what it takes.
        self._most_guesses = [rule.max_nodes if rule.widths else (rule.max_nodes + 1) * breadth for rule in rules]
        self._trees = np.zeros((len(rules), 16), dtype=np.int64)
        widths = [rule.widths[0] if rule.widths else min(breadth, rule.max_nodes) for rule in rules]
        numbers = [
            (start, place, rule.max_depth, rule.max_nodes, 1, 1, width)
            for start, place, rule, width in zip(
                first, accumulate(self._most_guesses, initial=0), rules, widths, strict=False
            )
        ]
        columns = [START, OPEN_START, MAX_DEPTH, NUM_LEFT, SIZE, END, WIDTH]
        self._trees[:, columns] = np.array(numbers, dtype=np.int64).reshape(-1, len(columns))  # also without trees
        self._growth: _Growth | None = None
        self._draws: tuple[Ints, Floats, Ints] | None = None  # of candidates drawn with replacement

    @property
    def frontiers(self) -> list[list[int]]:
        """The first node and the end of each tree's frontier, and the most children of a node there."""
        frontiers: list[list[int]] = self._trees[:, FIRST : WIDTH + 1].tolist()
        return frontiers

    def size(self, tree: int) -> int:
        """Return the number of nodes of a tree."""
        return int(self._trees[tree, SIZE])

    def num_levels(self, tree: int) -> int:
        """Return the number of levels of a tree so far."""
        return int(self._trees[tree, LEVELS])

    def draws(self, tree: int) -> tuple[Ints, Floats] | None:
        """Return the draws of a tree: [draws, 4] node, level, row and rank, and [draws] the confidence in each.

        None if each node has one draw, as without replacement.
        """
        if self._draws is None:
            return None
        draws, confidence, counts = self._draws
        start = int(self._trees[tree, OPEN_START])
        return draws[start : start + counts[tree]], confidence[start : start + counts[tree]]

    def extend(self, candidates: Ints, confidence: npt.NDArray[np.float32], *, replaced: bool = False) -> None:
        """Offer guesses below the frontiers, and make nodes of those that are wanted.

        Args:
            candidates, confidence: [nodes of the frontiers, columns].
            replaced: Whether candidates were drawn with replacement, at all levels alike. One that was drawn before is
                no further node.
        """
        candidates, confidence = np.ascontiguousarray(candidates), np.ascontiguousarray(confidence)
        assert candidates.dtype == np.int64
        assert confidence.dtype == np.float32
        assert candidates.shape == confidence.shape
        if self._growth is None:
            self._growth = self._prepared(replaced=replaced)
        growth, loaded = self._growth, library()
        growth.candidates, growth.sure = address(candidates), address(confidence)
        growth.columns = candidates.shape[1]
        loaded.specinfer_grow(ctypes.addressof(growth))

    def _prepared(self, *, replaced: bool) -> _Growth:
        rules, trees, middles = self._rules, self._trees, self._middles
        fixed = [np.array(rule.widths, dtype=np.int64) if rule.widths else None for rule in rules]
        lines = [(None,) * 3 if rule.widths else (*rule.lines, rule.by_rank) for rule in rules]
        for column, pointed in zip(range(FIXED, BY_RANK + 1), (fixed, *zip(*lines, strict=True)), strict=True):
            trees[:, column] = addresses(pointed)
        numbers = trees.view(np.float64)
        numbers[:, MIN_PATH_PROB : MIN_GAIN + 1] = [(rule.min_path_prob, rule.min_gain) for rule in rules]
        count = sum(self._most_guesses)
        guesses = np.empty((count, _GUESS), dtype=np.int64)
        if replaced:
            self._draws = np.empty((count, 4), dtype=np.int64), np.empty(count), np.zeros(len(rules), dtype=np.int64)
        arrays: list[npt.NDArray[Any]] = [
            trees, self.tokens, self.parents, self.depths, self.path_prob, self.confidence, self.sources,
            self.ancestry, guesses, BIN_EDGES, middles,
        ]  # fmt: skip
        assert all(array.flags.c_contiguous for array in arrays)
        self._alive = (arrays, fixed)  # keeps the arrays alive as long as their addresses
        at = [address(array) for array in arrays]
        ranks = next((len(rule.by_rank) for rule in rules if not rule.widths), 1)
        assert all(len(rule.lines[0]) == ranks * (len(middles) + 1) for rule in rules if not rule.widths)
        return _Growth(
            len(rules), *at[:8], self.ancestry.shape[1], *at[8:], len(BIN_EDGES) + 1, len(middles), ranks,
            self._breadth, 0, 0, 0, 0, *addresses(self._draws or (None,) * 3),
        )  # fmt: skip

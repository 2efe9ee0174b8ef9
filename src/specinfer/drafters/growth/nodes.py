"""The nodes of several growing trees, in common arrays: a level takes a few operations for all trees."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from specinfer.core.draws import Floats
from specinfer.core.tree import TreeBudget
from specinfer.ops.cpu.growth import END, FIRST, LEVELS, MAX_DEPTH, NUM_LEFT, SIZE, START, WIDTH, NodeArrays

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class Nodes:
    """The nodes of all trees. Each tree has a range of the arrays and numbers its nodes from its root, 0.

    Args:
        roots: The root token of each tree.
        budgets: The budget of each tree.
        widths: The most children of each root.
    """

    def __init__(self, roots: Sequence[int], budgets: Sequence[TreeBudget], widths: Sequence[int]) -> None:
        capacities = [budget.max_nodes + 1 for budget in budgets]
        self.starts = list(accumulate(capacities, initial=0))
        self.trees = np.zeros((len(roots), 16), dtype=np.int64)  # numbers of each tree, see ops/cpu/growth.py
        numbers = [
            (start, budget.max_depth, budget.max_nodes, 1, 1, width)
            for start, budget, width in zip(self.starts, budgets, widths, strict=False)
        ]
        columns = [START, MAX_DEPTH, NUM_LEFT, SIZE, END, WIDTH]
        self.trees[:, columns] = np.array(numbers, dtype=np.int64).reshape(-1, len(columns))  # also without trees
        count, first = self.starts[-1], self.starts[:-1]
        tokens, parents, depths = np.empty((3, count), dtype=np.int64)
        path_prob, confidence = np.empty((2, count))
        ancestry = np.empty((count, max(capacities, default=1)), dtype=np.bool_)
        tokens[first], parents[first], depths[first], path_prob[first] = roots, -1, 0, 1.0
        ancestry[first] = False
        ancestry[first, 0] = True
        sources = np.empty((count, 3), dtype=np.int64)
        self.arrays = NodeArrays(tokens, parents, depths, path_prob, confidence, sources, ancestry)

    @property
    def sizes(self) -> Ints:
        """Return the number of nodes of each tree, [trees]."""
        return self.trees[:, SIZE]

    @property
    def num_left(self) -> Ints:
        """Return the number of nodes that may still be added to each tree, [trees]."""
        return self.trees[:, NUM_LEFT]

    @property
    def frontiers(self) -> list[list[int]]:
        """Return the first node and the end of each tree's frontier, and the most children of a node there."""
        frontiers: list[list[int]] = self.trees[:, FIRST : WIDTH + 1].tolist()
        return frontiers

    def num_levels(self, tree: int) -> int:
        """Return the number of levels of a tree so far."""
        return int(self.trees[tree, LEVELS])

    def of(self, column: npt.NDArray[Any], tree: int) -> npt.NDArray[Any]:
        """Return a tree's part of a column of `arrays`; it cannot be written."""
        view = column[self.starts[tree] : self.starts[tree + 1]]
        view.flags.writeable = False
        return view

    def path_prob(self, trees: Ints, nodes: Ints) -> Floats:
        """Return the path probabilities of these nodes of these trees."""
        return np.asarray(self.arrays.path_prob[self.trees[trees, START] + nodes])

    def append(self, trees: Ints, nodes: Ints, parents: Ints, tokens: Ints, path_prob: Floats) -> None:
        """Add nodes, numbered in the order in which each tree gets them."""
        starts, arrays = self.trees[trees, START], self.arrays
        at, above = starts + nodes, starts + parents
        arrays.tokens[at], arrays.parents[at], arrays.path_prob[at] = tokens, parents, path_prob
        arrays.depths[at], arrays.ancestry[at] = arrays.depths[above] + 1, arrays.ancestry[above]
        arrays.ancestry[at, nodes] = True
        counts = np.bincount(trees, minlength=len(self.trees))
        self.trees[:, SIZE] += counts
        self.trees[:, NUM_LEFT] -= counts

"""The nodes of several growing trees, in common arrays: a level takes a few operations for all trees."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from specinfer.core.draws import Floats

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class Nodes:
    """The nodes of all trees. Each tree has a range of the arrays and numbers its nodes from its root, 0.

    Only `append` and native code change the arrays; `of` returns views that cannot be written.

    Args:
        roots: The root token of each tree.
        capacities: The largest number of nodes of each tree, with the root.
    """

    def __init__(self, roots: Sequence[int], capacities: Sequence[int]) -> None:
        ends = np.cumsum([0, *capacities])
        self._starts, self._ends = ends[:-1], ends[1:]
        self.sizes = np.ones(len(roots), dtype=np.int64)  # [trees]
        self.num_left = np.asarray(capacities, dtype=np.int64) - 1  # [trees] nodes that may still be added
        self._tokens, self._parents, self._depths = np.zeros((3, ends[-1]), dtype=np.int64)
        self._path_prob = np.ones(ends[-1])
        self._ancestry = np.zeros((ends[-1], max(capacities, default=1)), dtype=np.bool_)
        self._tokens[self._starts], self._parents[self._starts], self._ancestry[self._starts, 0] = roots, -1, True

    def of(self, tree: int) -> tuple[Ints, Ints, Ints, Floats, Bools]:
        """Return the tokens, parents, depths and path probabilities, [capacity] each, and the ancestry of a tree."""
        part = slice(self._starts[tree], self._ends[tree])
        views = self._tokens[part], self._parents[part], self._depths[part], self._path_prob[part], self._ancestry[part]
        for view in views:
            view.flags.writeable = False
        return views

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return all arrays by name, which native code writes to in place of `append`."""
        names = ("starts", "tokens", "parents", "depths", "path_prob", "ancestry")
        return {name: getattr(self, f"_{name}") for name in names} | {"sizes": self.sizes, "num_left": self.num_left}

    def path_prob(self, trees: Ints, nodes: Ints) -> Floats:
        """Return the path probabilities of these nodes of these trees."""
        return np.asarray(self._path_prob[self._starts[trees] + nodes])

    def append(self, trees: Ints, nodes: Ints, parents: Ints, tokens: Ints, path_prob: Floats) -> None:
        """Add nodes, numbered in the order in which each tree gets them."""
        starts = self._starts[trees]
        at, above = starts + nodes, starts + parents
        self._tokens[at], self._parents[at], self._path_prob[at] = tokens, parents, path_prob
        self._depths[at], self._ancestry[at] = self._depths[above] + 1, self._ancestry[above]
        self._ancestry[at, nodes] = True
        counts = np.bincount(trees, minlength=len(self.sizes))
        self.sizes += counts
        self.num_left -= counts

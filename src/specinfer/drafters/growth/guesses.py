"""Drafted tokens ("guesses") of several growing trees in common arrays, with one number for each guess."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from specinfer.core.draws import CHOSEN, Distribution, Draws, Floats
from specinfer.drafters.growth.draft_sampling import Candidates
from specinfer.drafters.growth.nodes import Bools, Ints

COLUMNS = ("tree", "node", "token", "level", "row", "rank", "bin", "child", "confidence", "path_prob")


class Guesses:
    """The guesses that may still be taken ("open") and those already taken, by number in draw order.

    Args:
        drafters: The drafter of each tree.
        capacity: The largest number of guesses.
    """

    def __init__(self, drafters: Sequence[str], capacity: int) -> None:
        self._drafters = drafters
        self._size = 0
        self.tree, self.node, self.token, self.level, self.row, self.rank, self.bin = np.zeros((7, capacity), np.int64)
        self.child = np.zeros(capacity, np.int64)  # the node that the guess became
        self.confidence, self.path_prob = np.zeros((2, capacity))
        self.levels: list[Candidates] = []
        self.open = np.zeros(0, dtype=np.int64)
        self._taken: list[Ints] = []
        self._draws: list[Draws] | None = None

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return all columns by name, which native code writes to in place of `add`."""
        return {name: getattr(self, name) for name in COLUMNS}

    def note_taken(self, taken: Ints) -> None:
        """Note guesses that native code has taken, tree by tree."""
        self._taken.append(taken)

    def add(self, trees: Ints, **columns: Ints | Floats) -> None:
        """Add open guesses of the last level."""
        start, self._size = self._size, self._size + len(trees)
        self.tree[start : self._size], self.level[start : self._size] = trees, len(self.levels) - 1
        for name, values in columns.items():
            getattr(self, name)[start : self._size] = values
        self.open = np.concatenate([self.open, np.arange(start, self._size)])

    def take(self, wanted: Bools) -> Ints:
        """Take these of the open guesses and return their numbers, tree by tree."""
        taken, self.open = self.open[wanted], self.open[~wanted]
        if len(self._drafters) > 1:
            taken = taken[self.tree[taken].argsort(kind="stable")]
        self._taken.append(taken)
        return taken

    def draws(self, tree: int) -> Draws:
        """Return all draws of a tree, in draw order; these guesses are the pool of their distributions."""
        if self._draws is None:
            taken = np.concatenate([self.open[:0], *self._taken])
            taken = taken[self.tree[taken].argsort(kind="stable")]
            ends = self.tree[taken].searchsorted(np.arange(len(self._drafters) + 1)).tolist()
            nodes, makers, confidence = self.child[taken], np.zeros_like(taken), self.confidence[taken]
            numbers = self._numbers(taken)
            pools = () if numbers is None else (self,)
            self._draws = [
                Draws(
                    nodes[a:b], makers[a:b], confidence[a:b], (name,), None if numbers is None else numbers[a:b], pools
                )
                for name, (a, b) in zip(self._drafters, pairwise(ends), strict=True)
            ]
        return self._draws[tree]

    def _numbers(self, taken: Ints) -> Ints | None:
        """Return these numbers, with `CHOSEN` in place of those that were not drawn; None if none was."""
        drawn = np.zeros(len(taken), dtype=np.bool_)
        for number, level in enumerate(self.levels):
            if level.has_distributions:
                of = self.level[taken] == number
                drawn[of] = level.places[self.row[taken[of]], self.rank[taken[of]]] >= 0
        return np.where(drawn, taken, CHOSEN) if drawn.any() else None

    def __getitem__(self, number: int) -> Distribution | None:
        """Return the distribution of a drawn guess."""
        level: Candidates = self.levels[self.level[number]]
        return level.distribution(int(self.row[number]), int(self.rank[number]))

    def sources(self, numbers: Ints) -> Ints:
        """Return what these guesses were drawn from, [numbers, 5], as in `kernels/toss.py`."""
        found = np.empty((len(numbers), 5), dtype=np.int64)
        for number, level in enumerate(self.levels):
            of = (self.level[numbers] == number).nonzero()[0]
            found[of] = level.sources(self.row[numbers[of]], self.rank[numbers[of]])
        return found

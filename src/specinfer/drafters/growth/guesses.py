"""Drafted tokens ("guesses") of several growing trees in common arrays, with one number for each guess."""

from collections.abc import Iterable, Sequence
from itertools import pairwise, repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from specinfer.core.tree import Distribution, Draw
from specinfer.drafters.growth.calibration import Floats
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
        self._draws: list[tuple[Draw, ...]] | None = None

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

    def draws(self, tree: int) -> tuple[Draw, ...]:
        """Return all draws of a tree, in draw order."""
        if self._draws is None:
            taken = np.concatenate([self.open[:0], *self._taken])
            taken = taken[self.tree[taken].argsort(kind="stable")]
            owners = self.tree[taken]
            ends = owners.searchsorted(np.arange(len(self._drafters) + 1)).tolist()
            names = [self._drafters[owner] for owner in owners.tolist()]
            nodes, confidence = self.child[taken].tolist(), self.confidence[taken].tolist()
            every = [*map(Draw, nodes, names, self._distributions(taken), confidence)]
            self._draws = [tuple(every[a:b]) for a, b in pairwise(ends)]
        return self._draws[tree]

    def _distributions(self, taken: Ints) -> Iterable[Distribution | None]:
        if not any(level.has_distributions for level in self.levels):
            return repeat(None, len(taken))
        places = zip(*(column[taken].tolist() for column in (self.level, self.row, self.rank)), strict=True)
        return [self.levels[level].distribution(row, rank) for level, row, rank in places]


def places(owners: Ints) -> Ints:
    """Return each element's index among those of its owner, [n], from 0; the owners must ascend."""
    return np.asarray(np.arange(len(owners)) - owners.searchsorted(owners))

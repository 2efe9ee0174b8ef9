"""Drafted tokens ("guesses") of several growing trees in common arrays, with one number for each guess."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from specinfer.core.draws import CHOSEN, Distribution, Draws, Floats
from specinfer.drafters.growth.draft_sampling import Candidates
from specinfer.drafters.growth.nodes import Bools, Ints


class DrawnFrom:
    """The distributions of guesses, by number.

    Args:
        levels: The candidates of each level.
        level, row, rank: Of each guess, its level, and its place among the candidates there.
    """

    def __init__(self, levels: Sequence[Candidates], level: Ints, row: Ints, rank: Ints) -> None:
        self._levels, self._level, self._row, self._rank = levels, level, row, rank

    def numbers(self, guesses: Ints) -> Ints | None:
        """Return these numbers, with `CHOSEN` in place of those that were not drawn; None if none was."""
        drawn = np.zeros(len(guesses), dtype=np.bool_)
        for number, level in enumerate(self._levels):
            if level.has_distributions:
                of = self._level[guesses] == number
                drawn[of] = level.places[self._row[guesses[of]], self._rank[guesses[of]]] >= 0
        return np.where(drawn, guesses, CHOSEN) if drawn.any() else None

    def __getitem__(self, number: int) -> Distribution | None:
        """Return the distribution of a drawn guess."""
        level: Candidates = self._levels[self._level[number]]
        return level.distribution(int(self._row[number]), int(self._rank[number]))

    def sources(self, numbers: Ints) -> Ints:
        """Return what these guesses were drawn from, [numbers, 5], as in `ops/cpu/toss.py`."""
        found = np.empty((len(numbers), 5), dtype=np.int64)
        for number, level in enumerate(self._levels):
            of = (self._level[numbers] == number).nonzero()[0]
            found[of] = level.sources(self._row[numbers[of]], self._rank[numbers[of]])
        return found


class Guesses:
    """The guesses that may still be taken ("open") and those already taken, by number in draw order.

    Args:
        drafters: The drafter of each tree.
        capacity: The largest number of guesses.
        levels: The candidates of each level, to which the caller adds those of the next one.
    """

    def __init__(self, drafters: Sequence[str], capacity: int, levels: Sequence[Candidates]) -> None:
        self._drafters, self.levels = drafters, levels
        self._size = 0
        self.tree, self.node, self.token, self.level, self.row, self.rank, self.bin = np.zeros((7, capacity), np.int64)
        self.child = np.zeros(capacity, np.int64)  # the node that the guess became
        self.confidence, self.path_prob = np.zeros((2, capacity))
        self.open = np.zeros(0, dtype=np.int64)
        self._taken: list[Ints] = []
        self._draws: list[Draws] | None = None

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
        """Return all draws of a tree, in draw order."""
        if self._draws is None:
            taken = np.concatenate([self.open[:0], *self._taken])
            taken = taken[self.tree[taken].argsort(kind="stable")]
            ends = self.tree[taken].searchsorted(np.arange(len(self._drafters) + 1)).tolist()
            nodes, makers, confidence = self.child[taken], np.zeros_like(taken), self.confidence[taken]
            pool = DrawnFrom(self.levels, self.level, self.row, self.rank)
            numbers = pool.numbers(taken)
            pools = () if numbers is None else (pool,)
            self._draws = [
                Draws(
                    nodes[a:b], makers[a:b], confidence[a:b], (name,), None if numbers is None else numbers[a:b], pools
                )
                for name, (a, b) in zip(self._drafters, pairwise(ends), strict=True)
            ]
        return self._draws[tree]

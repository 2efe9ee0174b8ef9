"""The expected number of nodes below a node of a tree, before any of them is drafted.

Path probabilities are counted in bins, four to each halving. A node's first, second, ... child is a fixed number of
bins below it, by how often drafted tokens of that rank were accepted; the same holds for their children, and so on.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from specinfer.core.draws import Floats
from specinfer.drafters.growth.nodes import Ints

_STEPS = 4  # bins for each halving of the path probability
NUM_BINS = 64  # down to 2^-16


def bins_of(path_prob: Floats) -> Ints:
    steps = -np.log2(np.maximum(path_prob, 1e-9)) * _STEPS
    return np.asarray(np.clip(steps, 0, NUM_BINS - 1), dtype=np.int64)


def _bin_edges() -> Floats:
    """Return the greatest path probability of each bin but the first, [bins - 1], found by halving."""
    bins = np.arange(1, NUM_BINS)
    low, high = (np.full(NUM_BINS - 1, bound).view(np.int64) for bound in (0.0, 1.0))
    while (high - low > 1).any():
        middle = (low + high) // 2
        is_inside = bins_of(middle.view(np.float64)) >= bins
        low, high = np.where(is_inside, middle, low), np.where(is_inside, high, middle)
    return low.view(np.float64)


BIN_EDGES = _bin_edges()


def count_bins(owners: Ints, bins: Ints, num_trees: int) -> Ints:
    """Return the number of guesses of each tree in each bin, [trees, bins]."""
    counts = np.bincount(owners * NUM_BINS + bins, minlength=num_trees * NUM_BINS)
    return np.asarray(counts.reshape(-1, NUM_BINS))


class SubtreeSize:
    """The expected number of nodes below a node, by their path probability.

    Args:
        steps: The number of bins between a node and its first, second, ... child.
    """

    def __init__(self, steps: Sequence[int]) -> None:
        node = np.zeros(NUM_BINS)
        node[0] = 1.0
        self._levels = [node]  # [bins] nodes of each probability, itself included, with 0, 1, ... levels below
        self._steps = [step for step in steps if step < NUM_BINS - 1]
        self._tables: dict[int, Floats] = {}
        self._reach: dict[int, Floats] = {}

    def table(self, num_levels: int) -> Floats:
        """Return the expected number of nodes at or above a floor, [bins of a guess, bins of the floor].

        Args:
            num_levels: The number of levels still to come below the guess.
        """
        if num_levels not in self._tables:
            at_least = np.concatenate([np.zeros(NUM_BINS - 1), self.reach(num_levels)])
            below = np.arange(NUM_BINS)[None, :] - np.arange(NUM_BINS)[:, None]
            self._tables[num_levels] = at_least[below + NUM_BINS - 1]
        return self._tables[num_levels]

    def reach(self, num_levels: int) -> Floats:
        """Return the expected number of nodes down to this many bins below the guess, [bins]."""
        if num_levels not in self._reach:
            while len(self._levels) <= num_levels:
                grown = self._levels[0].copy()
                for step in self._steps:
                    grown[step:] += self._levels[-1][: NUM_BINS - step]
                self._levels.append(grown)
            self._reach[num_levels] = self._levels[num_levels].cumsum()
        return self._reach[num_levels]


def floors(counts: Ints, table: Floats, num_left: Ints) -> Ints:
    """Return the last bin of each tree up to which everything present and expected fits, [trees].

    At least the best guesses present are let in.

    Args:
        counts: [trees, bins] guesses that are present.
        table: [bins, bins] as in `SubtreeSize.table`.
        num_left: [trees] nodes that may still be added.
    """
    fits = (counts @ table <= num_left[:, None]).sum(axis=1) - 1
    return np.asarray(np.maximum(fits, (counts > 0).argmax(axis=1)))


@lru_cache(maxsize=32)  # each has up to 400 kB of tables; probabilities drift slowly
def _subtree_size(steps: tuple[int, ...]) -> SubtreeSize:
    return SubtreeSize(steps)


def subtree_size_of(by_rank: Floats) -> SubtreeSize:
    """Return the expected subtree sizes for these acceptance probabilities by rank."""
    return _subtree_size(tuple(bins_of(by_rank).tolist()))

"""Expected yield of trees: how often draft tokens of each rank are right, and the trees to choose from."""

from collections.abc import Sequence

import numpy as np

from specinfer.core.tree import TokenTree
from specinfer.policy.costs import Floats, StepCosts
from specinfer.verify import Acceptance


class RankAcceptance:
    """Probability that the first, second, ... draft token at a node is the target's token."""

    # Prior: a drafter of medium quality, counted as a few observations.
    _PRIOR = (0.6, 0.12, 0.06, 0.04)
    _PRIOR_WEIGHT = 8.0
    _DECAY = 0.995  # per tree: about two hundred trees are remembered

    def __init__(self) -> None:
        self._tried = [self._PRIOR_WEIGHT] * len(self._PRIOR)
        self._hit = [self._PRIOR_WEIGHT * p for p in self._PRIOR]

    @classmethod
    def assumed(cls, by_rank: Sequence[float]) -> "RankAcceptance":
        """Make an instance with these probabilities, as if they had been observed."""
        known = cls()
        known._tried, known._hit = [1.0] * len(by_rank), list(by_rank)
        return known

    def observe(self, tree: TokenTree, acceptance: Acceptance) -> None:
        """Count the ranks at each node of the accepted path that has draft tokens."""
        for node, kept in zip((0, *acceptance.path), (*acceptance.path, None), strict=True):
            ranked = list(tree.children[node].values())[: len(self._tried)]
            for rank, child in enumerate(ranked):
                self._tried[rank] = self._tried[rank] * self._DECAY + 1
                self._hit[rank] = self._hit[rank] * self._DECAY + (child == kept)

    def by_rank(self) -> Floats:
        """Return the probability of each rank, [ranks]; together at most 1."""
        chance = np.asarray(self._hit) / np.asarray(self._tried)
        return np.asarray(chance * min(1.0, 0.98 / chance.sum()))


class Outcomes:
    """Best-first trees to choose from, and the tokens they are expected to yield.

    Args:
        sizes, depths: Numbers of nodes and depths of the trees; ascending.
    """

    SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 13, 16, 20, 24, 32, 48, 64)
    DEPTHS = tuple(range(1, 13))
    # For slow passes whose time hardly grows with their rows: there large trees are nearly free.
    WIDE_SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 224, 256)
    WIDE_DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
    _SLOW = 0.05  # seconds of a pass that make the evaluation of a large menu negligible
    _FLAT_ROWS, _FLAT = 128, 2.0  # this many rows must cost less than this many passes over one row

    def __init__(self, sizes: Sequence[int] = SIZES, depths: Sequence[int] = DEPTHS) -> None:
        self.max_nodes, self.max_depth = sizes[-1], depths[-1]
        pairs = [(0, 0)] + [(n, d) for n in sizes for d in depths if d <= n]
        self.num_nodes, self.num_levels = np.asarray(pairs).T

    @classmethod
    def fitting(cls, costs: StepCosts) -> "Outcomes":
        """Return the trees that may be worthwhile at these costs."""
        one, many = costs.target([1, cls._FLAT_ROWS]).tolist()
        is_wide = one >= cls._SLOW and many < cls._FLAT * one
        return cls(cls.WIDE_SIZES, cls.WIDE_DEPTHS) if is_wide else cls()

    @property
    def is_wide(self) -> bool:
        return self.max_nodes > self.SIZES[-1]

    def expected_tokens(self, by_rank: Floats) -> Floats:
        """Return the tokens that a pass yields on average with each tree, [trees], the target's own included."""
        level, levels = np.ones(1), np.empty(0)
        yields = np.zeros((self.max_depth + 1, self.max_nodes + 1))
        for depth in range(1, self.max_depth + 1):
            level = np.sort(np.outer(level, by_rank).ravel())[::-1][: self.max_nodes]
            levels = np.sort(np.concatenate([levels, level]))[::-1][: self.max_nodes]
            yields[depth, 1 : len(levels) + 1] = levels.cumsum()
            yields[depth, len(levels) + 1 :] = levels.sum()
        return np.asarray(1.0 + yields[self.num_levels, self.num_nodes])

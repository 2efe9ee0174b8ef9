"""Number of worthwhile levels of a draft loop. A device computes all levels of a shape, so it is chosen before."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from specinfer.core.tree import TreeBudget
from specinfer.engine.device.sizes import LEVELS

_MEMORY = 0.9  # decay per step: about ten steps are remembered
_LONG_MEMORY = 0.99  # the same for levels that are not computed, which could stay left out for ever


class LevelProbs:
    """Recent yield of each level: the summed acceptance probabilities of its nodes that may have children.

    An ordinary draft loop knows this value for each level before it goes on to the next (`expansion`), and stops where
    one more level would yield less than the policy's `min_gain`.
    """

    def __init__(self) -> None:
        self._path_prob = np.zeros(LEVELS[-1])  # [levels] mean of a request
        self._num_known = 0

    def observe(self, path_prob: npt.NDArray[np.float32]) -> None:
        """Learn from a step; `path_prob` [requests, levels] of the requests that were drafted for."""
        levels = path_prob.shape[1]
        if not len(path_prob):
            return
        new = min(self._num_known, levels)
        mean = path_prob.mean(axis=0)
        self._path_prob[:new] = _MEMORY * self._path_prob[:new] + (1 - _MEMORY) * mean[:new]
        self._path_prob[new:levels] = mean[new:]
        for level in range(levels, self._num_known):
            expected = self._extrapolated(level, levels - 1)
            self._path_prob[level] = _LONG_MEMORY * self._path_prob[level] + (1 - _LONG_MEMORY) * expected
        self._num_known = max(self._num_known, levels)

    def cut(self, budgets: Sequence[TreeBudget], chance: float) -> list[TreeBudget]:
        """Return the budgets without levels that are not worthwhile.

        Fixed expansions are not changed, and nothing is while there are no observations.

        Args:
            budgets: The policy's budgets.
            chance: Probability that the best draft token at a node is right.
        """
        wanted = [budget for budget in budgets if budget.min_gain > 0]
        if not wanted or not self._num_known:
            return list(budgets)
        min_gain = min(budget.min_gain for budget in wanted)
        depth = 1
        while depth < LEVELS[-1] and len(wanted) * chance * self._expected(depth) >= min_gain:
            depth += 1
        return [
            replace(budget, max_depth=min(budget.max_depth, depth)) if budget.min_gain > 0 else budget
            for budget in budgets
        ]

    def _expected(self, level: int) -> float:
        """Return the yield of a level; one that was never computed is extrapolated."""
        last = self._num_known - 1
        return float(self._path_prob[level]) if level <= last else self._extrapolated(level, last)

    def _extrapolated(self, level: int, last: int) -> float:
        """Return the yield of a level as it follows from the two up to `last`."""
        before = self._path_prob[last - 1] if last else 0.0
        falls = float(self._path_prob[last] / before) if before > 0 else 1.0
        return float(self._path_prob[last]) * min(falls, 1.0) ** (level - last)

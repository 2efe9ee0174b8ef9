"""Shares of a node budget for drafters whose tokens are drawn, and so may not compete for it afterwards.

Only the results of earlier steps count: a share must not depend on what is drawn with it.
"""

from collections.abc import Sequence

import numpy as np

from specinfer.core.lookups import drafter_of
from specinfer.core.tree import TokenTree
from specinfer.verify import Acceptance


class BudgetSplit:
    """The number of accepted tokens of each drafter, and the shares of a budget that follow from it."""

    _MEMORY = 0.98  # factor per tree: about fifty trees are remembered
    _LEAST_KEPT = 1e-6  # its square is a number still, however long nothing is accepted
    _LEAST = 0.1  # part of an equal share: without any nodes, a drafter could never show that it has become useful

    def __init__(self, names: Sequence[str]) -> None:
        self._kept = dict.fromkeys(names, 1.0)
        self._parts: dict[tuple[int, ...], float] = {}  # of the first of these drafters, until the next tree

    def observe(self, tree: TokenTree, acceptance: Acceptance) -> None:
        self._parts.clear()
        makers: dict[int, set[str]] = {}
        if acceptance.path:
            draws, is_kept = tree.arrays.draws, np.zeros(len(tree), dtype=np.bool_)
            is_kept[list(acceptance.path)] = True
            of = is_kept[draws.nodes]
            for node, maker in zip(draws.nodes[of].tolist(), draws.makers[of].tolist(), strict=True):
                makers.setdefault(node, set()).add(drafter_of(draws.names[maker]))
        for name in self._kept:
            self._kept[name] = max(self._kept[name] * self._MEMORY, self._LEAST_KEPT)
        for names in makers.values():
            for name in names & self._kept.keys():
                self._kept[name] += 1.0 / len(names)

    def share(self, max_nodes: int, drafters: Sequence[int]) -> int:
        """Return the number of nodes for the first of these drafters; the others are served after it."""
        asked = tuple(drafters)
        if asked not in self._parts:
            kept = np.asarray(list(self._kept.values()))[list(asked)]
            # Squared: nodes given to the better drafter yield more, as long as it has tokens left to propose.
            weights = np.maximum(kept**2 / (kept**2).sum(), self._LEAST / len(asked))
            self._parts[asked] = float(weights[0] / weights.sum())
        return round(max_nodes * self._parts[asked])

"""Merging and pruning of trees: of tokens that were chosen, not drawn, the most promising of all drafters are kept.

One native call does both for all requests.
"""

from collections.abc import Sequence
from typing import NamedTuple

from specinfer.core.draws import Floats, Ints
from specinfer.core.request import Request
from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.drafters.growth.calibration import MIDDLE, RANKS, Calibration, Observed, source
from specinfer.ops.cpu.merge import MergeRules, merge_trees
from specinfer.ops.cpu.tried import Verified
from specinfer.verify import Acceptance

_ALL = "all"  # the source of guesses when all drafters are taken together


class Kept(NamedTuple):
    """Ranks of a pruned tree's nodes among all siblings, and the probability that one of their drafters is right."""

    ranks: Ints
    alone: Floats


class Pruning:
    """The choice of nodes in merged trees, by calibrated probabilities.

    A node's probability by itself combines its drafters' calibrated probabilities, as if they were independent. But
    only one of several siblings can be accepted, and drafters often err together. So the acceptance probability at such
    a value and rank among the siblings is learned in turn.

    Attributes:
        rivals: The acceptance probability by that value and rank.
        pruned: For each request, what its pruned tree was ranked by, until it is verified.
    """

    def __init__(self, calibration: Calibration) -> None:
        self._calibration = calibration
        self.rivals = Calibration(trust=1.0)
        self.pruned: dict[str, Kept] = {}

    def merge(
        self,
        requests: Sequence[Request],
        groups: Sequence[Sequence[TokenTree]],
        budgets: Sequence[TreeBudget],
        is_pruned: Sequence[bool],
    ) -> list[TokenTree]:
        """Return the union of each request's trees, of which there is one at least; some are pruned to their budgets.

        Those that are pruned must not contain drawn nodes, which may not be dropped.
        """
        numbers: dict[str, int] = {}
        sources = [
            {name: numbers.setdefault(source(name, request), len(numbers)) for name in _names(trees)}
            for request, trees in zip(requests, groups, strict=True)
        ]
        rules = MergeRules(
            [budget.max_nodes + 1 if pruned else 0 for budget, pruned in zip(budgets, is_pruned, strict=True)],
            [budget.min_path_prob for budget in budgets],
            sources,
            [self._calibration.lines(name) for name in numbers],
            [self.rivals.lines(source(_ALL, request)) for request in requests],
            MIDDLE,
            RANKS,
        )
        merged = merge_trees(groups, rules)
        for request, pruned, (_, ranks, alone) in zip(requests, is_pruned, merged, strict=True):
            if pruned:
                self.pruned[request.request_id] = Kept(ranks, alone)
        return [tree for tree, _, _ in merged]

    def observe(self, request: Request, tree: TokenTree, acceptance: Acceptance) -> None:
        """Count the nodes of a pruned tree that the target reached, when trees are pruned next."""
        kept = self.pruned.pop(request.request_id, None)
        if kept is None or len(kept.ranks) != len(tree):
            return
        one = Verified(tree.arrays.parents, acceptance.path, (), kept.alone, ranks=kept.ranks)
        self.rivals.observe_tokens(Observed([source(_ALL, request)], one))

    def forget(self, request_id: str) -> None:
        self.pruned.pop(request_id, None)


def _names(trees: Sequence[TokenTree]) -> dict[str, None]:
    return dict.fromkeys(name for tree in trees for name in tree.arrays.draws.names)

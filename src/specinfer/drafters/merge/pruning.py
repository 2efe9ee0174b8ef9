"""Merging and pruning of trees: of tokens that were chosen, not drawn, the most promising of all drafters are kept.

One native call does both for all requests.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

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


class Offer(NamedTuple):
    """A tree of lookups whose nodes were not all taken, and the number of known tokens when it was offered."""

    tree: TokenTree
    num_known: int


class Pruning:
    """The choice of nodes in merged trees, by calibrated probabilities.

    A node's probability by itself combines its drafters' calibrated probabilities, as if they were independent. But
    only one of several siblings can be accepted, and drafters often err together. So the acceptance probability at such
    a value and rank among the siblings is learned in turn.

    Attributes:
        rivals: The acceptance probability by that value and rank.
        pruned: For each request, what its pruned tree was ranked by, until it is verified.
        offers: For each request, its tree before nodes were bought, until the next tokens are known.
    """

    def __init__(self, calibration: Calibration) -> None:
        self._calibration = calibration
        self.rivals = Calibration(trust=1.0)
        self.pruned: dict[str, Kept] = {}
        self.offers: dict[str, Offer] = {}

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

    def buy(
        self, requests: Sequence[Request], trees: Sequence[TokenTree], budgets: Sequence[TreeBudget]
    ) -> list[TokenTree]:
        """Return the trees with the likeliest nodes of all pruned ones: those that yield most beyond the price of rows.

        A first row may cost most of a pass, and the next ones little, so that few nodes lose, but many gain.
        """
        asked = [
            i
            for i, (request, budget) in enumerate(zip(requests, budgets, strict=True))
            if budget.row_prices and request.request_id in self.pruned
        ]
        if not asked:
            return list(trees)
        path_probs = [self._path_probs(requests[i], trees[i]) for i in asked]
        together = np.concatenate(path_probs)
        prices = max((budgets[i].row_prices for i in asked), key=len)
        order = np.argsort(-together, kind="stable")[: len(prices)]  # parents before their children
        gains = np.cumsum(together[order]) - prices[: len(order)]
        taken = np.zeros(len(together), dtype=np.bool_)
        if gains.max(initial=0.0) > 0.0:
            taken[order[: int(gains.argmax()) + 1]] = True
        bought = list(trees)
        for i, of_tree in zip(asked, np.split(taken, np.cumsum([*map(len, path_probs)])[:-1]), strict=True):
            self.offers[requests[i].request_id] = Offer(trees[i], len(requests[i].token_ids))
            bought[i] = trees[i].keep([0, *(1 + np.flatnonzero(of_tree)).tolist()])
        return bought

    def _path_probs(self, request: Request, tree: TokenTree) -> Floats:
        """Return the probability that each node of a pruned tree is accepted, [nodes without the root]."""
        kept = self.pruned[request.request_id]
        path_probs = self.rivals.acceptance_prob(source(_ALL, request), kept.ranks, kept.alone)
        path_probs[0] = 1.0
        for node, parent in enumerate(tree.parents[1:], start=1):
            path_probs[node] *= path_probs[parent]
        return path_probs[1:]

    def offered(self, request: Request, tree: TokenTree, acceptance: Acceptance) -> tuple[TokenTree, Acceptance]:
        """Return what was offered to a request, bought or not, as far as the new tokens show what of it was right."""
        offer = self.offers.pop(request.request_id, None)
        if offer is None or len(request.token_ids) != offer.num_known + len(acceptance.path) + 1:
            return tree, acceptance
        emitted, ranked = request.token_ids[offer.num_known :], self.pruned[request.request_id]
        kept = [node for node, depth in enumerate(offer.tree.depths) if depth <= len(emitted)]
        self.pruned[request.request_id] = Kept(ranked.ranks[kept], ranked.alone[kept])
        shown, path, node = offer.tree.keep(kept), list[int](), 0
        for token in emitted:
            if (child := shown.children[node].get(token)) is None:
                break
            path.append(node := child)
        return shown, Acceptance(tuple(path), acceptance.next_token)

    def observe(self, request: Request, tree: TokenTree, acceptance: Acceptance) -> None:
        """Count the nodes of a pruned tree that the target reached, when trees are pruned next."""
        kept = self.pruned.pop(request.request_id, None)
        if kept is None or len(kept.ranks) != len(tree):
            return
        one = Verified(tree.arrays.parents, acceptance.path, (), kept.alone, ranks=kept.ranks)
        self.rivals.observe_tokens(Observed([source(_ALL, request)], one))

    def forget(self, request_id: str) -> None:
        self.pruned.pop(request_id, None)
        self.offers.pop(request_id, None)


def _names(trees: Sequence[TokenTree]) -> dict[str, None]:
    return dict.fromkeys(name for tree in trees for name in tree.arrays.draws.names)

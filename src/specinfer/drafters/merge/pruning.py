"""Merging and pruning of trees: of tokens that were chosen, not drawn, the most promising of all drafters are kept.

One native call does both for all requests. Without native code trees are merged one by one, and their nodes are
ranked in common arrays.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specinfer.core.draws import Floats, Ints
from specinfer.core.request import Request
from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.drafters.growth.calibration import MIDDLE, RANKS, Calibration, Observed, places, places_by_key, source
from specinfer.ops.cpu.library import library
from specinfer.ops.cpu.merge import MergeRules, merge_trees
from specinfer.ops.cpu.tried import Verified
from specinfer.verify import Acceptance

_ALL = "all"  # the source of guesses when all drafters are taken together


class _Kept(NamedTuple):
    """Ranks of a pruned tree's nodes among all siblings, and the probability that one of their drafters is right."""

    ranks: Ints
    alone: Floats


class Pruning:
    """The choice of nodes in merged trees, by calibrated probabilities.

    A node's probability by itself combines its drafters' calibrated probabilities, as if they were independent. But
    only one of several siblings can be accepted, and drafters often err together. So the acceptance probability at such
    a value and rank among the siblings is learned in turn.
    """

    def __init__(self, calibration: Calibration) -> None:
        self._calibration = calibration
        self._rivals = Calibration(trust=1.0)
        self._seen: dict[str, _Kept] = {}

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
        if library() is not None:
            return self._merge_natively(requests, groups, budgets, is_pruned)
        merged = [TokenTree.merge(trees) for trees in groups]
        pruned = [k for k, one in enumerate(is_pruned) if one]
        if pruned:
            some = [requests[k] for k in pruned], [merged[k] for k in pruned], [budgets[k] for k in pruned]
            best = self.keep_best(*some)
            for k, tree in zip(pruned, best, strict=True):
                merged[k] = tree
        return merged

    def _merge_natively(
        self,
        requests: Sequence[Request],
        groups: Sequence[Sequence[TokenTree]],
        budgets: Sequence[TreeBudget],
        is_pruned: Sequence[bool],
    ) -> list[TokenTree]:
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
            [self._rivals.lines(source(_ALL, request)) for request in requests],
            MIDDLE,
            RANKS,
        )
        merged = merge_trees(groups, rules)
        for request, pruned, (_, ranks, alone) in zip(requests, is_pruned, merged, strict=True):
            if pruned:
                self._seen[request.request_id] = _Kept(ranks, alone)
        return [tree for tree, _, _ in merged]

    def keep_best(
        self, requests: Sequence[Request], trees: Sequence[TokenTree], budgets: Sequence[TreeBudget]
    ) -> list[TokenTree]:
        """Return the trees within their budgets; they must not contain drawn nodes, which may not be dropped."""
        sizes = np.asarray([len(tree) for tree in trees])
        ends: Ints = sizes.cumsum()
        starts: Ints = ends - sizes
        owners = np.repeat(np.arange(len(trees)), sizes)
        parents = np.concatenate([tree.parents for tree in trees]) + starts[owners]
        parents[starts] = -1
        alone = self._alone(requests, trees, starts, parents)
        order = np.lexsort((-alone, parents))
        ranks = np.empty_like(order)
        ranks[order] = places(parents[order])
        path_prob = self._path_prob(requests, owners, parents, ranks, alone)
        # No node is likelier than its parent, and on a tie the parent comes first: what is kept is a tree.
        order = np.lexsort((-path_prob, owners))
        capacity = np.asarray([budget.max_nodes + 1 for budget in budgets])
        least = np.asarray([budget.min_path_prob for budget in budgets])
        kept = np.empty(len(owners), dtype=np.bool_)
        kept[order] = places(owners) < capacity[owners]
        kept &= path_prob >= least[owners]
        kept[starts] = True
        best = []
        for request, tree, start, end in zip(requests, trees, starts.tolist(), ends.tolist(), strict=True):
            nodes = kept[start:end].nonzero()[0]
            self._seen[request.request_id] = _Kept(ranks[start + nodes], alone[start + nodes])
            best.append(tree.keep(nodes.tolist()))
        return best

    def _alone(self, requests: Sequence[Request], trees: Sequence[TokenTree], starts: Ints, parents: Ints) -> Floats:
        """Return the probability that one of the drafters of a node is right about it, [nodes]."""
        codes: dict[str, int] = {}  # number of each source
        nodes, makers, confidence = list[int](), list[int](), list[float]()
        for request, tree, start in zip(requests, trees, starts.tolist(), strict=True):
            code = {name: codes.setdefault(source(name, request), len(codes)) for name in {d[1] for d in tree.draws}}
            nodes += [start + draw[0] for draw in tree.draws]
            makers += [code[draw[1]] for draw in tree.draws]
            confidence += [draw[3] for draw in tree.draws]
        node, maker, sure = (
            np.asarray(nodes, dtype=np.int64),
            np.asarray(makers, dtype=np.int64),
            np.asarray(confidence),
        )
        # The rank of each token among those of its drafter at the same parent.
        ranks = places_by_key(parents[node] * len(codes) + maker)
        missed = np.ones(len(parents))
        for name, number in codes.items():
            of = maker == number
            np.multiply.at(missed, node[of], 1.0 - self._calibration.acceptance_prob(name, ranks[of], sure[of]))
        return 1.0 - missed

    def _path_prob(
        self, requests: Sequence[Request], owners: Ints, parents: Ints, ranks: Ints, alone: Floats
    ) -> Floats:
        """Return the probability that the whole path to a node is accepted, [nodes]."""
        probs = np.ones(len(owners))
        names = [source(_ALL, request) for request in requests]
        for name in set(names):
            of = np.asarray([other == name for other in names])[owners]
            probs[of] = self._rivals.acceptance_prob(name, ranks[of], alone[of])
        path_prob = probs.tolist()
        for node, parent in enumerate(parents.tolist()):
            path_prob[node] = 1.0 if parent < 0 else path_prob[node] * path_prob[parent]
        return np.asarray(path_prob)

    def observe(self, request: Request, tree: TokenTree, acceptance: Acceptance) -> None:
        """Count the nodes of a pruned tree that the target reached, when trees are pruned next."""
        kept = self._seen.pop(request.request_id, None)
        if kept is None or len(kept.ranks) != len(tree):
            return
        one = Verified(tree.arrays.parents, acceptance.path, (), kept.alone, ranks=kept.ranks)
        self._rivals.observe_tokens(Observed([source(_ALL, request)], one))

    def forget(self, request_id: str) -> None:
        self._seen.pop(request_id, None)


def _names(trees: Sequence[TokenTree]) -> dict[str, None]:
    return dict.fromkeys(name for tree in trees for name in tree.arrays.draws.names)

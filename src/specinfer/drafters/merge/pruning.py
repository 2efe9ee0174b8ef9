"""Pruning of merged trees whose tokens were chosen, not drawn: it keeps the most promising ones, of whichever drafter.

The nodes of all requests are ranked in common arrays, like the trees that a small model grows.
"""

from collections.abc import Sequence

import numpy as np

from specinfer.core.request import Request
from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.drafters.growth.calibration import Calibration, Floats, source
from specinfer.drafters.growth.guesses import places
from specinfer.drafters.growth.nodes import Ints
from specinfer.verify import Acceptance

_ALL = "all"  # the source of guesses when all drafters are taken together


class Pruning:
    """The choice of nodes in merged trees, by calibrated probabilities.

    A node's probability by itself combines its drafters' calibrated probabilities, as if they were independent. But
    only one of several siblings can be accepted, and drafters often err together. So the acceptance probability at such
    a value and rank among the siblings is learned in turn.
    """

    def __init__(self, calibration: Calibration) -> None:
        self._calibration = calibration
        self._rivals = Calibration(trust=1.0)
        self._seen: dict[str, list[tuple[int, float]]] = {}  # per kept node: rank among siblings, `alone`

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
            self._seen[request.request_id] = list(
                zip(ranks[start + nodes].tolist(), alone[start + nodes].tolist(), strict=True)
            )
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
        keys = parents[node] * len(codes) + maker
        order = keys.argsort(kind="stable")
        ranks = np.empty_like(order)
        ranks[order] = places(keys[order])
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
        seen = self._seen.pop(request.request_id, None)
        if seen is None or len(seen) != len(tree):
            return
        name = source(_ALL, request)
        for node, kept in zip((0, *acceptance.path), (*acceptance.path, None), strict=True):
            for child in tree.children[node].values():
                self._rivals.count(name, *seen[child], kept=child == kept)

    def forget(self, request_id: str) -> None:
        self._seen.pop(request_id, None)

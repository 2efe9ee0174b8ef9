"""Merging and pruning of trees, written plainly: what `merge_trees` does natively, one request after the other."""

from collections.abc import Sequence
from typing import NamedTuple

from specinfer.core.request import Request
from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.drafters.growth.calibration import Calibration, source


class Weighed(NamedTuple):
    """Of each node the probability that one of its drafters is right, its rank among siblings, and that of its path."""

    alone: list[float]
    ranks: list[int]
    path_prob: list[float]


def weigh(request: Request, tree: TokenTree, calibration: Calibration, rivals: Calibration) -> Weighed:
    missed, seen = [1.0] * len(tree), dict[tuple[int, str], int]()
    for draw in tree.draws:
        key = tree.parents[draw.node], draw.drafter
        seen[key] = rank = seen.get(key, -1) + 1
        missed[draw.node] *= 1.0 - float(
            calibration.acceptance_prob(source(draw.drafter, request), [rank], [draw.confidence])[0]
        )
    alone = [1.0 - one for one in missed]
    ranks, path_prob = [0] * len(tree), [1.0] * len(tree)
    for node, parent in enumerate(tree.parents[1:], start=1):
        siblings = sorted(tree.children[parent].values(), key=lambda other: (-alone[other], other))
        ranks[node] = siblings.index(node)
        chance = float(rivals.acceptance_prob(source("all", request), [ranks[node]], [alone[node]])[0])
        path_prob[node] = chance * path_prob[parent]
    return Weighed(alone, ranks, path_prob)


def kept_nodes(path_prob: Sequence[float], budget: TreeBudget) -> list[int]:
    """The nodes of highest path probability within a budget, the root among them."""
    best = sorted(range(1, len(path_prob)), key=lambda node: (-path_prob[node], node))[: budget.max_nodes]
    return [0, *sorted(node for node in best if path_prob[node] >= budget.min_path_prob)]

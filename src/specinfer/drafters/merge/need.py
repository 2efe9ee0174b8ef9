"""The need for a model: its levels take passes, and are worth them only if they add to what lookups found.

Example: lookups found a chain whose first two tokens are accepted with probability 0.9 and 0.8. Those of the model are
accepted with 0.7 at the first level, and so with 0.49 at the second. If both err independently, the model adds
0.7 * 0.1 tokens at the first level, and 0.49 * 0.2 at the second. If a level has to yield 0.3 tokens, the model is not
asked.
"""

from collections.abc import Sequence

import numpy as np

from specinfer.core.draws import Floats
from specinfer.core.request import Request
from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.drafters.growth.calibration import Calibration, source


def is_worth_asking(
    calibration: Calibration,
    models: Sequence[str],
    requests: Sequence[Request],
    found: Sequence[Sequence[TokenTree]],
    limits: Sequence[TreeBudget],
) -> bool:
    """Return whether some levels of the models are worth their time for these requests together.

    Args:
        models: Names of the models.
        found: Trees of the lookups, for each request.
        limits: Limits of the trees of models; a level has to yield `min_gain` tokens.
    """
    most = max(limit.max_depth for limit in limits)
    added = np.zeros(most)  # tokens that each level of the models adds
    for request, trees, limit in zip(requests, found, limits, strict=True):
        first = max(float(calibration.by_rank(source(name, request))[0]) for name in models)
        missed = 1.0 - np.max([_reach(calibration, request, tree, most) for tree in trees], axis=0, initial=0.0)
        levels = np.arange(1, most + 1)
        added += np.where(levels <= limit.max_depth, first**levels * missed, 0.0)
    price = min(limit.min_gain for limit in limits)
    return bool((np.cumsum(added - price) > 0.0).any())


def _reach(calibration: Calibration, request: Request, tree: TokenTree, num_levels: int) -> Floats:
    """Return the probability that a tree's tokens are accepted down to each level, [levels]."""
    path_probs, num_children = [1.0] + [0.0] * tree.num_guessed, [0] * len(tree)
    reach = np.zeros(num_levels + 1)
    for draw in tree.draws:
        parent = tree.parents[draw.node]
        rank = num_children[parent]
        num_children[parent] += 1
        prob = float(calibration.acceptance_prob(source(draw.drafter, request), rank, draw.confidence))
        path_probs[draw.node] = path_probs[parent] * prob
        depth = tree.depths[draw.node]
        if depth <= num_levels:
            reach[depth] += path_probs[draw.node]
    return np.minimum(reach[1:], 1.0)

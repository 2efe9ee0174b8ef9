"""Multi-step speculative sampling: SpecInfer (arXiv 2305.09781, Algorithm 2 and section 4.3).

Draws without replacement: Sequoia (arXiv 2402.12374).
"""

from collections.abc import Callable

from specinfer.core.tree import TokenTree
from specinfer.verify.acceptance import Acceptance, Probs, RandomSource, before_last, less, weight_of, weights_of


def verify_multi_step(tree: TokenTree, probs_at: Callable[[int], Probs | None], source: RandomSource) -> Acceptance:
    """Try the draws of a node in draw order; each rejected draw subtracts its distribution from the remaining one.

    A duplicate is tried like any other draw. A chosen token counts as drawn with probability 1.

    Args:
        tree: The tree.
        probs_at: Function from a node to the target's distribution after it, or None if no token may follow.
        source: Source of the random decisions.
    """
    node, path = 0, list[int]()
    while True:
        left = probs_at(node)
        if left is None:
            return before_last(tree, path)
        for draw in tree.candidates[node]:
            weights, token = weights_of(draw), tree.tokens[draw.node]
            accepted = source.accepts(left[token], weight_of(draw, weights, token))
            if not accepted:
                rest = less(left, draw, weights, token)
                total = rest.sum()
                accepted = not total > 0  # acceptance was certain up to rounding
            if accepted:
                path.append(draw.node)
                node = draw.node
                break
            left = rest / total
        else:
            return Acceptance(tuple(path), source.sample(left))

"""Traversal verification, from leaf to root (arXiv 2505.12398); on a chain, block verification (arXiv 2403.10444)."""

from collections.abc import Callable

from specinfer.core.tree import TokenTree
from specinfer.verify.acceptance import Acceptance, Probs, RandomSource, before_last, less, weight_of, weights_of


def verify_traversal(tree: TokenTree, probs_at: Callable[[int], Probs | None], source: RandomSource) -> Acceptance:
    """Go to the first leaf and back towards the root; accept the path to the first node that passes.

    Each node on the way is entered with the probability that it ends up accepted, `weight`. A node whose
    draws are all rejected passes with what is left of its weight. A rejected subtree subtracts the draw's
    distribution from its parent, whatever the subtree looked like.

    Args:
        tree: The tree.
        probs_at: Function from a node to the target's distribution after it, or None if no token may follow.
        source: Source of the random decisions.
    """
    # For each node from the root to the current one. A leaf's distribution is read only if its path is accepted.
    path, distributions, weights, tried = [0], [probs_at(0)], [1], [0]
    while True:
        node, distribution = path[-1], distributions[-1]
        if distribution is not None and tried[-1] < len(tree.candidates[node]):
            draw = tree.candidates[node][tried[-1]]
            token = tree.tokens[draw.node]
            enter = weights[-1] * distribution[token] / weight_of(draw, weights_of(draw), token)
            if enter > 0:
                path.append(draw.node)
                distributions.append(probs_at(draw.node) if tree.candidates[draw.node] else None)
                weights.append(min(1, enter))
                tried.append(0)
                continue
        elif len(path) == 1 or source.accepts(weights[-1], 1):
            if len(path) > 1 and not tree.candidates[node]:
                distribution = probs_at(node)
            return (
                before_last(tree, path[1:])
                if distribution is None
                else Acceptance(tuple(path[1:]), source.sample(distribution))
            )
        else:
            for stack in (path, distributions, weights, tried):
                stack.pop()
            draw = tree.candidates[path[-1]][tried[-1]]
        # The draw is rejected, at once or with its whole subtree.
        tried[-1] += 1
        distribution = distributions[-1]
        assert distribution is not None  # it had a draw
        rest = less(distribution * weights[-1], draw, weights_of(draw), tree.tokens[draw.node])
        total = rest.sum()
        if total > 0:
            distributions[-1] = rest / total
            weights[-1] = total / (total + 1 - weights[-1])
        elif len(path) > 1:  # the root must emit a token: rounding left nothing, so its distribution is kept
            weights[-1] = 0 * weights[-1]

"""The walk of the traversal rule in plain PyTorch, the counterpart of `ops/triton/traversal.py`.

The rule is that of verify/algorithms.py. As that of the multi-step rule, this walk reads tensor contents on the way.
"""

import torch
from torch import Tensor

from specinfer.ops.plain_multi_step import DrawnTree, Kept, WalkInputs, walk_each
from specinfer.ops.plain_tree import NAN, Walk


def walk_traversal(inputs: WalkInputs, *, out: Walk) -> None:
    """Go to the first leaf and back towards the root, as `verify.verify_traversal`.

    Decisions are the same unless a random number is within about 1e-13 of the number it is compared with. `out` is as
    for `walk_multi_step`.
    """
    walk_each(_walk, inputs, out)


def _walk(tree: DrawnTree, max_depth: int) -> Kept:
    def untried(node: int, last: int, level: int) -> int | None:
        later = range(last + 1, len(tree.nodes) if level < max_depth else 0)
        return next((i for i in later if tree.nodes[i] >= 0 and tree.parents[tree.nodes[i]] == node), None)

    # For each node from the root to the current one; `left` is None where no token may follow, and for leaves.
    path, draws, weights = [0], [untried(0, -1, 0)], [1.0]
    highest = tree.rows.max(dim=1).values
    left = [_probs(tree, 0)]
    while True:
        node, draw, distribution = path[-1], draws[-1], left[-1]
        is_leaf = untried(node, -1, len(path) - 1) is None
        if not is_leaf and highest[node].isnan():
            return [], NAN
        if draw is not None and distribution is not None:
            child, (_, _, q) = tree.nodes[draw], tree.distribution(draw)
            enter = weights[-1] * float(distribution[tree.tokens[child]] / q)
            if enter > 0:
                path.append(child)
                draws.append(untried(child, -1, len(path) - 1))
                weights.append(min(1.0, enter))
                left.append(_probs(tree, child))
                continue
        elif len(path) == 1 or tree.next_uniform() < weights[-1]:
            if highest[node].isnan():
                return [], NAN
            return tree.before_last(path[1:]) if distribution is None else (path[1:], tree.sample(distribution))
        else:
            for stack in (path, draws, weights, left):
                stack.pop()
        _reject(tree, draws, weights, left)
        last = draws[-1]
        assert last is not None
        draws[-1] = untried(path[-1], last, len(path) - 1)


def _probs(tree: DrawnTree, node: int) -> Tensor | None:
    return tree.rows[node].softmax(dim=0) if tree.rows[node].max() > -torch.inf else None


def _reject(tree: DrawnTree, draws: list[int | None], weights: list[float], left: list[Tensor | None]) -> None:
    """Take the last node's draw, rejected at once or with its whole subtree, from its distribution."""
    draw, distribution = draws[-1], left[-1]
    assert draw is not None
    assert distribution is not None
    ids, probs, _ = tree.distribution(draw)
    rest = distribution * weights[-1]
    rest[ids] = (rest[ids] - probs).clamp(min=0)
    total = float(rest.sum())
    if total > 0:
        left[-1] = rest / total
        weights[-1] = total / (total + 1 - weights[-1])
    elif len(draws) > 1:  # the root must emit a token: rounding left nothing, so its distribution is kept
        weights[-1] = 0.0

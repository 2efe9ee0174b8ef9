"""The walks of rules with random numbers over a device's tensors, in plain PyTorch: the reference of their kernels.

The rules are those of verify/algorithms.py. Decisions are the same unless a random number is
within about 1e-13 of the number it is compared with, because sums are computed in another order.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from specinfer.core.noise import next_uniform
from specinfer.ops.trees import NAN, NO_VALID_TOKEN, Walk, WalkInputs

Kept = tuple[list[int], int]


class DrawnTree(NamedTuple):
    """The tree of one request, and the draws of its nodes."""

    rows: Tensor  # [nodes, vocab] float64 scores
    tokens: list[int]
    parents: list[int]
    nodes: list[int]  # that the draws produced; -1 after the last
    distribution_tokens: Tensor  # [draws, support] int64
    distribution_probs: Tensor  # [draws, support] float64
    uniforms: Tensor  # [1]

    def next_uniform(self) -> float:
        state, uniform = next_uniform(int(self.uniforms) % 2**64)
        self.uniforms.fill_(state - 2**64 if state >= 2**63 else state)
        return uniform

    def sample(self, left: Tensor) -> int:
        """Return a token drawn from a distribution, [vocab]."""
        mass = left.cumsum(dim=0)
        token = int(torch.searchsorted(mass, self.next_uniform() * mass[-1], right=True))
        return token if token < len(left) else int(left.nonzero()[-1])

    def distribution(self, draw: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tokens that a draw could have produced, their probabilities, and that of the one it produced."""
        could = self.distribution_tokens[draw] >= 0
        ids, weights = self.distribution_tokens[draw][could], self.distribution_probs[draw][could]
        return ids, weights, weights[ids == self.tokens[self.nodes[draw]]].sum()

    def before_last(self, path: list[int]) -> Kept:
        """Return a path whose last node no token may follow."""
        return (path[:-1], self.tokens[path[-1]]) if path else ([], NO_VALID_TOKEN)


def tree_of(inputs: WalkInputs, request: int) -> DrawnTree:
    """Return the tree of a request."""
    first = int(inputs.starts[request])
    nodes = slice(first, first + int(inputs.sizes[request]))
    rows = inputs.logits[nodes].float() / inputs.temperatures[request]
    if inputs.least is not None:
        rows = rows.masked_fill(rows < inputs.least[nodes].unsqueeze(1), -torch.inf)
    of_tree = (inputs.tokens[request].tolist(), inputs.parents[request].tolist(), inputs.draws[request].tolist())
    of_draws = inputs.distribution_tokens[request].long(), inputs.distribution_probs[request]
    return DrawnTree(rows.double(), *of_tree, *of_draws, inputs.uniforms[request : request + 1])


def walk_multi_step(inputs: WalkInputs, *, out: Walk) -> None:
    """Compute `walk_multi_step` of `ops/triton/multi_step.py`."""
    walk_each(_multi_step, inputs, out)


def walk_each(walk: Callable[[DrawnTree, int], Kept], inputs: WalkInputs, out: Walk) -> None:
    """Walk the tree of each request.

    Args:
        walk: Function from a tree and the longest possible path to what is kept.
    """
    path, lengths, following = out
    for request in inputs.sizes.nonzero().flatten().tolist():
        kept, token = walk(tree_of(inputs, request), path.shape[1])
        path[request].fill_(-1)[: len(kept)] = torch.tensor(kept, dtype=torch.int32)
        lengths[request], following[request] = len(kept), token


def _multi_step(tree: DrawnTree, max_depth: int) -> Kept:
    node, kept = 0, list[int]()
    while True:
        highest = tree.rows[node].max()
        if highest.isnan():
            return [], NAN
        if highest == -torch.inf:
            return tree.before_last(kept)
        left = tree.rows[node].softmax(dim=0)
        for draw, child in enumerate(tree.nodes):
            if child < 0 or tree.parents[child] != node or len(kept) == max_depth:
                continue
            ids, weights, q = tree.distribution(draw)
            rest = left.clone()
            rest[ids] = (left[ids] - weights).clamp(min=0)
            if tree.next_uniform() * q < left[tree.tokens[child]] or not rest.sum() > 0:
                kept.append(child)
                node = child
                break
            left = rest / rest.sum()
        else:
            return kept, tree.sample(left)


def walk_traversal(inputs: WalkInputs, *, out: Walk) -> None:
    """Compute `walk_traversal` of `ops/triton/traversal.py`."""
    walk_each(_traverse, inputs, out)


def _traverse(tree: DrawnTree, max_depth: int) -> Kept:
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

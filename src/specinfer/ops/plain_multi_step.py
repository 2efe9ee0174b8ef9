"""The walk of the multi-step rule in plain PyTorch, the counterpart of `ops/triton/multi_step.py`.

The rule is that of verify/algorithms.py. Here its trees, distributions and random numbers are tensors. Unlike the other
plain versions, this one reads tensor contents on the way: it is for CPUs and for tests.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from specinfer.core.noise import next_uniform
from specinfer.ops.cpu.choice import SUPPORT
from specinfer.ops.plain_tree import NAN, NO_VALID_TOKEN, Walk

MOST_TOKENS = 4 * SUPPORT  # that draws of a node may come from: a kernel has their probabilities in registers
Kept = tuple[list[int], int]  # a path and the token after it


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


class WalkInputs(NamedTuple):
    """The inputs of a walk with random numbers.

    Attributes:
        logits: [rows, vocab].
        starts: [requests] row of each request's root in `logits`; its other nodes follow.
        temperatures: [requests] float32, above 0.
        tokens, parents: [requests, max_nodes] of the trees, the root first.
        sizes: [requests] nodes in use, or 0 for no tree.
        draws: [requests, max_draws] node that each draw produced, in draw order; -1 after the last.
        distribution_tokens: [requests, max_draws, support] tokens that the draw could have produced; -1 for padding.
            The Triton kernels need the same ones in the same order for all draws of a node, as those of one race have,
            and at most `MOST_TOKENS`.
        distribution_probs: [requests, max_draws, support] float64 probabilities, which sum to 1.
        uniforms: [requests] int64 states of the requests' random numbers (`noise.UniformStream`), advanced in place.
        least: [rows] float32 least score, divided by the temperature, of a token that may follow; None to keep all.
    """

    logits: Tensor
    starts: Tensor
    temperatures: Tensor
    tokens: Tensor
    parents: Tensor
    sizes: Tensor
    draws: Tensor
    distribution_tokens: Tensor
    distribution_probs: Tensor
    uniforms: Tensor
    least: Tensor | None = None

    def tree(self, request: int) -> DrawnTree:
        """Return the tree of a request."""
        first = int(self.starts[request])
        nodes = slice(first, first + int(self.sizes[request]))
        rows = self.logits[nodes].float() / self.temperatures[request]
        if self.least is not None:
            rows = rows.masked_fill(rows < self.least[nodes].unsqueeze(1), -torch.inf)
        of_tree = (self.tokens[request].tolist(), self.parents[request].tolist(), self.draws[request].tolist())
        of_draws = self.distribution_tokens[request].long(), self.distribution_probs[request]
        return DrawnTree(rows.double(), *of_tree, *of_draws, self.uniforms[request : request + 1])


def walk_multi_step(inputs: WalkInputs, *, out: Walk) -> None:
    """Try the draws of a node in draw order; each rejected one subtracts its distribution from the target's residual.

    SpecInfer (arXiv 2305.09781), section 4.3, as `verify.verify_multi_step`. The decisions are the same unless a random
    number is within about 1e-13 of the number it is compared with, because sums are computed in another order.

    Args:
        out: The tensors that `plain_tree.walk` returns, written to for the requests that have a tree. The path of one
            whose logits allow no token is empty.
    """
    walk_each(_walk, inputs, out)


def walk_each(walk: Callable[[DrawnTree, int], Kept], inputs: WalkInputs, out: Walk) -> None:
    """Walk the tree of each request.

    Args:
        walk: Function from a tree and the longest possible path to what is kept.
    """
    path, lengths, following = out
    for request in inputs.sizes.nonzero().flatten().tolist():
        kept, token = walk(inputs.tree(request), path.shape[1])
        path[request].fill_(-1)[: len(kept)] = torch.tensor(kept, dtype=torch.int32)
        lengths[request], following[request] = len(kept), token


def _walk(tree: DrawnTree, max_depth: int) -> Kept:
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

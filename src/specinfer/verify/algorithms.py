"""The verification rules as their papers state them: from a tree and the target's predictions in it to the accepted
path and the next token.

There are four rules, each with the condition under which the output's distribution is the target's
(docs/verification.md):

- coupled: plain decoding emits argmax(log p(. | prefix) + G_t) with the request's seeded noise G_t. The same
  argmax is taken at each node of the walk. Exact for any tree; greedy is the case G = 0.
- multi-step: the paper's multi-step speculative sampling. Exact if each recorded draft token was drawn from the
  recorded distribution, given all that was drawn before it, and no drawn token was dropped or moved afterwards.
- traversal: from leaf to root, under the same condition; on a chain it is block verification.
- target-only: the paper's naive sampling: the coupled walk over a tree that is independent of the noise.

`core.rules` lists them. Native walks do the same where a distribution is that of the logits over a temperature. With
constraints, penalties or truncation these algorithms run, and a node is processed when the walk reaches it.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from specinfer.core.noise import UniformStream
from specinfer.core.rules import RULES
from specinfer.core.tree import Draw, TokenTree
from specinfer.ops.trees import NAN, NO_VALID_TOKEN

Probs = npt.NDArray[Any]  # [vocab] float64, or exact fractions in tests


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The accepted nodes, from the root (left out) downwards, and the one token that follows them.

    A negative `next_token` is the reason why no token can be emitted; then the path has no meaning.
    """

    path: tuple[int, ...]
    next_token: int
    seconds: float = field(default=0.0, compare=False)  # time of this tree alone, or 0 if trees are verified together


class RandomSource(Protocol):
    """Interface of a rule's random decisions: seeded numbers, or in tests every outcome with its probability."""

    def accepts(self, p: Any, q: Any) -> bool:
        """Return True with probability min(1, p / q)."""
        ...

    def sample(self, distribution: Probs) -> int:
        """Return a token drawn with these probabilities."""
        ...


class SeededSource:
    """The request's own random numbers, which are independent of all drafters."""

    def __init__(self, uniforms: UniformStream) -> None:
        self._uniforms = uniforms

    def accepts(self, p: float, q: float) -> bool:
        # Strictly less: a random number of 0 must not accept an impossible token.
        return self._uniforms.next_uniform() * q < p

    def sample(self, distribution: Probs) -> int:
        mass = distribution.cumsum()
        # Side "right" skips tokens of probability 0, whose cumulative mass equals that of the token before.
        # The product is below the total, since a number below 1 is at most 1 - 2**-53.
        return int(np.searchsorted(mass, self._uniforms.next_uniform() * mass[-1], side="right"))


Place: TypeAlias = tuple[int, int]  # index of a tree, and a node of it


def verify_coupled(
    trees: Sequence[TokenTree], choose_tokens: Callable[[Sequence[Place]], Sequence[int]]
) -> list[Acceptance]:
    """Walk down every tree while the target's token at a node is one of its children, a level of all trees at a time.

    Sources: greedy walk and naive sampling, SpecInfer (arXiv 2305.09781, Algorithm 2 and section 4.3); shared noise,
    Daliri et al. (arXiv 2408.07978) and GLS (arXiv 2506.05632).

    Args:
        trees: The trees.
        choose_tokens: Function from the current places of the walks to the target's token at each of them.
    """
    paths: list[list[int]] = [[] for _ in trees]
    last = [0] * len(trees)
    places = [(i, 0) for i in range(len(trees))]
    while places:
        below = []
        for (i, node), token in zip(places, choose_tokens(places), strict=True):
            child = trees[i].children[node].get(token)
            if child is None:
                last[i] = token
            else:
                paths[i].append(child)
                below.append((i, child))
        places = below
    return [Acceptance(tuple(path), token) for path, token in zip(paths, last, strict=True)]


def verify_multi_step(tree: TokenTree, probs_at: Callable[[int], Probs | None], source: RandomSource) -> Acceptance:
    """Try the draws of a node in draw order; each rejected draw subtracts its distribution from the remaining one.

    A duplicate is tried like any other draw. A chosen token counts as drawn with probability 1.

    Sources: SpecInfer (arXiv 2305.09781, Algorithm 2 and section 4.3); draws without replacement, Sequoia (arXiv
    2402.12374).

    Args:
        tree: The tree.
        probs_at: Function from a node to the target's distribution after it, or None if no token may follow.
        source: Source of the random decisions.
    """
    node, path = 0, list[int]()
    while True:
        left = probs_at(node)
        if left is None:
            return ended_by_last(tree, path)
        for draw in tree.candidates[node]:
            weights, token = weights_of(draw), tree.tokens[draw.node]
            accepted = source.accepts(left[token], weight_of(draw, weights, token))
            if not accepted:
                rest = residual(left, draw, weights, token)
                total = rest.sum()
                accepted = not total > 0  # acceptance was certain up to rounding
            if accepted:
                path.append(draw.node)
                node = draw.node
                break
            left = rest / total
        else:
            return Acceptance(tuple(path), source.sample(left))


def verify_traversal(tree: TokenTree, probs_at: Callable[[int], Probs | None], source: RandomSource) -> Acceptance:
    """Go to the first leaf and back towards the root; accept the path to the first node that passes.

    Each node on the way is entered with the probability that it ends up accepted, `weight`. A node whose
    draws are all rejected passes with what is left of its weight. A rejected subtree subtracts the draw's
    distribution from its parent, whatever the subtree looked like.

    Sources: traversal verification (arXiv 2505.12398); on a chain, block verification (arXiv 2403.10444).

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
                ended_by_last(tree, path[1:])
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
        rest = residual(distribution * weights[-1], draw, weights_of(draw), tree.tokens[draw.node])
        total = rest.sum()
        if total > 0:
            distributions[-1] = rest / total
            weights[-1] = total / (total + 1 - weights[-1])
        elif len(path) > 1:  # the root must emit a token: rounding left nothing, so its distribution is kept
            weights[-1] = 0 * weights[-1]


def ended_by_last(tree: TokenTree, path: Sequence[int]) -> Acceptance:
    """Return the same tokens with the last one as the next token, because no token can follow it."""
    return Acceptance(tuple(path[:-1]), tree.tokens[path[-1]])


def weights_of(draw: Draw) -> Probs | None:
    return None if draw.distribution is None else draw.distribution.weights()


def weight_of(draw: Draw, weights: Probs | None, token: int) -> Any:
    """Return the probability with which this draw gave this token."""
    if draw.distribution is None or weights is None:
        return 1
    return weights[draw.distribution.token_ids == token][0]


def residual(left: Probs, draw: Draw, weights: Probs | None, token: int) -> Probs:
    """Return what a rejected draw leaves, [vocab]: (left - distribution of the draw), at least 0."""
    rest = left.copy()
    if draw.distribution is None or weights is None:
        rest[token] = 0 * rest[token]
    else:
        ids = draw.distribution.token_ids
        rest[ids] = np.maximum(rest[ids] - weights, 0)
    return rest


class _NoValidTokenError(Exception):
    """A node without a valid token."""

    def __init__(self, reason: int) -> None:
        self.reason = reason


def verify_seeded(
    rule: str, tree: TokenTree, row_at: Callable[[int], npt.NDArray[Any]], uniforms: UniformStream
) -> Acceptance:
    """Verify one tree by a rule that uses random numbers.

    Args:
        rule: The rule.
        tree: The tree.
        row_at: Function from a node to its processed logits, [vocab].
        uniforms: The random numbers.
    """

    def probs_at(node: int) -> Probs | None:
        # By numpy: waking PyTorch's threads takes longer than the row itself.
        row = row_at(node).astype(np.float64)
        best = row.max()
        if best != best:
            raise _NoValidTokenError(NAN)
        if best > -torch.inf:
            return np.asarray(torch.from_numpy(row).softmax(dim=-1).numpy())
        if node == 0:
            raise _NoValidTokenError(NO_VALID_TOKEN)
        return None  # an accepted path may end here, and other nodes are not affected

    start = time.perf_counter()
    try:
        acceptance: Acceptance = RULES[rule].verify(tree, probs_at, SeededSource(uniforms))
        return replace(acceptance, seconds=time.perf_counter() - start)
    except _NoValidTokenError as error:
        return Acceptance((), error.reason)

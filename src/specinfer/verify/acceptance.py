"""Parts of every rule: what is accepted, random decisions, and what a rejected draft token leaves of a distribution."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from specinfer.core.noise import UniformStream
from specinfer.core.tree import Draw, TokenTree

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


def before_last(tree: TokenTree, path: Sequence[int]) -> Acceptance:
    """Return the same tokens with the last one as the next token, because no token can follow it."""
    return Acceptance(tuple(path[:-1]), tree.tokens[path[-1]])


def weights_of(draw: Draw) -> Probs | None:
    return None if draw.distribution is None else draw.distribution.weights()


def weight_of(draw: Draw, weights: Probs | None, token: int) -> Any:
    """Return the probability with which this draw gave this token."""
    if draw.distribution is None or weights is None:
        return 1
    return weights[draw.distribution.token_ids == token][0]


def less(left: Probs, draw: Draw, weights: Probs | None, token: int) -> Probs:
    """Return what a rejected draw leaves, [vocab]: (left - distribution of the draw), at least 0."""
    rest = left.copy()
    if draw.distribution is None or weights is None:
        rest[token] = 0 * rest[token]
    else:
        ids = draw.distribution.token_ids
        rest[ids] = np.maximum(rest[ids] - weights, 0)
    return rest

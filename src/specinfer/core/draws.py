"""Draws of draft tokens, as single values and as arrays.

A step has hundreds of draws, and hardly any is looked at alone. So drafters, merging and learners pass them as arrays.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
CHOSEN = -1  # in place of the number of a distribution: the token was chosen, not drawn
POOL = 32  # bits of a number within its pool


class Distribution(NamedTuple):
    """The distribution that a draft token was drawn from, over the few tokens that could be drawn.

    When drawing without replacement, the distribution of a later sibling is the first one's with the tokens
    drawn before it removed, renormalized to sum to 1.
    """

    token_ids: npt.NDArray[np.int64]  # [support], distinct tokens
    probs: npt.NDArray[np.float64]  # [support], summing to 1
    removed: tuple[int, ...] = ()  # indices in the support that were drawn before

    def weights(self) -> npt.NDArray[np.float64]:
        """Return the probabilities after the removal: [support]."""
        if not self.removed:
            return self.probs
        weights = self.probs.copy()
        weights[list(self.removed)] = 0
        return np.asarray(weights / weights.sum())


class Draw(NamedTuple):
    """One draw of a draft token: its node, its drafter, the distribution it was drawn from, and its confidence.

    A lookup with several sources adds the source to its name, as in "suffix:earlier".
    """

    node: int
    drafter: str
    distribution: Distribution | None = None  # None if the token was chosen, not drawn
    confidence: float = 1.0  # in [0, 1], as the drafter reports it; calibration turns it into an acceptance probability


class DistributionPool(Protocol):
    """Distributions by number, made when they are looked at."""

    def __getitem__(self, number: int, /) -> Distribution | None: ...


@dataclass(frozen=True, slots=True)
class DrawnFrom:
    """Distributions that the children of several nodes were drawn from. That of a child has a number, see `numbers`.

    Attributes:
        token_ids, probs: [nodes, support] tokens that could be drawn, and their probabilities.
        places: [nodes, most] indices of those drawn, in draw order; -1 for children that were chosen, which come last.
        is_replaced: Whether each was drawn from the whole distribution, those drawn before it not removed.
    """

    token_ids: Ints
    probs: Floats
    places: Ints
    is_replaced: bool = False

    def numbers(self, nodes: Ints, ranks: Ints) -> Ints:
        """Return the numbers of these children of these nodes."""
        return np.asarray(nodes * self.places.shape[1] + ranks)

    def __getitem__(self, number: int) -> Distribution:
        node, rank = divmod(number, self.places.shape[1])
        removed = () if self.is_replaced else tuple(self.places[node, :rank].tolist())
        return Distribution(self.token_ids[node], self.probs[node], removed)

    def addresses(self, numbers: Ints) -> Ints:
        """Return what native walks need of each, [numbers, 5]; addresses are valid as long as the arrays are kept.

        These are the addresses of the tokens, of their probabilities (before the removal of those drawn earlier), their
        number, the address of the places that were drawn earlier, and how many these are.
        """
        nodes, ranks = np.divmod(numbers, self.places.shape[1])
        addresses = np.empty((len(numbers), 5), dtype=np.int64)
        for column, array in ((0, self.token_ids), (1, self.probs), (3, self.places)):
            assert array.shape[1] <= 1 or array.strides[1] == array.itemsize  # of a single column NumPy's is arbitrary
            addresses[:, column] = array.ctypes.data + nodes * array.strides[0]
        addresses[:, 2], addresses[:, 4] = self.token_ids.shape[1], 0 if self.is_replaced else ranks
        return addresses


class Draws(NamedTuple):
    """All draws of a tree in draw order; arrays have one entry for each of them.

    Attributes:
        makers: Index of the drafter, or of the source of a lookup, in `names`.
        numbers: Index of a pool in `pools`, times 2**32, plus the number of the distribution in it; or `CHOSEN`. None
            if all tokens were chosen.
    """

    nodes: Ints
    makers: Ints
    confidence: Floats
    names: tuple[str, ...]
    numbers: Ints | None = None
    pools: tuple[DistributionPool, ...] = ()

    @classmethod
    def from_draws(cls, draws: Sequence[Draw]) -> "Draws":
        """Return these draws as arrays."""
        names = tuple(dict.fromkeys(draw.drafter for draw in draws))
        place = {name: i for i, name in enumerate(names)}
        distributions = [draw.distribution for draw in draws]
        numbers = None
        if any(one is not None for one in distributions):
            numbers = np.array([CHOSEN if one is None else i for i, one in enumerate(distributions)], dtype=np.int64)
        return cls(
            np.array([draw.node for draw in draws], dtype=np.int64),
            np.array([place[draw.drafter] for draw in draws], dtype=np.int64),
            np.array([draw.confidence for draw in draws], dtype=np.float64),
            names,
            numbers,
            () if numbers is None else (distributions,),
        )

    @classmethod
    def chosen(cls, confidence: Floats, drafter: str | Sequence[str]) -> "Draws":
        """Return the draws of a tree whose nodes were chosen one by one; `confidence` of each but the root.

        Args:
            confidence: Confidence of each node.
            drafter: Its drafter, or those of each node.
        """
        count, makers = len(confidence), np.zeros(len(confidence), dtype=np.int64)
        names = (drafter,) if isinstance(drafter, str) else tuple(dict.fromkeys(drafter))
        if len(names) > 1:
            place = {name: i for i, name in enumerate(names)}
            makers = np.array([place[name] for name in drafter], dtype=np.int64)
        return cls(np.arange(1, count + 1), makers, confidence, names)

    def tuples(self) -> tuple[Draw, ...]:
        """Return the draws as single values."""
        names, pools = self.names, self.pools
        distributions = (
            repeat(None)
            if self.numbers is None
            else [
                None if number < 0 else pools[number >> POOL][number & (1 << POOL) - 1]
                for number in self.numbers.tolist()
            ]
        )
        makers = [names[maker] for maker in self.makers.tolist()]
        return tuple(map(Draw, self.nodes.tolist(), makers, distributions, self.confidence.tolist()))

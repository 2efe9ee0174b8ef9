"""What a guess is worth: the chance that it is accepted, learned from every verification.

A drafter's own probability is the wrong key to grow a tree by: for sampled text acceptance hardly depends on it,
and for merged trees those of different drafters do not compare. So each drafter has a table of counts by rank
among its guesses at a node and by its confidence, and the chance is what was accepted of what was tried.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from specinfer.request import Request
from specinfer.tree import TokenTree
from specinfer.verify import Acceptance

Floats = npt.NDArray[np.float64]
RANKS = 8  # the last one stands for all after it
# Confidences up to each of these fall into one bucket.
_EDGES = np.array([0.01, 0.03, 0.07, 0.15, 0.25, 0.4, 0.55, 0.7, 0.8, 0.9, 0.96, 0.99])
_MIDDLE = np.convolve(np.concatenate([[0.0], _EDGES, [1.0]]), [0.5, 0.5], mode="valid")
_POINTS = np.concatenate([[0.0], _MIDDLE])
_PRIOR_WEIGHT = 4.0
_MEMORY = 4000.0  # tries a cell remembers: a change of text is followed


class _Table:
    """Counts of one drafter, [ranks, buckets]."""

    def __init__(self, trust: float) -> None:
        # Before anything was seen a confidence is taken at its word, that of later ranks at less.
        prior = _MIDDLE * (trust ** np.arange(RANKS))[:, None]
        self.tried = np.full(prior.shape, _PRIOR_WEIGHT)
        self.kept = _PRIOR_WEIGHT * prior
        self.tried_at = np.full(RANKS, _PRIOR_WEIGHT)  # [ranks], whatever the confidence
        self.kept_at = _PRIOR_WEIGHT * 0.6 * 0.3 ** np.arange(RANKS)

    def count(self, rank: int, bucket: int, *, kept: bool) -> None:
        if self.tried_at[rank] >= _MEMORY:
            self.tried_at[rank] *= 0.5
            self.kept_at[rank] *= 0.5
        self.tried_at[rank] += 1
        self.kept_at[rank] += kept
        if self.tried[rank, bucket] >= _MEMORY:
            self.tried[rank, bucket] *= 0.5
            self.kept[rank, bucket] *= 0.5
        self.tried[rank, bucket] += 1
        self.kept[rank, bucket] += kept


def source(drafter: str, request: Request) -> str:
    """Greedy and sampled guesses of a drafter are not alike: they have tables of their own."""
    return drafter if request.params.is_greedy else f"{drafter} sampled"


class Calibration:
    """A table for each source of guesses, shared by all that draft for one target.

    Args:
        trust: What a confidence counts for, before anything was seen, for each rank further down.
    """

    def __init__(self, trust: float = 0.6) -> None:
        self._trust = trust
        self._tables: dict[str, _Table] = {}

    def _table(self, source: str) -> _Table:
        if source not in self._tables:
            self._tables[source] = _Table(self._trust)
        return self._tables[source]

    def chance(self, source: str, ranks: npt.ArrayLike, confidence: npt.ArrayLike) -> Floats:
        """Of guesses at these ranks (from 0) and about this sure, the share accepted once their parent was.

        Args:
            ranks, confidence: Of one shape.
        """
        table = self._table(source)
        rank, sure = np.minimum(ranks, RANKS - 1), np.asarray(confidence, dtype=np.float64)
        shares = np.zeros((RANKS, len(_POINTS)))  # without confidence no chance
        np.divide(table.kept, table.tried, out=shares[:, 1:])
        # On straight lines between the middles of the buckets: guesses in one bucket are still told apart.
        right = np.clip(np.searchsorted(_POINTS, sure), 1, len(_POINTS) - 1)
        part = np.minimum((sure - _POINTS[right - 1]) / (_POINTS[right] - _POINTS[right - 1]), 1.0)
        return np.asarray(shares[rank, right - 1] * (1 - part) + shares[rank, right] * part)

    def by_rank(self, source: str) -> Floats:
        """[ranks] the same, whatever the confidence."""
        table = self._table(source)
        return np.asarray(table.kept_at / table.tried_at)

    def count(self, source: str, rank: int, confidence: float, *, kept: bool) -> None:
        self._table(source).count(min(rank, RANKS - 1), int(np.searchsorted(_EDGES, confidence)), kept=kept)

    def observe(self, request: Request, tree: TokenTree, acceptance: Acceptance) -> None:
        """Counts the draws at each node the target came to."""
        for node, kept in zip((0, *acceptance.path), (*acceptance.path, None), strict=True):
            ranks: dict[str, int] = {}
            for draw in tree.candidates[node]:
                rank = ranks.get(draw.drafter, 0)
                ranks[draw.drafter] = rank + 1
                self.count(source(draw.drafter, request), rank, draw.confidence, kept=draw.node == kept)


def draw_ranks(tree: TokenTree) -> Sequence[int]:
    """For each draw of the tree, how many its drafter made before it at the same node."""
    seen: dict[tuple[int, str], int] = {}
    ranks = []
    for draw in tree.draws:
        key = tree.parents[draw.node], draw.drafter
        ranks.append(rank := seen.get(key, 0))
        seen[key] = rank + 1
    return ranks

"""What a guess is worth: the chance that it is accepted, learned from every verification.

A drafter's own probability is the wrong key to grow a tree by: for sampled text acceptance hardly depends on it,
and for merged trees those of different drafters do not compare. So each drafter has a table of counts by rank
among its guesses at a node and by its confidence, and the chance is what was accepted of what was tried.
"""

import numpy as np
import numpy.typing as npt

from specinfer.request import Request
from specinfer.tree import TokenTree
from specinfer.verify import Acceptance

Floats = npt.NDArray[np.float64]
RANKS = 8  # the last one stands for all after it
# Confidences up to each of these fall into one bucket.
_EDGES = np.array([0.01, 0.03, 0.07, 0.15, 0.25, 0.4, 0.55, 0.7, 0.8, 0.9, 0.96, 0.99])
# Of the buckets: where the lines meet on which chances lie.
MIDDLE = np.convolve(np.concatenate([[0.0], _EDGES, [1.0]]), [0.5, 0.5], mode="valid")
_POINTS = np.concatenate([[0.0], MIDDLE])
_PRIOR_WEIGHT = 4.0
_MEMORY = 4000.0  # tries a cell remembers: a change of text is followed
_MAX_NOTED = 512


class _Table:
    """Counts of one source of guesses, [ranks, buckets]. What was noted is counted when the counts are asked for."""

    def __init__(self, trust: float) -> None:
        # Before anything was seen a confidence is taken at its word, that of later ranks at less.
        prior = MIDDLE * (trust ** np.arange(RANKS))[:, None]
        self._tried = np.full(prior.shape, _PRIOR_WEIGHT)
        self._kept = _PRIOR_WEIGHT * prior
        self._tried_at = np.full(RANKS, _PRIOR_WEIGHT)  # [ranks], whatever the confidence
        self._kept_at = _PRIOR_WEIGHT * 0.6 * 0.3 ** np.arange(RANKS)
        self._noted: list[tuple[int, float, bool]] = []
        self._lines: tuple[Floats, Floats] | None = None

    def note(self, rank: int, confidence: float, kept: bool) -> None:
        self._noted.append((rank, confidence, kept))
        if len(self._noted) >= _MAX_NOTED:
            self._count()

    def lines(self) -> tuple[Floats, Floats]:
        """[ranks * buckets] heights at 0 and slopes of the lines on which the shares kept lie, by confidence.

        They go from middle to middle of the buckets, so that guesses in one bucket are still told apart.
        """
        self._count()
        if self._lines is None:
            shares = np.zeros((RANKS, len(_POINTS) + 1))  # without confidence no chance; above the last middle flat
            shares[:, 1:-1] = self._kept / self._tried
            shares[:, -1] = shares[:, -2]
            slopes = np.diff(shares) / np.diff(_POINTS, append=1.0)
            self._lines = (shares[:, :-1] - slopes * _POINTS).ravel(), slopes.ravel()
        return self._lines

    def by_rank(self) -> Floats:
        self._count()
        return np.asarray(self._kept_at / self._tried_at)

    def state(self) -> Floats:
        """[numbers] all that is counted."""
        self._count()
        return np.concatenate([part.ravel() for part in self._parts()])

    def restore(self, state: Floats) -> None:
        """Counts what `state` returned of another table."""
        self._noted.clear()
        self._lines = None
        ends = np.cumsum([part.size for part in self._parts()])
        for part, numbers in zip(self._parts(), np.split(state, ends[:-1]), strict=True):
            part[...] = numbers.reshape(part.shape)

    def _parts(self) -> list[Floats]:
        return [self._tried, self._kept, self._tried_at, self._kept_at]

    def _count(self) -> None:
        if not self._noted:
            return
        self._lines = None
        rank, sure, kept = (np.asarray(values) for values in zip(*self._noted, strict=True))
        rank = np.minimum(rank, RANKS - 1)
        self._noted.clear()
        for tried, good, cell in (
            (self._tried, self._kept, (rank, np.searchsorted(_EDGES, sure))),
            (self._tried_at, self._kept_at, (rank,)),
        ):
            np.add.at(tried, cell, 1.0)
            np.add.at(good, cell, kept)
            old = tried >= _MEMORY
            tried[old] *= 0.5
            good[old] *= 0.5


def source(drafter: str, request: Request) -> str:
    """Greedy and sampled guesses of a drafter are not alike: they have tables of their own."""
    return source_of(drafter, is_greedy=request.params.is_greedy)


def source_of(drafter: str, *, is_greedy: bool) -> str:
    return drafter if is_greedy else f"{drafter} sampled"


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
        heights, slopes = self._table(source).lines()
        line = np.searchsorted(MIDDLE, confidence) + np.minimum(ranks, RANKS - 1) * len(_POINTS)
        return np.asarray(heights[line] + slopes[line] * confidence)

    def lines(self, source: str) -> tuple[Floats, Floats]:
        """[ranks * (MIDDLE + 1)] heights at 0 and slopes of the lines on which chances lie; they meet at `MIDDLE`."""
        return self._table(source).lines()

    def by_rank(self, source: str) -> Floats:
        """[ranks] the same, whatever the confidence."""
        return self._table(source).by_rank()

    def state(self, source: str) -> Floats:
        """[numbers] what is known of these guesses; `restore` makes another calibration know the same."""
        return self._table(source).state()

    def restore(self, source: str, state: Floats) -> None:
        """Forgets what it knew of these guesses."""
        self._table(source).restore(state)

    def count(self, source: str, rank: int, confidence: float, *, kept: bool) -> None:
        self._table(source).note(rank, confidence, kept)

    def observe(self, request: Request, tree: TokenTree, acceptance: Acceptance) -> None:
        """Counts the draws at each node the target came to."""
        names: dict[str, str] = {}
        for node, kept in zip((0, *acceptance.path), (*acceptance.path, None), strict=True):
            ranks: dict[str, int] = {}
            for child, drafter, _, confidence in tree.candidates[node]:
                rank = ranks.get(drafter, 0)
                ranks[drafter] = rank + 1
                if drafter not in names:
                    names[drafter] = source(drafter, request)
                self.count(names[drafter], rank, confidence, kept=child == kept)

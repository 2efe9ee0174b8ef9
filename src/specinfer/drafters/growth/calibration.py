"""The probability that a drafted token is accepted, learned from every verification.

A drafter's own probability is the wrong key to grow a tree by: for sampled text acceptance hardly depends on it, and
probabilities of different drafters do not compare in merged trees. So each drafter has a table of counts by rank among
its drafted tokens at a node and by its confidence. The calibrated probability is the accepted share of those tried.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from specinfer.core.draws import Floats
from specinfer.core.lookups import is_self
from specinfer.core.request import Request
from specinfer.core.tree import TokenTree
from specinfer.ops.cpu.tried import Verified, count_tried
from specinfer.verify import Acceptance

RANKS = 8  # the last rank stands for all later ones
# Upper bounds of the confidence buckets.
_EDGES = np.array([0.01, 0.03, 0.07, 0.15, 0.25, 0.4, 0.55, 0.7, 0.8, 0.9, 0.96, 0.99])
# The middle of each bucket, where the lines of the calibrated probability meet.
MIDDLE = np.convolve(np.concatenate([[0.0], _EDGES, [1.0]]), [0.5, 0.5], mode="valid")
_POINTS = np.concatenate([[0.0], MIDDLE])
_STEPS = np.diff(_POINTS, append=1.0)
_PRIOR_WEIGHT = 4.0
_FIRST_RANK = 0.6  # accepted share before any result
# The target itself, cheaper, is right more often than it is sure: of first tokens of SmolLM2-135M-Instruct in 4 bits
# with a confidence of 0.2, 0.48 and 0.75, shares of 0.54, 0.76 and 0.97 were accepted, greedily and by the coupled rule
# alike. So their accepted share is expected to be 1 - (1 - confidence) ** power.
_SELF_POWER, _SELF_FIRST_RANK = 2.5, 0.85
_POWERS = np.geomspace(0.01, 100.0, 81)  # that are tried in a fit
_FIT_WEIGHT = 0.3  # of the power before, in tries at each confidence
_GROWN, _LAST_FIT = 1.5, 1000.0  # factor of the tries of first tokens between fits, and tries at the last one
_MEMORY = 4000.0  # tries after which a cell is halved, so that it follows a change of text
_MAX_OBSERVED, _MAX_NOTED = 64, 512


class _Table:
    """Counts of one source of drafted tokens, [ranks, buckets]. New results are counted when the counts are read."""

    def __init__(self, trust: float, *, is_self: bool = False) -> None:
        # Before any result, a confidence is taken as the probability, and later ranks are discounted.
        prior = MIDDLE * (trust ** np.arange(RANKS))[:, None]
        self._power = np.full(1, _SELF_POWER)
        if is_self:
            prior[0] = _shares(self._power)
        self._tried = np.full(prior.shape, _PRIOR_WEIGHT)
        self._kept = _PRIOR_WEIGHT * prior
        self._tried_at = np.full(RANKS, _PRIOR_WEIGHT)  # [ranks], over all confidences
        self._kept_at = _PRIOR_WEIGHT * (_SELF_FIRST_RANK if is_self else _FIRST_RANK) * 0.3 ** np.arange(RANKS)
        # Tries of first tokens at the next fit. Others than the target itself have passes enough for counts to suffice.
        self._next_fit = _GROWN * _PRIOR_WEIGHT if is_self else np.inf
        self._noted = np.zeros((2, *prior.shape))  # tokens tried and accepted that are not counted yet
        self._num_noted = 0  # times that such tokens were noted
        self._lines: tuple[Floats, Floats] | None = None
        self._by_rank: Floats | None = None

    def note(self, counts: Floats) -> None:
        """Note tokens that were tried, and accepted, [2, ranks, buckets]."""
        self._noted += counts
        self._num_noted += 1
        if self._num_noted >= _MAX_NOTED:
            self._count()

    def lines(self) -> tuple[Floats, Floats]:
        """Return heights at 0 and slopes, [ranks * buckets] each, of the accepted share as lines by confidence.

        The lines go from middle to middle of the buckets, so that tokens in one bucket are still distinguished.
        """
        self._count()
        if self._lines is None:
            shares = np.zeros((RANKS, len(_POINTS) + 1))  # zero confidence gives zero; flat above the last middle
            shares[:, 1:-1] = self._kept / self._tried
            shares[:, -1] = shares[:, -2]
            slopes = (shares[:, 1:] - shares[:, :-1]) / _STEPS
            self._lines = (shares[:, :-1] - slopes * _POINTS).ravel(), slopes.ravel()
        return self._lines

    def by_rank(self) -> Floats:
        self._count()
        if self._by_rank is None:
            self._by_rank = self._kept_at / self._tried_at
        return self._by_rank

    def state(self) -> Floats:
        """Return all counts, [numbers]."""
        self._count()
        return np.concatenate([part.ravel() for part in self._parts()])

    def restore(self, state: Floats) -> None:
        """Set the counts to those of `state` of another table."""
        self._noted[...] = 0.0
        self._num_noted = 0
        self._lines = self._by_rank = None
        ends = np.cumsum([part.size for part in self._parts()])
        for part, numbers in zip(self._parts(), np.split(state, ends[:-1]), strict=True):
            part[...] = numbers.reshape(part.shape)
        if self._next_fit < np.inf:
            self._next_fit = _GROWN * self._tried_at[0]

    def _parts(self) -> list[Floats]:
        return [self._tried, self._kept, self._tried_at, self._kept_at, self._power]

    def _count(self) -> None:
        if not self._num_noted:
            return
        self._lines = self._by_rank = None
        for tried, good, noted in (
            (self._tried, self._kept, self._noted),
            (self._tried_at, self._kept_at, self._noted.sum(axis=-1)),
        ):
            tried += noted[0]
            good += noted[1]
            if tried.max() >= _MEMORY:
                old = tried >= _MEMORY
                tried[old] *= 0.5
                good[old] *= 0.5
        self._noted[...] = 0.0
        self._num_noted = 0
        if self._next_fit <= self._tried_at[0] < _LAST_FIT:
            self._fit()

    def _fit(self) -> None:
        """Expect of confidences seen rarely what results at all of them suggest.

        The power becomes the one by which as many first tokens are expected as were accepted.
        """
        self._next_fit = _GROWN * self._tried_at[0]
        before = _shares(self._power)
        tried = self._tried[0] - _PRIOR_WEIGHT + _FIT_WEIGHT
        kept = self._kept[0] - (_PRIOR_WEIGHT - _FIT_WEIGHT) * before
        expected = (tried * _shares(_POWERS[:, None])).sum(axis=-1)  # [powers]
        self._power[0] = _POWERS[np.abs(expected - kept.sum()).argmin()]
        self._kept[0] += _PRIOR_WEIGHT * (_shares(self._power) - before)


def _shares(power: Floats) -> Floats:
    """Return the accepted shares of first tokens of the target itself, [..., buckets]."""
    return np.asarray(1.0 - (1.0 - MIDDLE) ** power)


def source(drafter: str, request: Request) -> str:
    """Return the source name of a drafter for a request.

    Greedy and sampled drafts have separate tables, and so have drafts for each adapter of the target, and those for a
    rule that was chosen for the request: the confidence in a drawn token means something else.
    """
    name = drafter if request.adapter is None else f"{drafter} for {request.adapter.name}"
    return source_of(name, is_greedy=request.params.is_greedy, rule=request.verification)


def source_of(drafter: str, *, is_greedy: bool, rule: str | None = None) -> str:
    """Return the source name of a drafter for requests without an adapter, and a rule that was chosen for them."""
    name = drafter if rule is None else f"{drafter} by {rule}"
    return name if is_greedy else f"{name} sampled"


class Calibration:
    """A table for each source of drafted tokens, shared by all drafters of one target.

    Args:
        trust: The discount of a confidence for each further rank, before any result was seen.
    """

    def __init__(self, trust: float = 0.6) -> None:
        self._trust = trust
        self._tables: dict[str, _Table] = {}
        self._observed: list[Observed] = []  # trees whose tokens are not counted yet

    def _table(self, source: str) -> _Table:
        if self._observed:
            self._count_observed()
        return self._table_of(source)

    def _table_of(self, source: str) -> _Table:
        if source not in self._tables:
            self._tables[source] = _Table(self._trust, is_self=is_self(source))
        return self._tables[source]

    def acceptance_prob(self, source: str, ranks: npt.ArrayLike, confidence: npt.ArrayLike) -> Floats:
        """Return the probability that tokens at these ranks (from 0) are accepted, once their parents are.

        Args:
            ranks, confidence: Arrays of the same shape.
        """
        heights, slopes = self.lines(source)
        line = np.searchsorted(MIDDLE, confidence) + np.minimum(ranks, RANKS - 1) * len(_POINTS)
        return np.asarray(heights[line] + slopes[line] * confidence)

    def lines(self, source: str) -> tuple[Floats, Floats]:
        """Return heights at 0 and slopes, [ranks * (MIDDLE + 1)] each, of lines that meet at `MIDDLE`."""
        return self._table(source).lines()

    def by_rank(self, source: str) -> Floats:
        """Return the acceptance probability by rank, [ranks], over all confidences."""
        return self._table(source).by_rank()

    def state(self, source: str) -> Floats:
        """Return what is known about this source, [numbers]; `restore` copies it to another calibration."""
        return self._table(source).state()

    def restore(self, source: str, state: Floats) -> None:
        """Replace what is known about this source by a `state`."""
        self._table(source).restore(state)

    def count(self, source: str, rank: int, confidence: float, *, kept: bool) -> None:
        counts = np.zeros((2, RANKS, len(MIDDLE)))
        counts[:, min(rank, RANKS - 1), np.searchsorted(_EDGES, confidence)] = 1.0, kept
        self._table(source).note(counts)

    def observe(self, request: Request, tree: TokenTree, acceptance: Acceptance) -> None:
        """Count the drafted tokens at each node that the target reached, when the counts are read next."""
        if tree.num_guessed:
            parents, (nodes, makers, confidence, drafters, *_) = tree.arrays.parents, tree.arrays.draws
            names = [source(name, request) for name in drafters]
            self.observe_tokens(Observed(names, Verified(parents, acceptance.path, (), confidence, nodes, makers)))

    def observe_tokens(self, observed: "Observed") -> None:
        """Count the tokens of a verified tree at each node that the target reached, when the counts are read next."""
        self._observed.append(observed)
        if len(self._observed) >= _MAX_OBSERVED:
            self._count_observed()

    def _count_observed(self) -> None:
        observed, self._observed = self._observed, []
        numbers: dict[str, int] = {}
        trees = [
            tree._replace(sources=[numbers.setdefault(name, len(numbers)) for name in names])
            for names, tree in observed
        ]
        for name, counts in zip(numbers, count_tried(trees, len(numbers), _EDGES, RANKS), strict=True):
            self._table_of(name).note(counts)


class Observed(NamedTuple):
    """A verified tree, and the source of each of its drafters by name, in place of the numbers."""

    names: list[str]
    tree: Verified

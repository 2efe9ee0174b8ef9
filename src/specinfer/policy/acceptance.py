"""Acceptance model: how often draft tokens of each rank are right, and so how many tokens a tree is expected to yield.

Example: the first draft token at a node is right with probability 0.5, the second with 0.25. A node counts with the
probability of its whole path. The best nodes up to depth 2 have 0.5, 0.25 (the second token), 0.25 (the first token
below the first), 0.125, ... So a tree of 3 nodes yields 1 + 0.5 + 0.25 + 0.25 = 2 tokens, the target's own included.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from specinfer.core.decayed_ratio import DecayedRatio
from specinfer.core.tree import TokenTree
from specinfer.verify import Acceptance

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AcceptanceProfile:
    """Acceptance in a measurement, from which a model of it begins before it learns from served text.

    Attributes:
        by_rank: Probability that the first, second, ... draft token at a node is right.
        share: Accepted tokens over those expected by these probabilities.
        text_shares: The same for each text.
        coverage: Share of the steps in which the drafters proposed anything.
        num_trees: Trees that this was counted from.
        text: What was measured, such as "chat prompts".
    """

    by_rank: tuple[float, ...]
    share: float
    text_shares: tuple[float, ...]
    coverage: float
    num_trees: int
    text: str

    def as_dict(self) -> dict[str, object]:
        """Return plain numbers, to be stored in a file."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @classmethod
    def from_dict(cls, numbers: Mapping[str, Any]) -> Self:
        """Make a profile from the numbers of `as_dict`. Raises KeyError, TypeError or ValueError if it is none."""
        by_rank, shares = (tuple(map(float, numbers[name])) for name in ("by_rank", "text_shares"))
        share, coverage = float(numbers["share"]), float(numbers["coverage"])
        values = (*by_rank, *shares, share, coverage)
        if not by_rank or not all(math.isfinite(value) and value >= 0 for value in values) or max(by_rank) > 1:
            raise ValueError("no profile: by_rank, shares and coverage must be probabilities")
        return cls(by_rank, share, shares, min(coverage, 1.0), int(numbers["num_trees"]), str(numbers["text"]))


class AcceptanceModel:
    """Probability that the first, second, ... draft token at a node is the target's token.

    Text that is easy to predict has many accepted tokens in few trees, and makes up most of what is counted, but other
    text most of the trees. So their tokens are fewer than these probabilities promise, and the share that came true is
    learned, too.

    Args:
        prior: The probabilities before any tree, counted as a few observations.

    Attributes:
        share: Accepted tokens over those expected by the probabilities alone.
        coverage: Share of the steps in which drafters proposed something where they were asked. Lookups often find
            nothing, and such a step costs and yields what one of plain decoding does.
        text: What was measured before served text, or None if its acceptance is assumed.
    """

    PRIOR = (0.6, 0.12, 0.06, 0.04)  # of a drafter of medium quality
    SELF_PRIOR = (0.84, 0.09, 0.03, 0.01)  # of the target itself in 4 bits
    _PRIOR_WEIGHT = 8.0
    _DECAY = 0.995  # per tree: about two hundred trees are remembered
    _SHARE_DECAY, _MOST_SHARE = 0.97, 1.2  # some thirty trees, since texts differ
    _NUM_TEXTS, _LEAST_TREES, _EASY = 16, 4, 0.75  # texts that are remembered, trees of each, and their quantile
    _MOST_PROFILE = 40.0  # trees that a measurement before served text counts as
    _TEXT_WEIGHT = 4.0  # tokens that the expectation of a text counts as

    def __init__(self, prior: Sequence[float] = PRIOR) -> None:
        weight = self._PRIOR_WEIGHT
        self._ranks = [DecayedRatio(self._DECAY, weight * p, weight) for p in prior]  # accepted over tried
        self._came_true = DecayedRatio(self._SHARE_DECAY, weight, weight)  # accepted tokens over expected ones
        self.share = 1.0
        self._shares = deque([1.0, 1.0], self._NUM_TEXTS)  # of the last texts; the first two are assumed
        self._num_trees = 0  # of this text
        self._coverage = DecayedRatio(self._SHARE_DECAY, weight, weight)
        self.text: str | None = None

    @property
    def coverage(self) -> float:
        return self._coverage.value

    @property
    def text_shares(self) -> Floats:
        """The shares of the last texts, and of this one in the place of its begin, [texts]."""
        return np.asarray(self._shares)

    @classmethod
    def from_profile(cls, profile: AcceptanceProfile) -> "AcceptanceModel":
        """Make a model that expects what was measured, and counts it as so many trees, up to some."""
        weight = min(float(profile.num_trees), cls._MOST_PROFILE)
        model = cls()
        model._ranks = [DecayedRatio(cls._DECAY, weight * p, weight) for p in profile.by_rank]
        model._coverage = DecayedRatio(cls._SHARE_DECAY, cls._PRIOR_WEIGHT * profile.coverage, cls._PRIOR_WEIGHT)
        model.share, model.text = min(profile.share, cls._MOST_SHARE), profile.text
        model._came_true = DecayedRatio(cls._SHARE_DECAY, cls._TEXT_WEIGHT * profile.share, cls._TEXT_WEIGHT)
        model._shares.clear()
        model._shares.extend(min(share, cls._MOST_SHARE) for share in profile.text_shares or (profile.share,))
        return model

    @classmethod
    def assumed(cls, by_rank: Sequence[float], share: float = 1.0) -> "AcceptanceModel":
        """Make a model with these probabilities, as if they had been observed."""
        model = cls()
        model._ranks = [DecayedRatio(cls._DECAY, probability, 1.0) for probability in by_rank]
        model.share = share
        return model

    def begin_text(self) -> None:
        """Expect of the next text what came true of those that were easiest to predict: it may be one of them."""
        if self._num_trees >= self._LEAST_TREES:
            self._shares.append(self.share)
        self._num_trees = 0
        self.share = float(np.quantile(self._shares, self._EASY))
        self._came_true = DecayedRatio(self._SHARE_DECAY, self._TEXT_WEIGHT * self.share, self._TEXT_WEIGHT)

    def observe(self, tree: TokenTree, acceptance: Acceptance) -> None:
        """Count the ranks at each node of the accepted path that has draft tokens."""
        self._coverage.observe(tree.num_guessed > 0, 1)
        if not tree.num_guessed:
            return
        self._num_trees += 1
        self._came_true.observe(len(acceptance.path), self.expected_of(tree))
        self.share = min(self._came_true.value, self._MOST_SHARE)
        below: dict[int, list[int]] = {node: [] for node in (0, *acceptance.path)}
        for node, parent in enumerate(tree.parents):
            if parent in below:
                below[parent].append(node)
        for children, accepted in zip_longest(below.values(), acceptance.path, fillvalue=None):
            assert children is not None
            for rank, child in zip(self._ranks, children, strict=False):
                rank.observe(child == accepted, 1)

    def expected_of(self, tree: TokenTree) -> float:
        """Return the accepted tokens that the probabilities promise of a tree."""
        by_rank = [rank.value for rank in self._ranks]
        path_probs, num_children = [1.0] + [0.0] * tree.num_guessed, [0] * len(tree)
        for node, parent in enumerate(tree.parents[1:], start=1):
            rank = num_children[parent]
            num_children[parent] += 1
            if rank < len(by_rank):
                path_probs[node] = path_probs[parent] * by_rank[rank]
        return sum(path_probs) - 1.0

    def by_rank(self) -> Floats:
        """Return the probability of each rank, [ranks]; together at most 0.98."""
        probs = np.asarray([rank.value for rank in self._ranks])
        return np.asarray(probs * 0.98 / max(probs.sum(), 0.98))

    def expected_tokens(self, num_nodes: Ints, num_levels: Ints) -> Floats:
        """Return the tokens that a pass yields on average with each best-first tree, as `expected_tokens`."""
        return 1.0 + self.share * (expected_tokens(self.by_rank(), num_nodes, num_levels) - 1.0)


def expected_tokens(by_rank: Floats, num_nodes: Ints, num_levels: Ints) -> Floats:
    """Return the tokens that a pass yields on average with each best-first tree, the target's own included: [trees].

    Args:
        by_rank: [ranks] the probability that a draft token of each rank is right.
        num_nodes, num_levels: [trees] the limits of each tree.
    """
    most, deepest = int(num_nodes.max()), int(num_levels.max())
    level, paths = np.ones(1), np.empty(0)  # path probabilities of the last level, and of all levels
    accepted = np.zeros((deepest + 1, most + 1))
    for depth in range(1, deepest + 1):
        level = np.sort(np.outer(level, by_rank).ravel())[::-1][:most]
        paths = np.sort(np.concatenate([paths, level]))[::-1][:most]
        accepted[depth, 1 : len(paths) + 1] = paths.cumsum()
        accepted[depth, len(paths) + 1 :] = paths.sum()
    return np.asarray(1.0 + accepted[num_levels, num_nodes])

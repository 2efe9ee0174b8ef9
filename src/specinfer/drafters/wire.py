"""What rank 0 asks of a drafter on another rank, and the trees that come back, as whole numbers of 32 bits.

Fractions go as their bits, so that a tree is the same wherever it was grown. Of a distribution only the tokens and
their probabilities go, once for all guesses that hang on a node. What a request asks for is told once, as text (JSON).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specinfer.tree import Distribution, Draw, TokenTree, TreeBudget

Numbers = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]
_CHOSEN = -1  # in place of how many tokens were removed from the distribution of a draw


class Kind(IntEnum):
    """What a letter to a rank is; one without any numbers is the last."""

    FRESH = 1  # a drafter begins anew
    DRAFT = 2  # an `Ask`, which trees or a failure answer


@dataclass(frozen=True, slots=True)
class News:
    """What became of a request that the drafter knows.

    Attributes:
        tokens: Said since it was told last; None: the request ended, or was put back.
    """

    key: int
    tokens: Sequence[int] | None


@dataclass(frozen=True, slots=True)
class Learned:
    """What is known by now of guesses that are chosen for greedy requests, or for sampled ones."""

    is_sampled: bool
    state: Floats


@dataclass(frozen=True, slots=True)
class Wish:
    """A request that a tree is wanted for.

    Attributes:
        about: What it asks for; empty if that was told before.
        tokens: Known since it was told last.
        first_draw: The number of the tree's first draw, as `Request.begin_draws` counts.
    """

    key: int
    about: str
    tokens: Sequence[int]
    first_draw: int
    budget: TreeBudget


@dataclass(frozen=True, slots=True)
class Ask:
    """What one drafter is to know, in this order, and the trees that are wanted of it."""

    news: list[News] = field(default_factory=list)
    learned: list[Learned] = field(default_factory=list)
    wishes: list[Wish] = field(default_factory=list)


class Writer:
    """Makes a message."""

    def __init__(self, *numbers: int) -> None:
        self._parts: list[Numbers] = []
        self.put(*numbers)

    def put(self, *numbers: int) -> None:
        self._parts.append(np.asarray(numbers, dtype=np.int32))

    def ints(self, values: Sequence[int] | npt.NDArray[Any]) -> None:
        self.put(len(values))
        self._parts.append(np.asarray(values, dtype=np.int32))

    def long(self, value: int) -> None:
        self._parts.append(np.asarray([value], dtype=np.int64).view(np.int32))

    def floats(self, values: Sequence[float] | Floats) -> None:
        self.put(len(values))
        self._parts.append(np.ascontiguousarray(values, dtype=np.float64).view(np.int32))

    def text(self, text: str) -> None:
        encoded = text.encode()
        self.put(len(encoded))
        self._parts.append(np.frombuffer(encoded + bytes(-len(encoded) % 4), dtype=np.int32))

    def message(self) -> Tensor:
        """[count] int32."""
        return torch.from_numpy(np.concatenate(self._parts))


class Reader:
    """Reads a message in the order in which it was written."""

    def __init__(self, message: Tensor) -> None:
        self._numbers, self._start = message.numpy(), 0

    def _take(self, count: int) -> Numbers:
        start, self._start = self._start, self._start + count
        assert 0 <= start <= self._start <= len(self._numbers)
        return self._numbers[start : self._start]

    def get(self) -> int:
        return int(self._take(1)[0])

    def ints(self) -> npt.NDArray[np.int64]:
        return self._take(self.get()).astype(np.int64)

    def long(self) -> int:
        return int(self._take(2).copy().view(np.int64)[0])

    def floats(self) -> Floats:
        return self._take(2 * self.get()).copy().view(np.float64)

    def text(self) -> str:
        count = self.get()
        return self._take(-(-count // 4)).tobytes()[:count].decode()


def write_ask(drafter: int, ask: Ask) -> Tensor:
    """[count] int32; `read_ask` reads it after kind and drafter."""
    to = Writer(Kind.DRAFT, drafter, len(ask.news), len(ask.learned), len(ask.wishes))
    for news in ask.news:
        to.put(news.key, news.tokens is None)
        to.ints(news.tokens or ())
    for learned in ask.learned:
        to.put(learned.is_sampled)
        to.floats(learned.state)
    for wish in ask.wishes:
        budget = wish.budget
        to.put(wish.key, budget.max_nodes, budget.max_depth, budget.num_drafters)
        to.long(wish.first_draw)
        to.floats((budget.min_path_prob, budget.min_gain))
        to.ints(budget.widths)
        to.ints(wish.tokens)
        to.text(wish.about)
    return to.message()


def read_ask(rest: Reader) -> Ask:
    num_news, num_learned, num_wishes = rest.get(), rest.get(), rest.get()
    news = []
    for _ in range(num_news):
        key, is_over, tokens = rest.get(), rest.get(), rest.ints().tolist()
        news.append(News(key, None if is_over else tokens))
    learned = [Learned(bool(rest.get()), rest.floats()) for _ in range(num_learned)]
    wishes = []
    for _ in range(num_wishes):
        key, max_nodes, max_depth, num_drafters = rest.get(), rest.get(), rest.get(), rest.get()
        first_draw = rest.long()
        min_path_prob, min_gain = rest.floats().tolist()
        widths, tokens = tuple(rest.ints().tolist()), rest.ints().tolist()
        budget = TreeBudget(max_nodes, max_depth, widths, num_drafters, min_path_prob, min_gain)
        wishes.append(Wish(key, rest.text(), tokens, first_draw, budget))
    return Ask(news, learned, wishes)


def write_trees(trees: Sequence[TokenTree]) -> Tensor:
    """[count] int32: trees of one drafter."""
    to = Writer(True, len(trees))
    for tree in trees:
        to.ints(tree.tokens)
        to.ints(tree.parents)
        to.ints([draw.node for draw in tree.draws])
        to.floats([draw.confidence for draw in tree.draws])
        _write_distributions(to, tree)
    return to.message()


def _write_distributions(to: Writer, tree: TokenTree) -> None:
    """What hangs on one node was drawn from one distribution, less what was drawn before."""
    distributions = {tree.parents[draw.node]: draw.distribution for draw in tree.draws if draw.distribution is not None}
    to.ints(list(distributions))
    for distribution in distributions.values():
        to.ints(distribution.token_ids)
        to.floats(distribution.probs)
    if distributions:
        removed = [None if draw.distribution is None else draw.distribution.removed for draw in tree.draws]
        to.ints([_CHOSEN if places is None else len(places) for places in removed])
        to.ints([place for places in removed for place in places or ()])


def write_failure(why: str) -> Tensor:
    """[count] int32: there are no trees."""
    to = Writer(False)
    to.text(why)
    return to.message()


def read_trees(message: Tensor, drafter: str) -> list[TokenTree]:
    """What `write_trees` was given; all guesses are this drafter's.

    Raises:
        RuntimeError: It is what `write_failure` was given.
    """
    rest = Reader(message)
    if not rest.get():
        raise RuntimeError(rest.text())
    return [_read_tree(rest, drafter) for _ in range(rest.get())]


def _read_tree(rest: Reader, drafter: str) -> TokenTree:
    tokens, parents = tuple(rest.ints().tolist()), tuple(rest.ints().tolist())
    nodes, confidence = rest.ints().tolist(), rest.floats().tolist()
    distributions = {node: (rest.ints(), rest.floats()) for node in rest.ints().tolist()}
    drawn: list[Distribution | None] = [None] * len(nodes)
    if distributions:
        counts, removed = rest.ints().tolist(), iter(rest.ints().tolist())
        for i, count in enumerate(counts):
            if count != _CHOSEN:
                drawn[i] = Distribution(*distributions[parents[nodes[i]]], tuple(islice(removed, count)))
    draws = zip(nodes, drawn, confidence, strict=True)
    return TokenTree(
        tokens, parents, tuple([Draw(node, drafter, distribution, sure) for node, distribution, sure in draws])
    )

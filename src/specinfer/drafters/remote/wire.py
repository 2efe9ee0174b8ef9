"""Messages between rank 0 and a drafter on another rank, and the trees that come back, as 32-bit integers.

Floats are sent as their bits, so that a tree is the same wherever it was grown. Of a distribution only the tokens and
their probabilities are sent, once for all children of a node. The parameters of a request are sent once, as text
(JSON).
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

from specinfer.core.draws import Floats
from specinfer.core.tree import Distribution, Draw, TokenTree, TreeBudget

Numbers = npt.NDArray[np.int32]
_CHOSEN = -1  # stands for a chosen token, in place of the number of tokens removed from a draw's distribution


class Kind(IntEnum):
    """The kind of a message to a rank; a message without any numbers is the last one."""

    FRESH = 1  # a drafter starts from scratch
    DRAFT = 2  # a `DraftRequest`, answered by trees or a failure


@dataclass(frozen=True, slots=True)
class RequestUpdate:
    """The progress of a request that the drafter knows.

    Attributes:
        tokens: The tokens emitted since the last message, or None if the request ended or was preempted.
    """

    key: int
    tokens: Sequence[int] | None


@dataclass(frozen=True, slots=True)
class CalibrationState:
    """The calibration state of the drafter's tokens, for greedy requests or for sampled ones."""

    is_sampled: bool
    state: Floats


@dataclass(frozen=True, slots=True)
class TreeRequest:
    """A request that needs a tree.

    Attributes:
        about: The request's description; empty if it was sent before.
        tokens: The tokens that became known since the last message.
        first_draw: The number of the tree's first draw, as `DraftState.begin_draws` counts.
    """

    key: int
    about: str
    tokens: Sequence[int]
    first_draw: int
    budget: TreeBudget


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """The updates for one drafter, in this order, and the trees it is to grow."""

    updates: list[RequestUpdate] = field(default_factory=list)
    learned: list[CalibrationState] = field(default_factory=list)
    tree_requests: list[TreeRequest] = field(default_factory=list)


class Writer:
    """A message being written."""

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
        """Return the message, [count] int32."""
        return torch.from_numpy(np.concatenate(self._parts))


class Reader:
    """A message that is read in the order in which it was written."""

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


def write_draft_request(drafter: int, draft_request: DraftRequest) -> Tensor:
    """Return a message, [count] int32; `read_draft_request` reads it after its kind and drafter."""
    to = Writer(
        Kind.DRAFT, drafter, len(draft_request.updates), len(draft_request.learned), len(draft_request.tree_requests)
    )
    for update in draft_request.updates:
        to.put(update.key, update.tokens is None)
        to.ints(update.tokens or ())
    for learned in draft_request.learned:
        to.put(learned.is_sampled)
        to.floats(learned.state)
    for tree_request in draft_request.tree_requests:
        budget = tree_request.budget
        to.put(tree_request.key, budget.max_nodes, budget.max_depth, budget.num_drafters)
        to.long(tree_request.first_draw)
        to.floats((budget.min_path_prob, budget.min_gain))
        to.ints(budget.widths)
        to.ints(tree_request.tokens)
        to.text(tree_request.about)
    return to.message()


def read_draft_request(rest: Reader) -> DraftRequest:
    num_updates, num_learned, num_trees = rest.get(), rest.get(), rest.get()
    updates = []
    for _ in range(num_updates):
        key, is_over, tokens = rest.get(), rest.get(), rest.ints().tolist()
        updates.append(RequestUpdate(key, None if is_over else tokens))
    learned = [CalibrationState(bool(rest.get()), rest.floats()) for _ in range(num_learned)]
    tree_requests = []
    for _ in range(num_trees):
        key, max_nodes, max_depth, num_drafters = rest.get(), rest.get(), rest.get(), rest.get()
        first_draw = rest.long()
        min_path_prob, min_gain = rest.floats().tolist()
        widths, tokens = tuple(rest.ints().tolist()), rest.ints().tolist()
        budget = TreeBudget(max_nodes, max_depth, widths, num_drafters, min_path_prob, min_gain)
        tree_requests.append(TreeRequest(key, rest.text(), tokens, first_draw, budget))
    return DraftRequest(updates, learned, tree_requests)


def write_trees(trees: Sequence[TokenTree]) -> Tensor:
    """Return a message with the trees of one drafter, [count] int32."""
    to = Writer(True, len(trees))
    for tree in trees:
        to.ints(tree.tokens)
        to.ints(tree.parents)
        to.ints([draw.node for draw in tree.draws])
        to.floats([draw.confidence for draw in tree.draws])
        _write_distributions(to, tree)
    return to.message()


def _write_distributions(to: Writer, tree: TokenTree) -> None:
    """Write distributions; siblings were drawn from one distribution, without the tokens drawn before."""
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
    """Return a message that there are no trees, [count] int32."""
    to = Writer(False)
    to.text(why)
    return to.message()


def read_trees(message: Tensor, drafter: str) -> list[TokenTree]:
    """Return the trees passed to `write_trees`; all draft tokens come from this drafter.

    Raises:
        RuntimeError: The message is from `write_failure`.
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

"""RemoteDrafter: a small model on another rank, as rank 0 sees it.

The progress of requests is sent along with the next call, so that a step takes one message each way. The message
contains everything the draft depends on, so the trees are those that the same drafter would grow here.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from specinfer.core.draws import Floats
from specinfer.core.request import Request, Span
from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.drafters.base import Draft
from specinfer.drafters.growth.calibration import Calibration, source
from specinfer.drafters.kind import DraftKind
from specinfer.drafters.remote.request_proxy import can_be_sent, describe
from specinfer.drafters.remote.wire import (
    CalibrationState,
    DraftRequest,
    RequestUpdate,
    TreeRequest,
    pack,
    read_trees,
    write_draft_request,
)
from specinfer.parallel.ranks import Ranks
from specinfer.verify import Acceptance

_MAX_KEY = 2**31


class Link(Protocol):
    """A connection that sends messages to one rank and receives its answers."""

    def send(self, message: Tensor) -> None:
        """Send [count] int32 that gets no answer."""
        ...

    def request(self, message: Tensor) -> Callable[[], Tensor]:
        """Send [count] int32; return a function that waits for the answer and may raise `RanksError`."""
        ...


class RankLink:
    """A link to another process, answered by the `RankService` of its `Worker`."""

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self._ranks, self._rank = ranks, rank

    def send(self, message: Tensor) -> None:
        self._ranks.check()
        try:
            self._ranks.connections.messages.send(message, self._rank)
        except BaseException as error:  # an interrupt too: half a message may be on its way
            self._ranks.fail(f"a message could not be sent to rank {self._rank}: {type(error).__name__} {error}")
            raise

    def request(self, message: Tensor) -> Callable[[], Tensor]:
        self.send(message)
        answer: Future[Tensor] = self._ranks.await_message(self._rank)
        return lambda: self._ranks.result(answer)


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """A small model that another rank has loaded.

    Attributes:
        number: Its number among all drafters on other ranks.
    """

    link: Link
    number: int


@dataclass(slots=True)
class _Sent:
    """The state that the other rank has of a request."""

    key: int
    num_tokens: int = 0
    is_growing: bool = False  # it keeps a tree and must learn what was accepted


class RemoteDrafter:
    """A drafter that grows trees like a `SmallModelDrafter` on another rank.

    Args:
        calibration: The acceptance probabilities, learned here and sent to the other rank.
    """

    kind = DraftKind(is_remote=True)

    def __init__(self, model: RemoteModel, name: str, draft_sampling: str, calibration: Calibration) -> None:
        self._model, self.name, self._calibration = model, name, calibration
        self._keys = itertools.count()
        self._requests: dict[str, _Sent] = {}
        self._updates: list[RequestUpdate] = []
        self._learned: dict[str, bytes] = {}  # the last state sent for each source
        about = {"name": name, "draft_sampling": draft_sampling}
        model.link.send(pack({"drafter": model.number, "reset": about}))

    def draft(self, spans: Sequence[Span], budgets: Sequence[TreeBudget]) -> list[TokenTree]:
        return self.begin(spans, budgets)()

    def begin(self, spans: Sequence[Span], budgets: Sequence[TreeBudget]) -> Draft:
        trees = [TokenTree.root(span.request.token_ids[-1]) for span in spans]
        wanted = [
            i
            for i, (span, budget) in enumerate(zip(spans, budgets, strict=True))
            if budget.max_nodes and can_be_sent(span.request)
        ]
        if not wanted:
            return lambda: trees
        updates, self._updates = self._updates, []
        tree_requests = [self._tree_request(spans[i].request, budgets[i]) for i in wanted]
        learned = self._learned_since([spans[i].request for i in wanted])
        answer = self._model.link.request(
            write_draft_request(self._model.number, DraftRequest(updates, learned, tree_requests))
        )

        def wait() -> list[TokenTree]:
            for i, tree in zip(wanted, read_trees(answer(), self.name), strict=True):
                trees[i] = tree
            return trees

        return wait

    def observe(self, request: Request, tree: TokenTree, acceptance: Acceptance) -> None:
        sent = self._requests.get(request.request_id)
        if sent is not None and sent.is_growing:
            self._updates.append(RequestUpdate(sent.key, self._new_tokens(request, sent)))
            sent.is_growing = False

    def forget(self, request_id: str) -> None:
        sent = self._requests.pop(request_id, None)
        if sent is not None:
            self._updates.append(RequestUpdate(sent.key, None))

    def _tree_request(self, request: Request, budget: TreeBudget) -> TreeRequest:
        sent = self._requests.get(request.request_id)
        about = ""
        if sent is None:
            sent = self._requests[request.request_id] = _Sent(next(self._keys) % _MAX_KEY)
            about = describe(request)
        sent.is_growing = True
        return TreeRequest(
            sent.key, about, self._new_tokens(request, sent), request.drafting.begin_draws(self.name),
            dataclasses.replace(budget, drafters=None),
        )  # fmt: skip

    def _new_tokens(self, request: Request, sent: _Sent) -> list[int]:
        tokens = request.token_ids[sent.num_tokens :]
        sent.num_tokens = len(request.token_ids)
        return tokens

    def _learned_since(self, requests: Sequence[Request]) -> list[CalibrationState]:
        """Return the changed calibration states that the draft of these requests depends on."""
        states = []
        for is_greedy, name in sorted({(request.params.is_greedy, source(self.name, request)) for request in requests}):
            state: Floats = self._calibration.state(name)
            if self._learned.get(name) != state.tobytes():
                self._learned[name] = state.tobytes()
                states.append(CalibrationState(not is_greedy, state))
        return states

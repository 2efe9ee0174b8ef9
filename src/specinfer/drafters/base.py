"""The interface between the engine and the drafters."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from specinfer.core.request import Request, Span
from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.drafters.merge.scoring import Losses
from specinfer.verify import Acceptance


class Drafter(Protocol):
    """A source of token trees that propose how requests continue. Wrong proposals cost time, never a wrong token."""

    @property
    def name(self) -> str:
        """The drafter's name, shown as the origin of the tokens it drafted."""
        ...

    def draft(self, spans: Sequence[Span], budgets: Sequence[TreeBudget]) -> list[TokenTree]:
        """Return one tree for each span, rooted at the request's last known token and within its budget.

        A drafter with nothing to propose returns the tree with only the root. Every span must produce a token. If a
        drafted token records a distribution, it must have been drawn from that distribution, given all that was
        recorded before it.
        """
        ...

    def observe(self, request: Request, tree: TokenTree, acceptance: Acceptance) -> None:
        """Take note of the part of the tree that was accepted; the request already contains the tokens of this step."""
        ...

    def forget(self, request_id: str) -> None:
        """Drop all state of the request, which ended or was preempted."""
        ...


Draft = Callable[[], list[TokenTree]]  # waits for trees that were requested, once; raises any failure of the drafter


class RemoteDrafting(Drafter, Protocol):
    """A drafter on another rank, which drafts at the same time as others."""

    def begin(self, spans: Sequence[Span], budgets: Sequence[TreeBudget]) -> Draft:
        """Start a draft, which returns the result of `draft`."""
        ...


class ScoredDrafter(Drafter, Protocol):
    """A drafter that can be scored on tokens that it was not asked to draft."""

    def can_read(self, request: Request) -> bool:
        """Return whether it can draft for this request now: a head reads only what the target has computed."""
        ...

    def replay(self, requests: Sequence[Request]) -> None:
        """Read the tokens that these requests emitted while this drafter was not asked."""
        ...

    def take_losses(self, request_id: str) -> Losses:
        """Return its losses on the tokens it was scored on since the last call."""
        ...


MAX_PROSPECT = 32  # the largest number of tokens in a prospect


class Prospect(NamedTuple):
    """One path that a lookup would draft first, known before it is asked, with the lookup's own confidence in it."""

    match: int = 0  # length of the text's suffix that also occurs where the tokens are copied from
    tokens: tuple[int, ...] = ()
    path_probs: tuple[float, ...] = ()  # [tokens] the lookup's own probability that the path is right up to here

    @property
    def reach(self) -> float:
        """The expected number of accepted tokens."""
        return sum(self.path_probs)


@runtime_checkable
class Lookup(Drafter, Protocol):
    """A drafter that is not a model: it looks up known text, and its drafts cost nearly nothing."""

    def prospects(self, spans: Sequence[Span]) -> list[Prospect]:
        """Return for each span the path it would draft first; it depends only on the texts known so far."""
        ...

"""The seam between the engine and whoever guesses."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from specinfer.drafters.scoring import Losses
from specinfer.request import Request, Span
from specinfer.tree import TokenTree, TreeBudget
from specinfer.verify import Acceptance


class Drafter(Protocol):
    """Guesses how requests go on. Wrong guesses cost time, never a wrong token."""

    @property
    def name(self) -> str:
        """Shown as the origin of the tokens it guessed."""
        ...

    def draft(self, spans: Sequence[Span], budgets: Sequence[TreeBudget]) -> list[TokenTree]:
        """One tree for each span, rooted at the request's last known token, within its budget.

        A drafter with nothing to say returns the tree without guesses. All spans say a token. A guess on
        record with a distribution must have been drawn from it, given all that stands on record before it.
        """
        ...

    def observe(self, request: Request, tree: TokenTree, acceptance: Acceptance) -> None:
        """What was kept of the tree; the tokens said in this step are now part of the request."""
        ...

    def forget(self, request_id: str) -> None:
        """The request ended or was put back; what is kept for it can go."""
        ...


class Draft(Protocol):
    """Trees that were asked for."""

    def wait(self) -> list[TokenTree]:
        """What `Drafter.draft` returns; called once.

        Raises:
            Exception: Whatever went wrong.
        """
        ...


@dataclass(frozen=True, slots=True)
class LaterDraft:
    """Trees that are grown when they are waited for: by this process, which has one thread for it."""

    grow: Callable[[], list[TokenTree]]

    def wait(self) -> list[TokenTree]:
        return self.grow()


@runtime_checkable
class Model(Drafter, Protocol):
    """A drafter whose guesses take time; one on another rank guesses while others do."""

    @property
    def is_remote(self) -> bool:
        """Whether it is on another rank."""
        ...

    def begin(self, spans: Sequence[Span], budgets: Sequence[TreeBudget]) -> Draft:
        """Asks for what `draft` returns."""
        ...


class ScoredDrafter(Drafter, Protocol):
    """One that can be scored on tokens it was not asked to guess."""

    def replay(self, requests: Sequence[Request]) -> None:
        """Reads what was said of these while it was not asked."""
        ...

    def take_losses(self, request_id: str) -> Losses:
        """Its losses on the tokens it was scored on since the last call."""
        ...


MAX_PROSPECT = 32  # tokens of a prospect at most


class Prospect(NamedTuple):
    """What a lookup would guess first, told before it is asked to: one path, and what the lookup thinks of it."""

    match: int = 0  # last tokens of the text that also stand where the guesses come from
    tokens: tuple[int, ...] = ()
    chances: tuple[float, ...] = ()  # [tokens] that the path is right up to here, by the lookup's own measure

    @property
    def reach(self) -> float:
        """How many of the tokens are expected to come true."""
        return sum(self.chances)


@runtime_checkable
class Lookup(Drafter, Protocol):
    """A drafter that is no model: it looks known text up, and its guesses cost nearly nothing."""

    def prospects(self, spans: Sequence[Span]) -> list[Prospect]:
        """For each span what it would guess first; a function of the texts known so far."""
        ...

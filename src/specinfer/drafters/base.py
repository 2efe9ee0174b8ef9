"""The seam between the engine and whoever guesses."""

from collections.abc import Sequence
from typing import Protocol

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
        record with a law must have been drawn from it, given all that stands on record before it.
        """
        ...

    def observe(self, request: Request, tree: TokenTree, acceptance: Acceptance) -> None:
        """What was kept of the tree; the tokens said in this step are now part of the request."""
        ...

    def forget(self, request_id: str) -> None:
        """The request ended or was put back; what is kept for it can go."""
        ...


class ScoredDrafter(Drafter, Protocol):
    """One that can be scored on tokens it was not asked to guess."""

    def replay(self, requests: Sequence[Request]) -> None:
        """Reads what was said of these while it was not asked."""
        ...

    def take_losses(self, request_id: str) -> Losses:
        """Its losses on the tokens it was scored on since the last call."""
        ...

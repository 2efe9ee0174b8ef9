"""The seam between the engine and whoever guesses."""

from collections.abc import Sequence
from typing import Protocol

from specinfer.request import Request, Span
from specinfer.tree import TokenTree, TreeBudget


class Drafter(Protocol):
    """Guesses how requests go on. Wrong guesses cost time, never a wrong token."""

    @property
    def name(self) -> str:
        """Shown as the origin of the tokens it guessed."""
        ...

    def draft(self, spans: Sequence[Span], budgets: Sequence[TreeBudget]) -> list[TokenTree]:
        """One tree for each span, rooted at the request's last known token, within its budget.

        A drafter with nothing to say returns the tree without guesses. All spans say a token.
        """
        ...

    def observe(self, request: Request) -> None:
        """The tokens said in this step are now part of the request."""
        ...

    def forget(self, request_id: str) -> None:
        """The request ended or was put back; what is kept for it can go."""
        ...

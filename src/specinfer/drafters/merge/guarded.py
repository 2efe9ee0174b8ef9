"""A drafter whose failures cost its drafts, not the step."""

import logging
from collections.abc import Sequence
from functools import partial
from typing import NoReturn, cast

import numpy as np

from specinfer.core.errors import EngineDeadError
from specinfer.core.lookups import GRAMMAR, PREDICTION
from specinfer.core.request import Request, Span
from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.drafters.base import Draft, Drafter, RemoteDrafting, ScoredDrafter
from specinfer.drafters.kind import draft_kind
from specinfer.drafters.lookup.grammar import has_forced
from specinfer.drafters.merge.selection import Selection
from specinfer.verify import Acceptance

MAX_FAILURES = 3  # in a row; after that a drafter is not asked any more
logger = logging.getLogger(__name__)


class GuardedDrafter:
    """One drafter of several, with the count of its failures.

    Args:
        vocab_size: The target's vocabulary size, or None if unknown; a drafter that proposes other tokens fails.
    """

    def __init__(self, drafter: Drafter, vocab_size: int | None = None) -> None:
        self.drafter, self.name, self._vocab_size = drafter, drafter.name, vocab_size
        kind = draft_kind(drafter)
        self.is_lookup, self.is_remote = kind is None, kind is not None and kind.is_remote
        self.num_failures = 0  # in a row
        self.num_unscored = 0  # failures of scoring in a row

    @property
    def is_able(self) -> bool:
        """True if it has not failed too often."""
        return self.num_failures < MAX_FAILURES

    def is_asked(self, request: Request, budget: TreeBudget) -> bool:
        """Return whether it drafts for a request with this budget; no selection leaves out what the request brings."""
        if self.name == GRAMMAR:
            return has_forced(request)
        return bool(request.prediction_ids) if self.name == PREDICTION else budget.asks(self.name)

    def launch(self, spans: Sequence[Span], budgets: Sequence[TreeBudget]) -> Draft:
        """Start a draft, which raises what fails here."""
        if not self.is_remote:
            return partial(self.drafter.draft, spans, budgets)
        try:
            return cast(RemoteDrafting, self.drafter).begin(spans, budgets)
        except Exception as error:
            return partial(_raise, error)

    def collect(self, draft: Draft, spans: Sequence[Span], budgets: Sequence[TreeBudget]) -> list[TokenTree]:
        """Return the trees of a draft, with only their roots if it failed.

        Raises:
            EngineDeadError: A rank is gone, and the target with it.
        """
        try:
            trees = draft()
            if len(trees) != len(spans) or not self._are_sound(trees, spans, budgets):
                raise ValueError("a drafter must return a tree for each request, within its budget and the vocabulary")
        except EngineDeadError:
            raise
        except Exception:
            self._note_failure()
            for span in spans:
                self.forget(span.request.request_id)
            return [TokenTree.root(span.request.token_ids[-1]) for span in spans]
        self.num_failures = 0
        return trees

    def _are_sound(self, trees: Sequence[TokenTree], spans: Sequence[Span], budgets: Sequence[TreeBudget]) -> bool:
        """Return whether trees have the roots of their requests, and are within their budgets and the vocabulary."""
        if any(tree.num_guessed > budget.max_nodes for tree, budget in zip(trees, budgets, strict=True)):
            return False
        if any(tree.arrays.tokens[0] != span.request.token_ids[-1] for tree, span in zip(trees, spans, strict=True)):
            return False
        arrays = [tree.arrays for tree in trees]
        tokens, depths = (np.concatenate([tree[i] for tree in arrays]) for i in (0, 2))
        is_known = tokens.min() >= 0 and (self._vocab_size is None or tokens.max() < self._vocab_size)
        limits = [budget.max_depth for budget in budgets]
        if depths.max() > min(limits):
            return bool(is_known) and bool((depths <= np.repeat(limits, [len(tree) for tree in trees])).all())
        return bool(is_known)

    def score(self, selection: Selection, requests: Sequence[Request]) -> None:
        """Pass its losses to the selection; a failure costs its scores."""
        drafter = cast(ScoredDrafter, self.drafter)
        due = [request for request in selection.due(requests, self.name) if drafter.can_read(request)]
        try:
            if due:
                drafter.replay(due)
            for request in requests:
                selection.learn(request.request_id, self.name, drafter.take_losses(request.request_id))
            if due:
                self.num_unscored = 0
        except Exception:
            self.num_unscored += 1
            logger.exception("drafter %s cannot be scored; going on with what is known of it", self.name)
            for request in due:
                self.forget(request.request_id)
        selection.note_replay(due, self.name)

    def can_read(self, request: Request) -> bool:
        """Return whether it can draft for this request now."""
        return cast(ScoredDrafter, self.drafter).can_read(request)

    def observe(self, request: Request, tree: TokenTree, acceptance: Acceptance) -> None:
        try:
            self.drafter.observe(request, tree, acceptance)
        except Exception:
            self._note_failure()

    def forget(self, request_id: str) -> None:
        try:
            self.drafter.forget(request_id)
        except Exception:
            self._note_failure()

    def _note_failure(self) -> None:
        """Count a failure and log it; call this while the exception is handled."""
        self.num_failures += 1
        logger.exception("drafter %s failed; going on without its guesses", self.name)
        if self.num_failures == MAX_FAILURES:
            logger.error("drafter %s failed %d times in a row; it is asked no more", self.name, MAX_FAILURES)


def _raise(error: Exception) -> NoReturn:
    raise error

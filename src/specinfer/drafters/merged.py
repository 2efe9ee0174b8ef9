"""Several drafters, one merged tree: itself a drafter, so the engine never knows how many there are.

Merge-based construction: SpecInfer (arXiv 2305.09781), Definition 3.2.
"""

import logging
from collections.abc import Sequence

from specinfer.drafters.base import Drafter
from specinfer.request import Request, Span
from specinfer.tree import TokenTree, TreeBudget

_MAX_FAILURES = 3
logger = logging.getLogger(__name__)


class MergedDrafter:
    """Unites the guesses of its drafters by token path; earlier drafters come first in the budget."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = tuple(drafters)
        self._num_failures = [0] * len(self._drafters)  # in a row

    @property
    def name(self) -> str:
        return "+".join(drafter.name for drafter in self._drafters)

    def draft(self, spans: Sequence[Span], budgets: Sequence[TreeBudget]) -> list[TokenTree]:
        proposals = []
        for i, drafter in enumerate(self._drafters):
            if self._num_failures[i] == _MAX_FAILURES:
                continue
            try:
                proposals.append(drafter.draft(spans, budgets))
                self._num_failures[i] = 0
            except Exception:  # one drafter's failure costs its guesses, not the step
                self._num_failures[i] += 1
                logger.exception("drafter %s failed; going on without its guesses", drafter.name)
                if self._num_failures[i] == _MAX_FAILURES:
                    logger.error(
                        "drafter %s failed %d times in a row; it is asked no more", drafter.name, _MAX_FAILURES
                    )
                for span in spans:
                    drafter.forget(span.request.request_id)
        if not proposals:
            return [TokenTree.root(span.request.token_ids[-1]) for span in spans]
        return [
            TokenTree.merge(trees, budget.num_nodes)
            for trees, budget in zip(zip(*proposals, strict=True), budgets, strict=True)
        ]

    def observe(self, request: Request) -> None:
        for drafter in self._drafters:
            drafter.observe(request)

    def forget(self, request_id: str) -> None:
        for drafter in self._drafters:
            drafter.forget(request_id)

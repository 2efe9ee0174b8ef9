"""Drafts from a prediction that the user supplies: text that the output resembles, such as a file before an edit."""

from collections.abc import Sequence

from specinfer.core.lookups import PREDICTION
from specinfer.core.request import Request, Span
from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.drafters.lookup.passage import Alignment
from specinfer.drafters.lookup.suffix_growth import grow
from specinfer.verify import Acceptance


class PredictionDrafter:
    """A drafter that proposes the tokens of the user's prediction."""

    name = PREDICTION

    def __init__(self) -> None:
        self._alignments: dict[str, tuple[Request, Alignment]] = {}

    def draft(self, spans: Sequence[Span], budgets: Sequence[TreeBudget]) -> list[TokenTree]:
        return [self._draft_one(span.request, budget) for span, budget in zip(spans, budgets, strict=True)]

    def _draft_one(self, request: Request, budget: TreeBudget) -> TokenTree:
        root = request.token_ids[-1]
        if not (budget.max_nodes and budget.max_depth and request.prediction_ids):
            return TokenTree.root(root)
        known, alignment = self._alignments.get(request.request_id, (None, None))
        if alignment is None or known is not request:
            alignment = Alignment(request.prediction_ids, begins=True)
            self._alignments[request.request_id] = request, alignment
        alignment.read(request.token_ids[len(request.prompt_ids) + alignment.num_read :])
        return grow(root, alignment.matches(self.name), budget)

    def observe(self, request: Request, tree: TokenTree, acceptance: Acceptance) -> None:
        pass  # the output is read when drafting

    def forget(self, request_id: str) -> None:
        self._alignments.pop(request_id, None)

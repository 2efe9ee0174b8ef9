"""A drafter that merges the trees of several drafters, so the engine never knows how many there are.

Merge-based construction: SpecInfer (arXiv 2305.09781), Definition 3.2. Each drafter grows a fixed expansion, and the
tree is the union. Best first there is one budget. Chosen tokens compete for it across drafters, by their probability of
acceptance. Drawn tokens may not be dropped, so drafters get shares of the budget before they draw, by their accepted
tokens so far. Drafters that are models may be on different ranks and draft at the same time, as in the paper (its data
parallelism); what they draft does not depend on where they run.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn, cast

from specinfer.core.errors import EngineDeadError
from specinfer.core.request import Request, Span
from specinfer.core.tree import OFF, TokenTree, TreeBudget
from specinfer.drafters.base import AsyncDrafter, Draft, Drafter, LaterDraft, ScoredDrafter
from specinfer.drafters.growth.calibration import Calibration
from specinfer.drafters.lookup.prediction import PredictionDrafter
from specinfer.drafters.merge.budget_split import BudgetSplit
from specinfer.drafters.merge.pruning import Pruning
from specinfer.drafters.merge.selection import Selection
from specinfer.verify import Acceptance

MAX_FAILURES = 3
logger = logging.getLogger(__name__)


class MergedDrafter:
    """A drafter that unites the trees of its drafters by token path.

    Args:
        may_choose: True if drafted tokens are chosen, not drawn, so the best of all may be kept and the others dropped.
        num_drafters: The number of drafters that draft for every request, or None for all.
        vocab_size: The target's vocabulary size; a drafter that proposes other tokens fails.
        selection: The choice of drafters for each request, or None for all. The models it names can be scored.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        calibration: Calibration | None = None,
        *,
        may_choose: bool = True,
        num_drafters: int | None = None,
        vocab_size: int | None = None,
        selection: Selection | None = None,
    ) -> None:
        assert len({drafter.name for drafter in drafters}) == len(drafters), "what is learned is kept by name"
        self._vocab_size = vocab_size
        self._drafters = tuple(drafters)
        # Once: checking a protocol takes longer than many drafters.
        self._models = {i: one for i, one in enumerate(self._drafters) if isinstance(one, AsyncDrafter)}
        self.num_drafters = len(self._drafters) if num_drafters is None else num_drafters
        self.calibration = calibration or Calibration()
        self._pruning = Pruning(self.calibration)
        self._may_choose = may_choose
        self._num_failures = [0] * len(self._drafters)  # in a row
        self._num_unscored = [0] * len(self._drafters)  # failures of scoring in a row
        self._budget_split = BudgetSplit([drafter.name for drafter in self._drafters])
        self.selection = selection

    @property
    def name(self) -> str:
        return "+".join(drafter.name for drafter in self._drafters)

    @property
    def drafters(self) -> tuple[Drafter, ...]:
        return self._drafters

    def draft(self, spans: Sequence[Span], budgets: Sequence[TreeBudget]) -> list[TokenTree]:
        if self.selection is not None:
            budgets = self._select(self.selection, spans, budgets)
        drafted = self._ask_all(spans, budgets)
        proposals: list[list[TokenTree]] = [[] for _ in spans]
        for i in sorted(drafted):
            for span, trees, tree in zip(spans, proposals, drafted[i], strict=True):
                if tree is None:
                    continue
                if tree.num_guessed:
                    trees.append(tree)
                if self.selection is not None:
                    self.selection.note_lookup(span.request, self._drafters[i].name, tree)
        merged = [
            TokenTree.merge(trees or [TokenTree.root(span.request.token_ids[-1])])
            for span, trees in zip(spans, proposals, strict=True)
        ]
        return self._compete(spans, merged, [len(trees) for trees in proposals], budgets)

    def _ask_all(self, spans: Sequence[Span], budgets: Sequence[TreeBudget]) -> dict[int, list[TokenTree | None]]:
        """Return the trees of each drafter that can be asked; None for requests it was not asked for."""
        models = [i for i in self._able() if i in self._models]
        order = [i for i in self._able() if i not in models] + models
        asked: dict[int, list[TreeBudget]] = {}
        drafts: dict[int, Draft] = {}
        trees: dict[int, list[TokenTree]] = {}
        left = [budget.max_nodes for budget in budgets]
        for place, i in enumerate(order):
            shares = [
                self._share(budget, nodes, [j for j in order[place:] if self._is_asked(j, budget)])
                if self._is_asked(i, budget)
                else OFF
                for budget, nodes in zip(budgets, left, strict=True)
            ]
            if not any(share.max_nodes for share in shares):
                continue
            asked[i] = shares
            if i in models:  # models draft at the same time: none gets what another leaves over
                left = [nodes - share.max_nodes for nodes, share in zip(left, shares, strict=True)]
            else:
                trees[i] = self._ask(i, spans, shares, partial(self._drafters[i].draft, spans, shares))
                left = [nodes - tree.num_guessed for nodes, tree in zip(left, trees[i], strict=True)]
        # Models on other ranks begin first; meanwhile this rank runs its own.
        models = sorted((i for i in models if i in asked), key=lambda i: self._models[i].is_remote)
        for i in reversed(models):
            drafts[i] = self._begin(i, spans, asked[i])
        for i in models:
            trees[i] = self._ask(i, spans, asked[i], drafts[i].wait)
        return {
            i: [tree if share.max_nodes else None for tree, share in zip(trees[i], shares, strict=True)]
            for i, shares in asked.items()
        }

    def _begin(self, i: int, spans: Sequence[Span], budgets: Sequence[TreeBudget]) -> Draft:
        try:
            return self._models[i].begin(spans, budgets)
        except Exception as error:
            return LaterDraft(partial(_raise, error))

    def _able(self) -> list[int]:
        """Return the drafters that have not failed too often."""
        return [i for i, failures in enumerate(self._num_failures) if failures < MAX_FAILURES]

    def _select(
        self, selection: Selection, spans: Sequence[Span], budgets: Sequence[TreeBudget]
    ) -> Sequence[TreeBudget]:
        """Return the budgets, restricted to the drafters to ask, after the models are scored on the known tokens."""
        open_ones = [budget.max_nodes > 0 and any(map(budget.asks, selection.models)) for budget in budgets]
        requests = [span.request for span, is_open in zip(spans, open_ones, strict=True) if is_open]
        able = self._able()
        for i in able:
            if self._drafters[i].name in selection.models and self._num_unscored[i] < MAX_FAILURES:
                self._score(i, selection, requests)
        # A drafter that cannot be scored is asked only if none can be scored.
        able = [i for i in able if self._num_unscored[i] < MAX_FAILURES] or able
        names = [self._drafters[i].name for i in able]
        return [
            selection.restrict(span.request, budget, names) if is_open else budget
            for span, budget, is_open in zip(spans, budgets, open_ones, strict=True)
        ]

    def _score(self, i: int, selection: Selection, requests: Sequence[Request]) -> None:
        """Pass one model's losses to the selection; its failure costs its scores, not the step."""
        drafter = cast(ScoredDrafter, self._drafters[i])
        due = selection.due(requests, drafter.name)
        try:
            if due:
                drafter.replay(due)
            for request in requests:
                selection.learn(request.request_id, drafter.name, drafter.take_losses(request.request_id))
            if due:
                self._num_unscored[i] = 0
        except Exception:
            self._num_unscored[i] += 1
            logger.exception("drafter %s cannot be scored; going on with what is known of it", drafter.name)
            for request in due:
                self._tell(i, lambda drafter, request=request: drafter.forget(request.request_id))  # type: ignore[misc]
        selection.note_replay(due, drafter.name)

    def _is_asked(self, i: int, budget: TreeBudget) -> bool:
        """Return whether to ask the drafter; a prediction belongs to the request, so no selection leaves it out."""
        drafter = self._drafters[i]
        return isinstance(drafter, PredictionDrafter) or budget.asks(drafter.name)

    def _share(self, budget: TreeBudget, num_left: int, left: Sequence[int]) -> TreeBudget:
        """Return the budget of the first of the drafters left; `num_left` nodes are left if tokens are drawn."""
        if self._may_choose:
            return budget.share(budget.max_nodes)
        if budget.widths:
            return budget.share(budget.max_nodes).cut(budget.max_depth, num_left)
        return budget.share(self._budget_split.share(num_left, left))

    def _ask(
        self,
        i: int,
        spans: Sequence[Span],
        budgets: Sequence[TreeBudget],
        draft: Callable[[], list[TokenTree]],
    ) -> list[TokenTree]:
        """Return one drafter's trees; its failure costs its drafts, not the step.

        Raises:
            EngineDeadError: A rank is gone, and the target with it.
        """
        try:
            trees = draft()
            if not all(map(self._is_sound, trees, spans, budgets)) or len(trees) != len(spans):
                raise ValueError("a drafter must return a tree for each request, within its budget and the vocabulary")
        except EngineDeadError:
            raise
        except Exception:
            self._note_failure(i)
            for span in spans:
                self._tell(i, lambda drafter, span=span: drafter.forget(span.request.request_id))  # type: ignore[misc]
            return [TokenTree.root(span.request.token_ids[-1]) for span in spans]
        self._num_failures[i] = 0
        return trees

    def _is_sound(self, tree: TokenTree, span: Span, budget: TreeBudget) -> bool:
        known = min(tree.tokens) >= 0 and (self._vocab_size is None or max(tree.tokens) < self._vocab_size)
        fits = tree.num_guessed <= budget.max_nodes and tree.max_depth <= budget.max_depth
        return known and fits and tree.tokens[0] == span.request.token_ids[-1]

    def _tell(self, i: int, message: Callable[[Drafter], None]) -> None:
        """Call one drafter; its failure must not end the step."""
        try:
            message(self._drafters[i])
        except Exception:
            self._note_failure(i)

    def _note_failure(self, i: int) -> None:
        """Count a failure and log it; call this while the exception is handled."""
        self._num_failures[i] += 1
        name = self._drafters[i].name
        logger.exception("drafter %s failed; going on without its guesses", name)
        if self._num_failures[i] == MAX_FAILURES:
            logger.error("drafter %s failed %d times in a row; it is asked no more", name, MAX_FAILURES)

    def _compete(
        self, spans: Sequence[Span], trees: list[TokenTree], num_makers: Sequence[int], budgets: Sequence[TreeBudget]
    ) -> list[TokenTree]:
        """Return the trees within their budgets; drawn tokens and small expansions are never dropped."""
        competing = []
        for k, (tree, number, budget) in enumerate(zip(trees, num_makers, budgets, strict=True)):
            is_large = tree.num_guessed > budget.max_nodes if budget.widths else number > 1 or budget.min_path_prob > 0
            if number and is_large and self._may_choose:
                competing.append(k)
        if competing:
            requests = [spans[k].request for k in competing]
            best = self._pruning.keep_best(requests, [trees[k] for k in competing], [budgets[k] for k in competing])
            for k, tree in zip(competing, best, strict=True):
                trees[k] = tree
        return trees

    def observe(self, request: Request, tree: TokenTree, acceptance: Acceptance) -> None:
        self.calibration.observe(request, tree, acceptance)
        self._budget_split.observe(tree, acceptance)
        self._pruning.observe(request, tree, acceptance)
        if self.selection is not None:
            self.selection.observe(request)
        for i in range(len(self._drafters)):
            self._tell(i, lambda drafter: drafter.observe(request, tree, acceptance))

    def forget(self, request_id: str) -> None:
        self._pruning.forget(request_id)
        if self.selection is not None:
            self.selection.forget(request_id)
        for i in range(len(self._drafters)):
            self._tell(i, lambda drafter: drafter.forget(request_id))


def _raise(error: Exception) -> NoReturn:
    raise error

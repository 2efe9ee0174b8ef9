"""Several drafters, one merged tree: itself a drafter, so the engine never knows how many there are.

Merge-based construction: SpecInfer (arXiv 2305.09781), Definition 3.2. A fixed expansion is grown by each drafter,
and the tree is the union. Best first there is one budget: guesses that were chosen compete for it, across drafters,
by their chance to be accepted; of guesses that were drawn none may be dropped, so drafters get shares of the budget
before they draw, by what came of their guesses so far.
"""

import logging
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np

from specinfer.drafters.base import Drafter, ScoredDrafter
from specinfer.drafters.calibration import Calibration
from specinfer.drafters.competition import Competition
from specinfer.drafters.prediction import PredictionDrafter
from specinfer.drafters.selection import Selection
from specinfer.request import Request, Span
from specinfer.tree import OFF, TokenTree, TreeBudget
from specinfer.verify import Acceptance

MAX_FAILURES = 3
logger = logging.getLogger(__name__)


class MergedDrafter:
    """Unites the guesses of its drafters by token path.

    Args:
        may_choose: Guesses are chosen, not drawn, so the best of all may be kept and the others dropped.
        num_drafters: How many of them guess for every request; None is all.
        vocab_size: The target's; a drafter that guesses other tokens fails.
        selection: Which of them are asked, request by request; None is all. The models it names can be scored.
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
        self.num_drafters = len(self._drafters) if num_drafters is None else num_drafters
        self.calibration = calibration or Calibration()
        self._competition = Competition(self.calibration)
        self._may_choose = may_choose
        self._num_failures = [0] * len(self._drafters)  # in a row
        self._num_unscored = [0] * len(self._drafters)  # the same, of scoring
        self._usefulness = Usefulness([drafter.name for drafter in self._drafters])
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
        asked = self._able()
        proposals: list[list[TokenTree]] = [[] for _ in spans]
        for i in asked:
            shares = [
                self._share(budget, trees, [j for j in asked[asked.index(i) :] if self._is_asked(j, budget)])
                if self._is_asked(i, budget)
                else OFF
                for budget, trees in zip(budgets, proposals, strict=True)
            ]
            if not any(share.max_nodes for share in shares):
                continue
            for span, share, trees, tree in zip(spans, shares, proposals, self._ask(i, spans, shares), strict=True):
                if tree.num_guessed:
                    trees.append(tree)
                if self.selection is not None and share.max_nodes:
                    self.selection.note_lookup(span.request, self._drafters[i].name, tree)
        merged = [
            TokenTree.merge(trees or [TokenTree.root(span.request.token_ids[-1])])
            for span, trees in zip(spans, proposals, strict=True)
        ]
        return self._compete(spans, merged, [len(trees) for trees in proposals], budgets)

    def _able(self) -> list[int]:
        """Those that have not failed too often."""
        return [i for i, failures in enumerate(self._num_failures) if failures < MAX_FAILURES]

    def _select(
        self, selection: Selection, spans: Sequence[Span], budgets: Sequence[TreeBudget]
    ) -> Sequence[TreeBudget]:
        """The budgets with the drafters that are asked, once the models are scored on what is known."""
        open_ones = [budget.max_nodes > 0 and any(map(budget.asks, selection.models)) for budget in budgets]
        requests = [span.request for span, is_open in zip(spans, open_ones, strict=True) if is_open]
        able = self._able()
        for i in able:
            if self._drafters[i].name in selection.models and self._num_unscored[i] < MAX_FAILURES:
                self._score(i, selection, requests)
        # Who cannot be scored is asked only if nobody can.
        able = [i for i in able if self._num_unscored[i] < MAX_FAILURES] or able
        names = [self._drafters[i].name for i in able]
        return [
            selection.restrict(span.request, budget, names) if is_open else budget
            for span, budget, is_open in zip(spans, budgets, open_ones, strict=True)
        ]

    def _score(self, i: int, selection: Selection, requests: Sequence[Request]) -> None:
        """Tells the selection how one model did; its failure costs its scores, not the step."""
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
        """A prediction is the request's own: no choice of drafters leaves it out."""
        drafter = self._drafters[i]
        return isinstance(drafter, PredictionDrafter) or budget.asks(drafter.name)

    def _share(self, budget: TreeBudget, trees: Sequence[TokenTree], left: Sequence[int]) -> TreeBudget:
        """For the first of the drafters left, after the others made these trees."""
        if self._may_choose:
            return budget.share(budget.max_nodes)
        num_left = budget.max_nodes - sum(tree.num_guessed for tree in trees)
        if budget.widths:
            return budget.share(budget.max_nodes).cut(budget.max_depth, num_left)
        return budget.share(self._usefulness.share(num_left, left))

    def _ask(self, i: int, spans: Sequence[Span], budgets: Sequence[TreeBudget]) -> list[TokenTree]:
        """One drafter's trees; its failure costs its guesses, not the step."""
        try:
            trees = self._drafters[i].draft(spans, budgets)
            if not all(map(self._is_sound, trees, spans, budgets)) or len(trees) != len(spans):
                raise ValueError("a drafter must return a tree for each request, within its budget and the vocabulary")
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
        """What one drafter makes of it must not end the step."""
        try:
            message(self._drafters[i])
        except Exception:
            self._note_failure(i)

    def _note_failure(self, i: int) -> None:
        """Called while its exception is handled."""
        self._num_failures[i] += 1
        name = self._drafters[i].name
        logger.exception("drafter %s failed; going on without its guesses", name)
        if self._num_failures[i] == MAX_FAILURES:
            logger.error("drafter %s failed %d times in a row; it is asked no more", name, MAX_FAILURES)

    def _compete(
        self, spans: Sequence[Span], trees: list[TokenTree], num_makers: Sequence[int], budgets: Sequence[TreeBudget]
    ) -> list[TokenTree]:
        """The trees within their budgets. Of drawn guesses, and of small expansions, none are left out."""
        competing = []
        for k, (tree, number, budget) in enumerate(zip(trees, num_makers, budgets, strict=True)):
            is_large = tree.num_guessed > budget.max_nodes if budget.widths else number > 1 or budget.least_chance > 0
            if number and is_large and self._may_choose:
                competing.append(k)
        if competing:
            requests = [spans[k].request for k in competing]
            best = self._competition.keep_best(requests, [trees[k] for k in competing], [budgets[k] for k in competing])
            for k, tree in zip(competing, best, strict=True):
                trees[k] = tree
        return trees

    def observe(self, request: Request, tree: TokenTree, acceptance: Acceptance) -> None:
        self.calibration.observe(request, tree, acceptance)
        self._usefulness.observe(tree, acceptance)
        self._competition.observe(request, tree, acceptance)
        if self.selection is not None:
            self.selection.observe(request)
        for i in range(len(self._drafters)):
            self._tell(i, lambda drafter: drafter.observe(request, tree, acceptance))

    def forget(self, request_id: str) -> None:
        self._competition.forget(request_id)
        if self.selection is not None:
            self.selection.forget(request_id)
        for i in range(len(self._drafters)):
            self._tell(i, lambda drafter: drafter.forget(request_id))


class Usefulness:
    """Which drafters' guesses were accepted, and the shares of a budget that follow from it.

    Only what earlier steps showed counts: a share must not depend on what is drawn with it.
    """

    _MEMORY = 0.98  # a tree: some fifty are remembered
    _LEAST = 0.1  # of an equal share: a drafter without any could never show that it has become useful

    def __init__(self, names: Sequence[str]) -> None:
        self._kept = dict.fromkeys(names, 1.0)

    def observe(self, tree: TokenTree, acceptance: Acceptance) -> None:
        kept = set(acceptance.path)
        makers: dict[int, set[str]] = {}
        for draw in tree.draws:
            if draw.node in kept:
                makers.setdefault(draw.node, set()).add(draw.drafter)
        for name in self._kept:
            self._kept[name] *= self._MEMORY
        for names in makers.values():
            for name in names & self._kept.keys():
                self._kept[name] += 1.0 / len(names)

    def share(self, max_nodes: int, drafters: Sequence[int]) -> int:
        """How many of the nodes are for the first of these drafters; the others come after it."""
        kept = np.asarray(list(self._kept.values()))[list(drafters)]
        # Squared: nodes given to the better drafter yield more, as long as it has some left to guess.
        weights = np.maximum(kept**2 / (kept**2).sum(), self._LEAST / len(drafters))
        return round(max_nodes * float(weights[0] / weights.sum()))

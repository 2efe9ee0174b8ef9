"""A drafter that merges the trees of several drafters, so the engine never knows how many there are.

Merge-based construction: SpecInfer (arXiv 2305.09781), Definition 3.2. Each drafter grows a fixed expansion, and the
tree is the union. Best first there is one budget. Chosen tokens compete for it across drafters, by their probability of
acceptance. Drawn tokens may not be dropped, so drafters get shares of the budget before they draw, by their accepted
tokens so far. Drafters that are models may be on different ranks and draft at the same time, as in the paper (its data
parallelism); what they draft does not depend on where they run.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from specinfer.core.lookups import AUTOMATIC, GRAMMAR, is_model
from specinfer.core.request import Request, Span
from specinfer.core.rules import is_random
from specinfer.core.tree import OFF, TokenTree, TreeBudget
from specinfer.drafters.base import Drafter
from specinfer.drafters.growth.calibration import Calibration
from specinfer.drafters.kind import draft_kind
from specinfer.drafters.lookup.grammar import legal_part
from specinfer.drafters.merge.budget_split import BudgetSplit
from specinfer.drafters.merge.guarded import MAX_FAILURES, GuardedDrafter
from specinfer.drafters.merge.need import is_worth_asking
from specinfer.drafters.merge.pruning import Pruning
from specinfer.drafters.merge.selection import Selection
from specinfer.drafters.small_model import SmallModelDrafter
from specinfer.verify import Acceptance


def parts_of(drafter: Drafter) -> Sequence[Drafter]:
    """Return the drafters that a merged one asks, or the drafter alone."""
    return drafter.drafters if isinstance(drafter, MergedDrafter) else (drafter,)


def reads_prompts(drafter: Drafter) -> bool:
    """Return whether a drafter, or one that a merged one asks, computes prompts before it drafts; lookups do not."""
    return any(kind.reads_prompts for part in parts_of(drafter) if (kind := draft_kind(part)) is not None)


def window_of(drafter: Drafter) -> int | None:
    """Return the tokens of a long prompt that a drafter computes at least, or None if it computes all."""
    kinds = [kind for part in parts_of(drafter) if (kind := draft_kind(part)) is not None and kind.reads_prompts]
    windows = [kind.window for kind in kinds if kind.window is not None]
    return max(windows) if windows and len(windows) == len(kinds) else None


def _depths(trees: Mapping[int, Sequence[TokenTree]], shares: Mapping[int, Sequence[TreeBudget]]) -> list[int]:
    """Return the levels of each request that these drafters grew, at least one where any was asked."""
    grown = [
        [max(tree.max_depth, min(budget.max_nodes, 1)) for tree, budget in zip(trees[i], shares[i], strict=True)]
        for i in shares
    ]
    return [max(levels) for levels in zip(*grown, strict=True)]


def levels_of_models(drafter: Drafter, trees: Sequence[TokenTree], budgets: Sequence[TreeBudget]) -> list[int]:
    """Return the levels that models drafted for each request in the last step, those without a token in its tree, too.

    Args:
        trees, budgets: What a drafter that is no merged one returned, and what it was asked for.
    """
    if isinstance(drafter, MergedDrafter):
        return drafter.num_model_levels
    return _depths({0: trees}, {0: budgets}) if is_model(drafter.name) else [0] * len(trees)


class MergedDrafter:
    """A drafter that unites the trees of its drafters by token path.

    Args:
        may_choose: True if drafted tokens are chosen, not drawn, so the best of all may be kept and the others dropped;
            never for a request whose own rule needs draws.
        vocab_size: The target's vocabulary size; a drafter that proposes other tokens fails.
        selection: The choice of drafters for each request, or None for all. The models it names can be scored.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        calibration: Calibration | None = None,
        *,
        may_choose: bool = True,
        vocab_size: int | None = None,
        selection: Selection | None = None,
    ) -> None:
        assert len({drafter.name for drafter in drafters}) == len(drafters), "what is learned is kept by name"
        self.drafters = tuple(drafters)
        self._guarded = [GuardedDrafter(drafter, vocab_size) for drafter in drafters]
        self.calibration = calibration or Calibration()
        self._pruning = Pruning(self.calibration)
        self._may_choose = may_choose
        self._budget_split = BudgetSplit([drafter.name for drafter in drafters])
        self.selection = selection
        self.num_model_levels: list[int] = []  # levels that models drafted for each span in the last step

    @property
    def name(self) -> str:
        return "+".join(drafter.name for drafter in self.drafters)

    @property
    def num_drafters(self) -> int:
        """The number of drafters that draft for a request, without its prediction and grammar, which few have."""
        if self.selection is not None:
            return self.selection.num_drafters
        return sum(drafter.name not in AUTOMATIC for drafter in self.drafters)

    @property
    def num_failures(self) -> dict[str, int]:
        """Failures in a row of each drafter, of drafting or of being scored, by name; none if all is well."""
        counts = {drafter.name: max(drafter.num_failures, drafter.num_unscored) for drafter in self._guarded}
        return {name: count for name, count in counts.items() if count}

    def draft(self, spans: Sequence[Span], budgets: Sequence[TreeBudget]) -> list[TokenTree]:
        if self.selection is not None:
            budgets = self._select(self.selection, spans, budgets)
        requests = [span.request for span in spans]
        # Drawn tokens may not be dropped, so that lookups leave room for those of models.
        budgets = [
            budget if self._may_choose_for(request) else budget.with_models or budget
            for request, budget in zip(requests, budgets, strict=True)
        ]
        num_left = [budget.max_nodes for budget in budgets]
        drafted: dict[int, list[TokenTree]] = {}
        for group, later in self._groups():
            if not later:  # the models
                budgets = self._settle(group, spans, budgets, drafted)
            shares = self._share(group, later, spans, budgets, num_left)
            drafts = {i: self._guarded[i].launch(spans, shares[i]) for i in reversed(shares)}
            trees = {i: self._guarded[i].collect(drafts[i], spans, shares[i]) for i in shares}
            trees = {i: self._legal(i, spans, grown) for i, grown in trees.items()}
            num_left = [left - sum(of[k].num_guessed for of in trees.values()) for k, left in enumerate(num_left)]
            drafted |= trees
            if self.selection is not None:
                for i in trees:
                    self.selection.note_lookups(spans, shares[i], self._guarded[i].name, trees[i])
            if not later:
                self.num_model_levels = _depths(trees, shares) or [0] * len(spans)
        return self._merge(spans, drafted, budgets)

    def _legal(self, i: int, spans: Sequence[Span], trees: list[TokenTree]) -> list[TokenTree]:
        """Return trees without what grammars forbid, which models and grammars never draft."""
        if not self._guarded[i].is_lookup or self._guarded[i].name == GRAMMAR:
            return trees
        return [legal_part(span.request, tree) for span, tree in zip(spans, trees, strict=True)]

    def _settle(
        self,
        models: Sequence[int],
        spans: Sequence[Span],
        budgets: Sequence[TreeBudget],
        drafted: dict[int, list[TokenTree]],
    ) -> list[TreeBudget]:
        """Return the budgets of models, or those of lookups alone if no model is worth its levels beside them.

        Args:
            drafted: Trees of the lookups.
        """
        names = [self._guarded[i].name for i in models]
        asking = [k for k, budget in enumerate(budgets) if budget.max_nodes and any(map(budget.asks, names))]
        is_open = [budgets[k].with_models is not None for k in asking]
        if not any(is_open):
            return list(budgets)
        trees = {k: [of[k] for of in drafted.values()] for k in asking}
        requests, limits = [spans[k].request for k in asking], [budgets[k].with_models or budgets[k] for k in asking]
        settled = list(budgets)
        if all(is_open) and not is_worth_asking(self.calibration, names, requests, list(trees.values()), limits):
            limits = [replace(budgets[k], with_models=None, drafters=frozenset(self.lookups)) for k in asking]
        for k, limit in zip(asking, limits, strict=True):
            settled[k] = limit
        return settled

    @property
    def models(self) -> list[SmallModelDrafter]:
        """The drafters that are models on this rank."""
        return [drafter for drafter in self.drafters if isinstance(drafter, SmallModelDrafter)]

    @property
    def lookups(self) -> list[str]:
        """Names of the drafters that are not models."""
        return [drafter.name for drafter in self._guarded if drafter.is_lookup]

    def look_up(self, spans: Sequence[Span], budgets: Sequence[TreeBudget]) -> list[TokenTree]:
        """Return the union of what the lookups alone draft, which may have more nodes than a budget."""
        drafted = []
        for i, drafter in enumerate(self._guarded):
            if drafter.is_able and drafter.is_lookup:
                shares = [
                    self._share_of(i, (i,), span.request, budget, budget.max_nodes)
                    for span, budget in zip(spans, budgets, strict=True)
                ]
                drafted.append(drafter.collect(drafter.launch(spans, shares), spans, shares))
        groups = ([tree for tree in trees if tree.num_guessed] or trees[:1] for trees in zip(*drafted, strict=True))
        return [TokenTree.merge(trees) if len(trees) > 1 else trees[0] for trees in groups]

    def _groups(self) -> Iterator[tuple[list[int], list[int]]]:
        """Yield the drafters that draft at the same time, and those after them.

        Each lookup drafts alone, since the next one gets what it leaves over. All models draft together.
        """
        able = [i for i, drafter in enumerate(self._guarded) if drafter.is_able]
        lookups = [i for i in able if self._guarded[i].is_lookup]
        models = [i for i in able if i not in lookups]
        for place, i in enumerate(lookups, start=1):
            yield [i], lookups[place:] + models
        yield models, []

    def _share(
        self,
        group: Sequence[int],
        later: Sequence[int],
        spans: Sequence[Span],
        budgets: Sequence[TreeBudget],
        num_left: Sequence[int],
    ) -> dict[int, list[TreeBudget]]:
        """Return the budgets of those of a group that are asked, in the order in which they are waited for.

        Drafters on other ranks come last: they draft while this rank runs its own.
        """
        shares = {}
        for place, i in enumerate(group):
            rest = [*group[place:], *later]
            shares[i] = [
                self._share_of(i, rest, span.request, budget, left)
                for span, budget, left in zip(spans, budgets, num_left, strict=True)
            ]
            num_left = [left - share.max_nodes for left, share in zip(num_left, shares[i], strict=True)]
        asked = [i for i in group if any(share.max_nodes for share in shares[i])]
        return {i: shares[i] for i in sorted(asked, key=lambda i: self._guarded[i].is_remote)}

    def _may_choose_for(self, request: Request) -> bool:
        return self._may_choose and not is_random(request.verification)

    def _share_of(self, i: int, rest: Sequence[int], request: Request, budget: TreeBudget, num_left: int) -> TreeBudget:
        """Return a drafter's budget for one request; `num_left` nodes are left to it and the rest of the drafters."""
        if not self._guarded[i].is_asked(request, budget):
            return OFF
        if self._may_choose_for(request):
            return budget.share(budget.max_nodes)
        if budget.widths:
            return budget.share(budget.max_nodes).cut(budget.max_depth, num_left)
        asked = [j for j in rest if self._guarded[j].is_asked(request, budget)]
        return budget.share(self._budget_split.share(num_left, asked))

    def _select(
        self, selection: Selection, spans: Sequence[Span], budgets: Sequence[TreeBudget]
    ) -> Sequence[TreeBudget]:
        """Return the budgets, restricted to the drafters to ask, after the models are scored on the known tokens."""
        open_ones = [budget.max_nodes > 0 and any(map(budget.asks, selection.models)) for budget in budgets]
        requests = [span.request for span, is_open in zip(spans, open_ones, strict=True) if is_open]
        able = [drafter for drafter in self._guarded if drafter.is_able and drafter.name in selection.models]
        for drafter in able:
            if drafter.num_unscored < MAX_FAILURES:
                drafter.score(selection, requests)
        # A drafter that cannot be scored is asked only if none can be scored.
        able = [drafter for drafter in able if drafter.num_unscored < MAX_FAILURES] or able
        return [
            selection.restrict(
                span.request, budget, [drafter.name for drafter in able if drafter.can_read(span.request)]
            )
            if is_open
            else budget
            for span, budget, is_open in zip(spans, budgets, open_ones, strict=True)
        ]

    def _merge(
        self, spans: Sequence[Span], drafted: dict[int, list[TokenTree]], budgets: Sequence[TreeBudget]
    ) -> list[TokenTree]:
        """Return one tree for each request within its budget; drawn tokens and small expansions are never dropped."""
        merged, several = list[TokenTree](), dict[int, list[TokenTree]]()
        is_pruned = list[bool]()
        for k, (span, budget) in enumerate(zip(spans, budgets, strict=True)):
            makers = [i for i in sorted(drafted) if drafted[i][k].num_guessed]
            trees = [drafted[i][k] for i in makers]
            merged.append(trees[0] if trees else TokenTree.root(span.request.token_ids[-1]))
            if len(trees) > 1:
                competes = not budget.widths or sum(tree.num_guessed for tree in trees) > budget.max_nodes
            else:  # a model has left out what is not probable enough, a lookup has not
                is_loose = budget.min_path_prob > 0 or budget.row_prices or merged[-1].num_guessed > budget.max_nodes
                competes = bool(is_loose) and any(self._guarded[i].is_lookup for i in makers)
            competes = competes and all(tree.is_chosen for tree in trees)
            if len(trees) > 1 or competes:
                several[k] = trees
                is_pruned.append(competes)
        if several:
            requests, limits = [spans[k].request for k in several], [budgets[k] for k in several]
            best = self._pruning.merge(requests, list(several.values()), limits, is_pruned)
            best = self._pruning.buy(requests, best, limits)
            for k, tree in zip(several, best, strict=True):
                merged[k] = tree
        return merged

    def observe(self, request: Request, tree: TokenTree, acceptance: Acceptance) -> None:
        self._budget_split.observe(tree, acceptance)
        offered = self._pruning.offered(request, tree, acceptance)
        self.calibration.observe(request, *offered)
        self._pruning.observe(request, *offered)
        if self.selection is not None:
            self.selection.observe(request)
        for drafter in self._guarded:
            drafter.observe(request, tree, acceptance)

    def forget(self, request_id: str) -> None:
        self._pruning.forget(request_id)
        if self.selection is not None:
            self.selection.forget(request_id)
        for drafter in self._guarded:
            drafter.forget(request_id)

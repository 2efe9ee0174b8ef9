"""Several drafters, one merged tree: itself a drafter, so the engine never knows how many there are.

Merge-based construction: SpecInfer (arXiv 2305.09781), Definition 3.2. A fixed expansion is grown by each drafter,
and the tree is the union. Best first there is one budget: guesses that were chosen compete for it, across drafters,
by their chance to be accepted; of guesses that were drawn none may be dropped, so drafters get shares of the budget
before they draw, by what came of their guesses so far.
"""

import logging
from collections.abc import Callable, Sequence

import numpy as np

from specinfer.drafters.base import Drafter
from specinfer.drafters.calibration import Calibration, draw_ranks, source
from specinfer.request import Request, Span
from specinfer.tree import TokenTree, TreeBudget
from specinfer.verify import Acceptance

MAX_FAILURES = 3
logger = logging.getLogger(__name__)


class MergedDrafter:
    """Unites the guesses of its drafters by token path.

    Args:
        may_choose: Guesses are chosen, not drawn, so the best of all may be kept and the others dropped.
        num_drafters: How many of them guess for every request; None is all.
        vocab_size: The target's; a drafter that guesses other tokens fails.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        calibration: Calibration | None = None,
        *,
        may_choose: bool = True,
        num_drafters: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        assert len({drafter.name for drafter in drafters}) == len(drafters), "what is learned is kept by name"
        self._vocab_size = vocab_size
        self._drafters = tuple(drafters)
        self.num_drafters = len(self._drafters) if num_drafters is None else num_drafters
        self.calibration = calibration or Calibration()
        self._rivals = Calibration(trust=1.0)  # of nodes beside their siblings: their drafters' chances to begin with
        self._may_choose = may_choose
        self._num_failures = [0] * len(self._drafters)  # in a row
        self._usefulness = Usefulness([drafter.name for drafter in self._drafters])
        self._worths: dict[str, list[tuple[int, float]]] = {}  # of each node: rank among siblings, chance by itself

    @property
    def name(self) -> str:
        return "+".join(drafter.name for drafter in self._drafters)

    @property
    def drafters(self) -> tuple[Drafter, ...]:
        return self._drafters

    def draft(self, spans: Sequence[Span], budgets: Sequence[TreeBudget]) -> list[TokenTree]:
        asked = [i for i, failures in enumerate(self._num_failures) if failures < MAX_FAILURES]
        proposals: list[list[TokenTree]] = [[] for _ in spans]
        for i in asked:
            shares = [
                self._share(budget, trees, asked[asked.index(i) :])
                for budget, trees in zip(budgets, proposals, strict=True)
            ]
            for trees, tree in zip(proposals, self._ask(i, spans, shares), strict=True):
                if tree.num_guessed:
                    trees.append(tree)
        return [
            self._unite(span.request, trees, budget)
            for span, trees, budget in zip(spans, proposals, budgets, strict=True)
        ]

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

    def _unite(self, request: Request, trees: Sequence[TokenTree], budget: TreeBudget) -> TokenTree:
        if not trees:
            return TokenTree.root(request.token_ids[-1])
        tree = trees[0] if len(trees) == 1 else TokenTree.merge(trees)
        competes = len(trees) > 1 or budget.least_chance > 0
        if budget.widths:
            competes = tree.num_guessed > budget.max_nodes
        if not self._may_choose or not competes:
            return tree
        worths = self._chances(request, tree)
        ranks, alone = zip(*worths, strict=True)
        chance = self._rivals.chance(source(self.name, request), ranks, alone).tolist()
        worth = [1.0] * len(tree)
        for node in range(1, len(tree)):
            worth[node] = worth[tree.parents[node]] * chance[node]
        # No node is worth more than its parent, and of equals the parent stands first: what is kept is a tree.
        best = np.argsort(-np.asarray(worth), kind="stable")[: budget.max_nodes + 1]
        kept = sorted(node for node in best.tolist() if node == 0 or worth[node] >= budget.least_chance)
        self._worths[request.request_id] = [worths[node] for node in kept]
        return tree.keep(kept)

    def _chances(self, request: Request, tree: TokenTree) -> list[tuple[int, float]]:
        """For each node its rank among its siblings, and its chance as if its drafters knew nothing of others."""
        against = [1.0] * len(tree)
        by_source: dict[str, tuple[list[int], list[int], list[float]]] = {}
        for draw, rank in zip(tree.draws, draw_ranks(tree), strict=True):
            nodes, ranks, confidences = by_source.setdefault(source(draw.drafter, request), ([], [], []))
            nodes.append(draw.node)
            ranks.append(rank)
            confidences.append(draw.confidence)
        for name, (nodes, ranks, confidences) in by_source.items():
            for node, chance in zip(nodes, self.calibration.chance(name, ranks, confidences).tolist(), strict=True):
                against[node] *= 1.0 - chance
        ranks = [0] * len(tree)
        for siblings in tree.children:
            for rank, node in enumerate(sorted(siblings.values(), key=against.__getitem__)):
                ranks[node] = rank
        return [(rank, 1.0 - miss) for rank, miss in zip(ranks, against, strict=True)]

    def observe(self, request: Request, tree: TokenTree, acceptance: Acceptance) -> None:
        self.calibration.observe(request, tree, acceptance)
        self._usefulness.observe(tree, acceptance)
        worths = self._worths.pop(request.request_id, None)
        if worths is not None and len(worths) == len(tree):
            for node, kept in zip((0, *acceptance.path), (*acceptance.path, None), strict=True):
                for child in tree.children[node].values():
                    self._rivals.count(source(self.name, request), *worths[child], kept=child == kept)
        for i in range(len(self._drafters)):
            self._tell(i, lambda drafter: drafter.observe(request, tree, acceptance))

    def forget(self, request_id: str) -> None:
        self._worths.pop(request_id, None)
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

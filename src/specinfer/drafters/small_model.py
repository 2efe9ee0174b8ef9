"""A small language model (the paper's SSM) that grows trees level by level, with its own cache.

Expansion-based construction: SpecInfer (arXiv 2305.09781), section 3. At each level one pass scores the new nodes of
all requests; `draft_sampling` turns the scores into candidates, and `tree_batch` decides which of them are taken.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from specinfer.core.request import Request, Span
from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.drafters.drafter_cache import DrafterCache
from specinfer.drafters.growth.calibration import Calibration
from specinfer.drafters.growth.draft_sampling import Candidates, draw
from specinfer.drafters.growth.frontier import Level
from specinfer.drafters.growth.tree_batch import GrowingTree, TreeBatch
from specinfer.drafters.kind import DraftKind
from specinfer.drafters.merge.scoring import Losses, Scoring
from specinfer.drafters.tree_grower import GrownTree, NativeGrower, TreeGrower, Wanted
from specinfer.drafters.vocabulary.token_map import Known, SharedVocabulary, Vocabulary
from specinfer.model.batch import Piece
from specinfer.model.kv_cache import OutOfSlotsError
from specinfer.model.load import LoadedModel
from specinfer.model.runner import ModelRunner
from specinfer.verify import Acceptance

REPLAYED_TOGETHER = 4  # requests at a time; more would need too many logits at once
# Function from the trees with a frontier, and their level, to its candidates.
LevelCandidates = Callable[[Sequence[GrowingTree], Level], Candidates]


class SmallModelDrafter:
    """A drafter that grows trees of a small model's next tokens.

    Args:
        vocab_size: The target's vocabulary size; tokens beyond it are never drafted.
        draft_sampling: The kind of draft sampling; the verification rule must allow it.
        calibration: The acceptance probabilities of drafted tokens, needed for best-first growth.
        vocabulary: The mapping between the target's tokens and its own, or None if they are the same.
        is_scored: True to record how well it drafts, or would have drafted.
        window: Tokens of a long context that it reads at least, or None to read all.
    """

    kind = DraftKind()

    def __init__(
        self,
        runner: ModelRunner,
        vocab_size: int,
        name: str = "draft",
        draft_sampling: str = "shared-noise",
        calibration: Calibration | None = None,
        vocabulary: Vocabulary | None = None,
        *,
        is_scored: bool = False,
        window: int | None = None,
    ) -> None:
        if window is not None:
            self.kind = self.kind._replace(window=window)
        self.runner, self.name, self.draft_sampling = runner, name, draft_sampling
        self._calibration = calibration or Calibration()
        self.vocabulary = vocabulary or SharedVocabulary(vocab_size, runner.loaded.vocab_size, runner.loaded.token_map)
        self._scoring = Scoring(draft_sampling, self.vocabulary) if is_scored else None
        self._cache = self._make_cache(runner)
        self._loop: TreeGrower | None = None if is_scored or self.vocabulary.translates else self._make_loop()
        self._drafted: dict[str, GrownTree] = {}

    def _make_cache(self, runner: ModelRunner) -> DrafterCache:
        return DrafterCache(runner, self.vocabulary, self._scoring, self.kind.window)

    @property
    def cache(self) -> DrafterCache:
        """The cache of what it has computed of each request."""
        return self._cache

    def grow_with(self, grower: TreeGrower) -> None:
        """Grow trees with this from now on, as far as it can."""
        assert self._scoring is None
        self._loop = grower

    def _make_loop(self) -> TreeGrower | None:
        if type(self.runner) is not ModelRunner:  # others have passes of their own
            return None
        return NativeGrower(
            self.runner, self._cache, self.vocabulary, self.draft_sampling, self._calibration, self.name
        )

    @property
    def shares_vocabulary(self) -> bool:
        """True if its tokens are the target's."""
        return not self.vocabulary.translates

    def draft(self, spans: Sequence[Span], budgets: Sequence[TreeBudget]) -> list[TokenTree]:
        trees = [TokenTree.root(span.request.token_ids[-1]) for span in spans]
        wanted: dict[int, Wanted] = {}
        for i, (span, budget) in enumerate(zip(spans, budgets, strict=True)):
            if not budget.max_nodes:
                continue
            span.request.drafting.begin_draws(self.name)
            known = self._sync(span.request)
            if known is not None:
                budget = budget.cut(
                    min(self.kind.max_depth, self.runner.loaded.max_position - len(known.ids)), budget.max_nodes
                )
                if budget.max_nodes:
                    wanted[i] = Wanted(span.request, budget)
        drafted = self._draft(list(wanted.values())) if wanted else []
        for i, drafted_tree in zip(wanted, drafted, strict=True):
            trees[i] = drafted_tree.tree
        return trees

    def _draft(self, wanted: Sequence[Wanted]) -> list[GrownTree]:
        """Grow all trees in one call, as far as they fit it, and the others level by level."""
        fitting = [] if self._loop is None else self._loop.fitting(wanted)
        grown = self._loop.draft(fitting) if self._loop is not None and fitting else None
        drafted = {tree.request.request_id: tree for tree in grown or ()}
        self._drafted |= drafted
        growing_trees = [
            GrowingTree(request, budget, self.name) for request, budget in wanted if request.request_id not in drafted
        ]
        try:
            if growing_trees:
                self._grow(growing_trees)
        except OutOfSlotsError:
            # Keep what was drawn: the number of slots may depend on the draws, so dropping them would bias the output.
            for tree in growing_trees:
                self._cache.release(tree.request.request_id)
                drafted[tree.request.request_id] = GrownTree(tree.request, tree.tree(), ())
        else:
            by_level = {
                tree.request.request_id: GrownTree(tree.request, tree.tree(), tree.computed) for tree in growing_trees
            }
            self._drafted |= by_level
            drafted |= by_level
        return [drafted[request.request_id] for request, _ in wanted]

    def read(self, request: Request) -> bool:
        """Compute all known tokens but the last, for a caller that grows trees in its place.

        The caller reserves and commits slots in the drafter's cache, and the drafter continues from these when it is
        asked next. Return False if it cannot read them.
        """
        known = self._sync(request)
        return known is not None and len(known.ids) <= self.runner.loaded.max_position and self._cache.prefill(request)

    def can_read(self, request: Request) -> bool:
        """Return whether it can draft for this request now."""
        return True

    def replay(self, requests: Sequence[Request]) -> None:
        """Read the tokens that were emitted while it was not asked, to be scored on them; it drafts nothing."""
        for start in range(0, len(requests), REPLAYED_TOGETHER):
            group = []
            for request in requests[start : start + REPLAYED_TOGETHER]:
                known = self._sync(request)
                if known is not None and len(known.ids) < self.runner.loaded.max_position:
                    group.append(request)
            try:
                if group:
                    self._cache.catch_up(group)
            except OutOfSlotsError:
                for request in group:
                    self._cache.release(request.request_id)

    def take_losses(self, request_id: str) -> Losses:
        """Return its losses on the tokens it was scored on since the last call."""
        return self._scoring.take(request_id) if self._scoring else Losses([], [])

    def _sync(self, request: Request) -> Known | None:
        """Return the known tokens, which replace any tree that grew from earlier ones; None if it cannot read them."""
        if self._scoring and self.kind.reads_target:  # text that the target alone reads is scored by `replay`
            self._scoring.skip(request)
        known = self._cache.sync(request)
        if known is not None:
            self._drafted.pop(request.request_id, None)
        return known

    def _grow(self, growing_trees: list[GrowingTree]) -> None:
        tree_batch = TreeBatch(growing_trees, self._calibration)
        candidates_of = self._begin(growing_trees)
        while level := tree_batch.level():
            candidates = candidates_of([tree for tree in growing_trees if tree.frontier], level)
            if self._scoring:
                self._scoring.note(level, candidates)
            tree_batch.extend(candidates)

    def _begin(self, growing_trees: Sequence[GrowingTree]) -> LevelCandidates:
        """Compute what is known of the requests; return the function that makes the candidates of each level."""
        at_roots = [self._cache.catch_up([tree.request for tree in growing_trees])]

        def candidates_of(growing: Sequence[GrowingTree], level: Level) -> Candidates:
            logits = at_roots.pop() if at_roots else self.runner.forward([*map(self._frontier_piece, growing)])
            return self._candidates(logits, level)

        return candidates_of

    def _candidates(self, logits: Tensor, level: Level) -> Candidates:
        """Return the candidates of a level from its own [nodes, vocab] logits."""
        return draw(self.draft_sampling, self.vocabulary.compact(logits), level, self.vocabulary.token_map)

    def _frontier_piece(self, growing_tree: GrowingTree) -> Piece:
        """Return the `Piece` of the frontier's nodes; they see the known tokens, their ancestors and themselves."""
        cache, request = self._cache, growing_tree.request
        root = len(cache.known[request.request_id].ids) - 1
        earlier, new = [*cache.first_nodes, *growing_tree.computed], list(growing_tree.frontier)
        growing_tree.computed += new
        earlier_slots = cache.reserved(request)
        return Piece(
            tokens=self.vocabulary.to_drafter(growing_tree.tokens[new].tolist()),
            positions=(root + growing_tree.depths[new]).tolist(),
            prefix_slots=self.runner.cache.slots(request.request_id),
            slots=cache.reserve(request, len(new)),
            visible=growing_tree.ancestry[new][:, earlier + new],
            num_logits=len(new),
            earlier_slots=earlier_slots,
            earlier_positions=(root + growing_tree.depths[earlier]).tolist(),
        )

    def observe(self, request: Request, tree: TokenTree, acceptance: Acceptance) -> None:
        drafted = self._drafted.pop(request.request_id, None)
        if drafted is None or drafted.request is not request:
            return
        place = {node: i for i, node in enumerate(drafted.computed) if node > 0}  # index among the reserved slots
        node, kept = 0, []
        emitted = request.token_ids[self._cache.known[request.request_id].num_tokens :]
        if self._scoring:
            self._scoring.settle(request, emitted)
        for token in emitted:
            node = drafted.tree.children[node].get(token, -1)
            if not self.kind.keeps_drafts or node not in place:
                break
            kept.append(node)
        self.runner.cache.commit(request.request_id, [place[node] for node in kept])
        self.vocabulary.keep(request.request_id, [drafted.tree.tokens[node] for node in kept])

    def replace(self, loaded: LoadedModel) -> None:
        """Draft with these weights of the same model from now on; may be called between any two steps.

        It drops what it has computed of every request with the old weights, and computes it again when asked next.
        """
        self.runner.replace(loaded)
        self._cache.clear()
        self._drafted.clear()

    def forget(self, request_id: str) -> None:
        self._drafted.pop(request_id, None)
        self._cache.forget(request_id)
        if self._scoring:
            self._scoring.forget(request_id)

"""A small language model (the paper's SSM) that grows trees level by level, with its own cache.

Expansion-based construction: SpecInfer (arXiv 2305.09781), section 3. At each level one pass scores the new nodes of
all requests; `draft_sampling` turns the scores into candidates, and `expansion` decides which of them are taken.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from specinfer.core.request import Request, Span
from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.drafters.base import Draft, LaterDraft
from specinfer.drafters.growth.calibration import Calibration
from specinfer.drafters.growth.draft_sampling import draw
from specinfer.drafters.growth.expansion import GrowingTree, TreeBatch
from specinfer.drafters.merge.scoring import MAX_SCORED, Losses, Scoring
from specinfer.drafters.vocabulary.token_map import Known, SharedVocabulary, Vocabulary
from specinfer.model.batch import Piece
from specinfer.model.kv_cache import OutOfSlotsError
from specinfer.model.load import LoadedModel
from specinfer.model.runner import ModelRunner
from specinfer.verify import Acceptance

# The largest number of known tokens that a drafter reads in one pass.
MAX_CHUNK = 512
_REPLAYED_TOGETHER = 4  # requests at a time; more would need too many logits at once


class SmallModelDrafter:
    """A drafter that grows trees of a small model's next tokens.

    Args:
        vocab_size: The target's vocabulary size; tokens beyond it are never drafted.
        draft_sampling: The kind of draft sampling; the verification rule must allow it.
        calibration: The acceptance probabilities of drafted tokens, needed for best-first growth.
        vocabulary: The mapping between the target's tokens and its own, or None if they are the same.
        is_scored: True to record how well it drafts, or would have drafted.
    """

    is_remote = False

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
    ) -> None:
        self.runner = runner
        self._name = name
        self._draft_sampling = draft_sampling
        self._calibration = calibration or Calibration()
        self._vocabulary = vocabulary or SharedVocabulary(vocab_size, runner.loaded.vocab_size, runner.loaded.token_map)
        self._scoring = Scoring(draft_sampling, self._vocabulary) if is_scored else None
        self._known: dict[str, Known] = {}  # its cache holds a prefix of these ids, all while it grows trees
        self._growing_trees: dict[str, GrowingTree] = {}
        self._salts: dict[str, str | None] = {}  # salts of the requests with something in the cache

    @property
    def name(self) -> str:
        return self._name

    @property
    def shares_vocabulary(self) -> bool:
        """True if its tokens are the target's."""
        return not self._vocabulary.translates

    def begin(self, spans: Sequence[Span], budgets: Sequence[TreeBudget]) -> Draft:
        return LaterDraft(partial(self.draft, spans, budgets))

    def draft(self, spans: Sequence[Span], budgets: Sequence[TreeBudget]) -> list[TokenTree]:
        trees = [TokenTree.root(span.request.token_ids[-1]) for span in spans]
        growing: dict[int, GrowingTree] = {}
        for i, (span, budget) in enumerate(zip(spans, budgets, strict=True)):
            if not budget.max_nodes:
                continue
            span.request.begin_draws(self._name)
            known = self._read(span.request)
            if known is not None:
                budget = budget.cut(self.runner.loaded.max_position - len(known.ids), budget.max_nodes)
                if budget.max_nodes:
                    growing[i] = GrowingTree(span.request, budget, self._name)
        if not growing:
            return trees
        try:
            self._grow(list(growing.values()))
        except OutOfSlotsError:
            # Keep what was drawn: the number of slots may depend on the draws, so dropping them would bias the output.
            for growing_tree in growing.values():
                self._release(growing_tree.request.request_id)
        else:
            self._growing_trees |= {growing_tree.request.request_id: growing_tree for growing_tree in growing.values()}
        for i, growing_tree in growing.items():
            trees[i] = growing_tree.tree()
        return trees

    @property
    def draft_sampling(self) -> str:
        """The kind of draft sampling."""
        return self._draft_sampling

    @property
    def vocabulary(self) -> Vocabulary:
        return self._vocabulary

    def read(self, request: Request) -> bool:
        """Compute all known tokens but the last, for a caller that grows trees in its place.

        The caller reserves and commits slots in the drafter's cache, and the drafter continues from these when it is
        asked next. Return False if it cannot read them.
        """
        known, cache, request_id = self._read(request), self.runner.cache, request.request_id
        if known is None or len(known.ids) > self.runner.loaded.max_position:
            return False
        end = len(known.ids) - 1
        try:
            while (start := len(cache.slots(request_id))) < end:
                size = min(MAX_CHUNK, end - start)
                self.runner.forward([self._chain_piece(request, start, start + size, None)])
                cache.commit(request_id, range(size))
                if start < len(request.prompt_ids):
                    cache.share(request_id, request.cache_salt, known.ids)
        except OutOfSlotsError:
            self._release(request_id)
            return False
        return True

    def replay(self, requests: Sequence[Request]) -> None:
        """Read the tokens that were emitted while it was not asked, to be scored on them; it drafts nothing."""
        for start in range(0, len(requests), _REPLAYED_TOGETHER):
            group = []
            for request in requests[start : start + _REPLAYED_TOGETHER]:
                known = self._read(request)
                if known is not None and len(known.ids) < self.runner.loaded.max_position:
                    group.append(request)
            try:
                if group:
                    self._catch_up(group)
            except OutOfSlotsError:
                for request in group:
                    self._release(request.request_id)

    def take_losses(self, request_id: str) -> Losses:
        """Return its losses on the tokens it was scored on since the last call."""
        return self._scoring.take(request_id) if self._scoring else Losses([], [])

    def _read(self, request: Request) -> Known | None:
        """Return the known tokens to draft from and drop all others from the cache; None if it cannot continue."""
        cache, request_id = self.runner.cache, request.request_id
        known = self._vocabulary.read(request, len(cache.slots(request_id)))
        if known is not None:
            self._known[request_id] = known
            self._growing_trees.pop(request_id, None)
            num_scored = self._scoring.begin(request, len(known.ids)) if self._scoring else len(known.ids)
            cache.commit(request_id, ())  # drafts that were never observed
            if request_id not in self._salts:
                self._salts[request_id] = request.cache_salt
                num_read = 1 + MAX_SCORED if self._scoring else 1  # tokens whose logits are needed
                cache.attach(request_id, request.cache_salt, known.ids[:-num_read])
                return known
            # The root and the token before any token to score are always computed, since their logits are needed.
            cache.truncate(request_id, min(known.num_kept, len(known.ids) - 1, num_scored - 1))
        return known

    def _grow(self, growing_trees: list[GrowingTree]) -> None:
        tree_batch = TreeBatch(growing_trees, self._calibration)
        logits = self._catch_up([growing_tree.request for growing_tree in growing_trees])
        nodes = tree_batch.wanted()
        while nodes:
            candidates = draw(self._draft_sampling, self._vocabulary.compact(logits), nodes, self._vocabulary.token_map)
            if self._scoring:
                self._scoring.note(nodes, candidates)
            tree_batch.extend(candidates)
            nodes = tree_batch.wanted()
            if nodes:
                logits = self.runner.forward(
                    [self._frontier_piece(growing_tree) for growing_tree in growing_trees if growing_tree.frontier]
                )

    def _catch_up(self, requests: Sequence[Request]) -> Tensor:
        """Compute the known tokens that the cache lacks; return [requests, vocab] logits after the last of each."""
        cache = self.runner.cache
        num_rows = {request.request_id: self._num_rows(request, len(requests)) for request in requests}
        for request in requests:
            cached, end = len(cache.slots(request.request_id)), len(self._known[request.request_id].ids)
            while end - cached > MAX_CHUNK:
                size = min(MAX_CHUNK, end - cached - num_rows[request.request_id])
                self.runner.forward([self._chain_piece(request, cached, cached + size, None)])
                cached += size
                cache.commit(request.request_id, range(size))
        pieces = []
        for request in requests:
            ids = self._known[request.request_id].ids
            start = len(cache.slots(request.request_id))
            piece = self._chain_piece(request, start, len(ids), TokenTree.root(ids[-1]))
            pieces.append(replace(piece, num_logits=num_rows[request.request_id]) if self._scoring else piece)
        logits = self.runner.forward(pieces)
        for request, piece in zip(requests, pieces, strict=True):
            cache.commit(request.request_id, range(len(piece.tokens)))
            if len(piece.prefix_slots) < len(request.prompt_ids):  # the prompt has just been read
                cache.share(request.request_id, request.cache_salt, self._known[request.request_id].ids)
        return self._score(requests, logits, list(num_rows.values())) if self._scoring else logits

    def _num_rows(self, request: Request, num_requests: int) -> int:
        """Return how many of the last known tokens need logits."""
        if not self._scoring:
            return 1
        start, end = len(self.runner.cache.slots(request.request_id)), len(self._known[request.request_id].ids)
        return min(self._scoring.num_rows(request, start, end, num_requests), MAX_CHUNK)

    def _score(self, requests: Sequence[Request], logits: Tensor, num_rows: Sequence[int]) -> Tensor:
        """Return the last row of each request, [requests, vocab]; the rows before it score what was read."""
        assert self._scoring is not None
        parts = logits.split(list(num_rows))
        for request, rows in zip(requests, parts, strict=True):
            if not self._vocabulary.translates:
                rows = self._vocabulary.compact(rows)
            self._scoring.read(request, self._known[request.request_id].ids, rows[:-1])
        return torch.stack([rows[-1] for rows in parts])

    def _chain_piece(self, request: Request, start: int, end: int, tree: TokenTree | None) -> Piece:
        cache = self.runner.cache
        slots = cache.reserve(request.request_id, end - start)
        ids = self._known[request.request_id].ids
        return Piece.of_span(ids[start:end], tree, cache.slots(request.request_id), slots)

    def _frontier_piece(self, growing_tree: GrowingTree) -> Piece:
        """Return the `Piece` of the frontier's nodes; they see the known tokens, their ancestors and themselves."""
        cache, request_id = self.runner.cache, growing_tree.request.request_id
        root = len(self._known[request_id].ids) - 1
        earlier, new = growing_tree.computed, list(growing_tree.frontier)
        growing_tree.computed = [*earlier, *new]
        earlier_slots = cache.reserved(request_id)
        slots = cache.reserve(request_id, len(new))
        return Piece(
            tokens=self._vocabulary.to_drafter(growing_tree.tokens[new].tolist()),
            positions=(root + growing_tree.depths[new]).tolist(),
            prefix_slots=cache.slots(request_id),
            slots=slots,
            visible=growing_tree.ancestry[new][:, growing_tree.computed],
            num_logits=len(new),
            earlier_slots=earlier_slots,
            earlier_positions=(root + growing_tree.depths[earlier]).tolist(),
        )

    def observe(self, request: Request, tree: TokenTree, acceptance: Acceptance) -> None:
        growing_tree = self._growing_trees.pop(request.request_id, None)
        if growing_tree is None or growing_tree.request is not request:
            return
        place = {node: i for i, node in enumerate(growing_tree.computed)}  # index among the reserved slots
        children = growing_tree.children()
        node, kept = 0, []
        emitted = request.token_ids[self._known[request.request_id].num_tokens :]
        if self._scoring:
            self._scoring.settle(request, emitted)
        for token in emitted:
            node = children.get((node, token), -1)
            if node not in place:
                break
            kept.append(node)
        self.runner.cache.commit(request.request_id, [place[node] for node in kept])
        self._vocabulary.keep(request.request_id, growing_tree.tokens[kept].tolist())

    def replace(self, loaded: LoadedModel) -> None:
        """Draft with these weights of the same model from now on; may be called between any two steps.

        It drops what it has computed of every request with the old weights, and computes it again when asked next.
        """
        self.runner.replace(loaded)
        for request_id in self._known:
            self._vocabulary.forget(request_id)
        for of_old_weights in (self._known, self._growing_trees, self._salts):
            of_old_weights.clear()

    def forget(self, request_id: str) -> None:
        self._growing_trees.pop(request_id, None)
        self._release(request_id)
        self._known.pop(request_id, None)
        self._vocabulary.forget(request_id)
        if self._scoring:
            self._scoring.forget(request_id)

    def _release(self, request_id: str) -> None:
        """Free all slots; what it has read stays cached as long as there are free slots."""
        if request_id in self._salts:
            self.runner.cache.release(request_id, self._salts.pop(request_id), self._known[request_id].ids)

"""The target as its own drafter, with its weights rounded to fewer bits (SubSpec, arXiv 2509.18344), over a part of a
long context (MagicDec, arXiv 2408.11049), or both: self-speculation.

It reads no prompt and keeps no cache. It attends to the keys and values that the target stored, and borrows slots of
the target's cache for its drafts, which it gives back before the target's pass. So cached prefixes, preempted requests
and accepted paths need no care here.
"""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from specinfer.core.lookups import SELF_DRAFTERS
from specinfer.core.request import Request, Span
from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.drafters.drafter_cache import DrafterCache
from specinfer.drafters.growth.tree_batch import GrowingTree
from specinfer.drafters.kind import DraftKind
from specinfer.drafters.small_model import REPLAYED_TOGETHER, SmallModelDrafter
from specinfer.drafters.sparse_context import kept_places
from specinfer.drafters.vocabulary.token_map import Known
from specinfer.model.adapters.sites import connect
from specinfer.model.batch import Piece
from specinfer.model.kv_cache import OutOfSlotsError, Slots
from specinfer.model.layers.device import DeviceDecoder
from specinfer.model.load import LoadedModel
from specinfer.model.recurrent.layers import is_hybrid
from specinfer.model.runner import ModelRunner
from specinfer.model.sharding.runner import DistributedRunner
from specinfer.verify import Acceptance


class SelfRunner(ModelRunner):
    """A runner of the target or its quantized copy, which computes in the target's cache.

    Args:
        takes_adapters: Whether requests with a LoRA adapter are drafted for with it.
        is_sparse: Whether it attends to a part of a long context only.
    """

    def __init__(
        self, loaded: LoadedModel, target: ModelRunner, *, takes_adapters: bool = False, is_sparse: bool = False
    ) -> None:
        self.loaded, self.capacity = loaded, None
        self.cache, self.tensors = target.cache, target.tensors
        if takes_adapters and loaded.model is not target.loaded.model:
            connect(loaded)
        self.takes_adapters, self.is_sparse = takes_adapters, is_sparse
        self.max_requests, self.num_replaced = target.max_requests, 0
        self._why_unpadded = None
        model = loaded.model
        if is_sparse and not (isinstance(model, DeviceDecoder) and model.attends_at_any_distance):
            self._why_unpadded = "they leave out tokens, and layers have windows or are not fused"
        elif is_hybrid(loaded.model):
            self._why_unpadded = "the target has layers without attention"
        self.graphs = target.graphs if self._why_unpadded is None else None
        self.padded = self._make_padded()

    def prepared(self, request: Request, piece: Piece) -> Piece:
        """Return a piece with the request's adapter, if it has one, and without what it does not attend to."""
        if request.adapter is not None and self.takes_adapters:
            piece = replace(piece, adapter=request.adapter.table)
        places = kept_places(len(piece.prefix_slots)) if self.is_sparse else None
        if places is None:
            return piece
        return replace(piece, prefix_slots=piece.prefix_slots[places], prefix_positions=places)


class SplitSelfRunner(SelfRunner):
    """A runner of the copy of a target that is split over several ranks, each of which computes the copy of its shard.

    Args:
        loaded: The copy of rank 0's shard.
        name: The copy's name, one of `SELF_DRAFTERS`.
    """

    def __init__(self, loaded: LoadedModel, target: DistributedRunner, name: str) -> None:
        self.loaded, self.capacity, self.padded, self.cache = loaded, None, None, target.cache
        self.graphs, self._why_unpadded = None, "the target is on several ranks"
        self.takes_adapters, self.is_sparse = False, SELF_DRAFTERS[name].is_sparse
        self._target, self._name = target, name

    def forward(self, pieces: Sequence[Piece]) -> Tensor:
        return self._target.begin(pieces, self._name).wait()


class BorrowedCache(DrafterCache):
    """The target's cache, with borrowed slots for the last known token and the nodes of the growing tree."""

    _runner: SelfRunner
    first_nodes = (0,)

    def reserve(self, request: Request, count: int) -> Slots:
        return self._cache.reserve(_borrower(request.request_id), count)

    def reserved(self, request: Request) -> Slots:
        return self._cache.reserved(_borrower(request.request_id))

    def is_read(self, request: Request) -> bool:
        """Return whether the target has computed all known tokens but the last."""
        return len(self._cache.slots(request.request_id)) == len(request.token_ids) - 1

    def sync(self, request: Request) -> Known | None:
        self.release(request.request_id)
        if not self.is_read(request):
            return None
        self.known[request.request_id] = Known(request.token_ids, len(request.token_ids), len(request.token_ids))
        return self.known[request.request_id]

    def catch_up(self, requests: Sequence[Request]) -> Tensor:
        """Compute the last known token of each request, which the target has not computed; return its logits."""
        pieces = []
        for request in requests:
            last = request.token_ids[-1]
            known = self._cache.slots(request.request_id)
            piece = Piece.from_span([last], TokenTree.root(last), known, self.reserve(request, 1))
            pieces.append(self._runner.prepared(request, piece))
        return self._runner.forward(pieces)

    def release(self, request_id: str) -> None:
        self._cache.free(_borrower(request_id))


def _borrower(request_id: str) -> str:
    return f"{request_id}, drafts"


class SelfDrafter(SmallModelDrafter):
    """A drafter that grows trees with the target or a copy of it; arguments as for the class above."""

    runner: SelfRunner
    _cache: BorrowedCache

    def _make_cache(self, runner: ModelRunner) -> BorrowedCache:
        assert isinstance(runner, SelfRunner)
        self.kind = DraftKind(shares_cache=True, is_sparse=runner.is_sparse)
        return BorrowedCache(runner, self.vocabulary, None)

    def draft(self, spans: Sequence[Span], budgets: Sequence[TreeBudget]) -> list[TokenTree]:
        try:
            return super().draft(spans, budgets)
        finally:
            for span in spans:  # the target's pass needs the slots
                self._cache.release(span.request.request_id)

    def can_read(self, request: Request) -> bool:
        return self._cache.is_read(request)

    def replay(self, requests: Sequence[Request]) -> None:
        """Compute the last tokens again, after the keys and values of those before, to be scored on them."""
        for start in range(0, len(requests), REPLAYED_TOGETHER):
            group = [request for request in requests[start : start + REPLAYED_TOGETHER] if self.can_read(request)]
            try:
                self._score(group)
            except OutOfSlotsError:
                continue  # what is not scored now is scored later
            finally:
                for request in group:
                    self._cache.release(request.request_id)

    def _score(self, requests: Sequence[Request]) -> None:
        assert self._scoring is not None
        scored, pieces = [], []
        for request in requests:
            end = len(request.token_ids)
            self._scoring.begin(request, end)
            count = self._scoring.num_rows(request, 0, end, len(requests)) - 1  # the last token predicts no known one
            if not count:
                continue
            known, first = self.runner.cache.slots(request.request_id), end - 1 - count
            piece = Piece.from_span(
                request.token_ids[first : end - 1], None, known[:first], self._cache.reserve(request, count)
            )
            pieces.append(self.runner.prepared(request, replace(piece, num_logits=count)))
            scored.append(request)
        if not pieces:
            return
        logits = self.vocabulary.compact(self.runner.forward(pieces))
        for request, rows in zip(scored, logits.split([piece.num_logits for piece in pieces]), strict=True):
            self._scoring.read(request, request.token_ids, rows)

    def _frontier_piece(self, growing_tree: GrowingTree) -> Piece:
        return self.runner.prepared(growing_tree.request, super()._frontier_piece(growing_tree))

    def observe(self, request: Request, tree: TokenTree, acceptance: Acceptance) -> None:
        drafted = self._drafted.pop(request.request_id, None)
        if self._scoring and drafted is not None and drafted.request is request:
            known = self._cache.known[request.request_id]
            self._scoring.settle(request, request.token_ids[known.num_tokens :])

"""A head on the target's hidden states that grows trees level by level, such as EAGLE-3.

It reads pairs: the feature of a token, and the token after it; row t predicts token t + 2. At the first level features
are made of the target's hidden states, at later ones they are the head's own output for the parent. After verification
the accepted tokens are read again with true features, so nothing that was computed for drafts is kept.

The target stores hidden states under its cache's slots. So cached prefixes, preempted requests and accepted paths need
no care here: whatever the head has not read, it reads when it is asked next.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest

import numpy as np
from torch import Tensor

from specinfer.core.request import Request, Span
from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.drafters.drafter_cache import DrafterCache
from specinfer.drafters.growth.tree_batch import GrowingTree
from specinfer.drafters.kind import DraftKind
from specinfer.drafters.merge.scoring import Scoring
from specinfer.drafters.small_model import REPLAYED_TOGETHER, SmallModelDrafter
from specinfer.drafters.tree_grower import NativeGrower, TreeGrower
from specinfer.drafters.vocabulary.token_map import Known, SharedVocabulary, Vocabulary
from specinfer.model.batch import Piece
from specinfer.model.graphs.capture import Graphs
from specinfer.model.heads.head import FeatureHead
from specinfer.model.load import LoadedModel
from specinfer.model.runner import ModelRunner, TargetRunner

_PLACES, _PLACE_TOKENS = 8, 4  # of a text that is replayed: places to draft from, and levels of a draft


class HeadRunner(ModelRunner):
    """A runner of a head, which reads hidden states that another runner stores.

    Args:
        graphs: Captured graphs for draft loops, or None. Other passes are not padded.
        max_requests: Largest number of requests at a time in draft loops.

    Attributes:
        mask_features: The head's features of mask tokens, [1, width], or None.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        target: TargetRunner,
        num_slots: int,
        *,
        keeps_prefixes: bool = False,
        graphs: Graphs | None = None,
        max_requests: int = 32,
    ) -> None:
        super().__init__(loaded, num_slots, keeps_prefixes=keeps_prefixes, max_requests=max_requests)
        self.target, self.loop_graphs = target, graphs
        self._take_head(loaded)

    def _take_head(self, loaded: LoadedModel) -> None:
        assert isinstance(loaded.model, FeatureHead)
        self.head = loaded.model
        # Now, since programs are also made while kernels are left out, whose results are zero then.
        self.mask_features = self.head.mask_features

    @property
    def why_not_captured(self) -> str:
        return "capturing is off"  # of draft loops, which alone are captured

    def replace(self, loaded: LoadedModel) -> None:
        super().replace(loaded)
        self._take_head(loaded)

    def has_read(self, request: Request) -> bool:
        """Return whether the target has computed all known tokens but the last."""
        return len(self.target.cache.slots(request.request_id)) >= len(request.token_ids) - 1

    def features(self, request_id: str, start: int, end: int) -> Tensor:
        """Return the [end - start, width] features of these tokens of a request."""
        return self.head.project(self.target.read_taps(self.head.reads, request_id, start, end))

    def choices(self, logits: Tensor) -> Tensor:
        """Return the [rows] target ids of the most probable tokens."""
        best = logits.argmax(dim=-1)
        return best if self.head.token_map is None else self.head.token_map[best]


class NextTokens(SharedVocabulary):
    """The target's vocabulary, for a drafter that reads each token together with the feature of the token before it."""

    def read(self, request: Request, num_cached: int) -> Known | None:
        known = super().read(request, num_cached)
        return known and Known(known.ids[1:], known.num_tokens, known.num_kept - 1)


class FeatureCache(DrafterCache):
    """The cache of a head. Entry t is computed from the feature of token t and from token t + 1."""

    def __init__(self, runner: HeadRunner, vocabulary: Vocabulary, scoring: Scoring | None) -> None:
        super().__init__(runner, vocabulary, scoring)
        self._head_runner = runner

    def sync(self, request: Request) -> Known | None:
        is_read = len(request.token_ids) > 1 and self._head_runner.has_read(request)
        return super().sync(request) if is_read else None

    def _salt(self, request: Request) -> str | None:
        # The features depend on the first token too, which is not among those that the cache compares.
        return None if request.cache_salt is None else f"{request.token_ids[0]}:{request.cache_salt}"

    def _piece(self, request: Request, start: int, end: int, tree: TokenTree | None) -> Piece:
        piece = super()._piece(request, start, end, tree)
        return replace(piece, features=self._head_runner.features(request.request_id, start, end))


class FeatureDrafter(SmallModelDrafter):
    """A drafter that grows trees of a head's next tokens; arguments as for the class above."""

    runner: HeadRunner
    kind = DraftKind(reads_features=True, reads_paths=True)

    def _make_cache(self, runner: ModelRunner) -> DrafterCache:
        assert isinstance(runner, HeadRunner)
        return FeatureCache(runner, self.vocabulary, None)  # it is scored on drafts alone

    def _make_loop(self) -> TreeGrower | None:
        if type(self) is not FeatureDrafter or type(self.runner) is not HeadRunner:
            return None
        return NativeGrower(
            self.runner, self._cache, self.vocabulary, self.draft_sampling, self._calibration, self.name,
            self.runner.features,
        )  # fmt: skip

    def can_read(self, request: Request) -> bool:
        return self.runner.has_read(request)

    def replay(self, requests: Sequence[Request]) -> None:
        """Draft again from a few places of the text that was emitted while it was not asked, to be scored on that."""
        assert self._scoring is not None
        for start in range(0, len(requests), REPLAYED_TOGETHER):
            group = [request for request in requests[start : start + REPLAYED_TOGETHER] if self.can_read(request)]
            places = [self._scoring.past(request, _PLACES, _PLACE_TOKENS) for request in group]
            for column in zip_longest(*places):
                past = [place for place in column if place is not None]
                spans = [Span(place.view, len(place.view.token_ids) - 1, len(place.view.token_ids)) for place in past]
                self.draft(spans, [TreeBudget.expansion((1,) * len(place.tokens)) for place in past])
                for place in past:
                    self._scoring.settle_past(place)
                    self._drafted.pop(place.view.request_id, None)
                    self.runner.cache.commit(place.view.request_id, ())

    def _frontier_piece(self, growing_tree: GrowingTree) -> Piece:
        piece = super()._frontier_piece(growing_tree)
        cache, request_id = self.runner.cache, growing_tree.request.request_id
        slots = np.concatenate([cache.slots(request_id)[-1:], cache.reserved(request_id)])  # by node, the root first
        (features,) = self.runner.tensors.read_taps([0], slots[growing_tree.parents[list(growing_tree.frontier)]])
        return replace(piece, features=features)

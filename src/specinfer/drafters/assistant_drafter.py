"""A Gemma 4 assistant, which grows trees over the keys and values of its target.

It stores nothing: a level is computed from the output for its parents and from what the target has stored. So cached
prefixes, preempted requests and accepted paths need no care here, and nothing is read again after verification.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specinfer.core.request import Request
from specinfer.drafters.drafter_cache import DrafterCache
from specinfer.drafters.feature_drafter import FeatureCache, FeatureDrafter, HeadRunner
from specinfer.drafters.growth.draft_sampling import Candidates
from specinfer.drafters.growth.frontier import Level
from specinfer.drafters.growth.tree_batch import GrowingTree
from specinfer.drafters.kind import DraftKind
from specinfer.drafters.small_model import LevelCandidates
from specinfer.drafters.vocabulary.token_map import Known
from specinfer.model.batch import Piece, pack
from specinfer.model.graphs.capture import Graphs
from specinfer.model.heads.assistant import AssistantHead
from specinfer.model.kv_cache import Slots
from specinfer.model.load import LoadedModel
from specinfer.model.recurrent.states import RecurrentStates
from specinfer.model.runner import ModelRunner, TargetRunner
from specinfer.ops.kv_types import KVScales
from specinfer.ops.triton import on_device


@dataclass(slots=True)
class _ReadOnly:
    """The keys and values of a target, to which nothing is added."""

    keys: list[Tensor]
    values: list[Tensor]
    scales: list[KVScales]
    states: RecurrentStates
    taps: dict[int, Tensor]

    def store(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Do nothing."""


class AssistantRunner(HeadRunner):
    """A runner of an assistant, which reads the cache of a target in the same process."""

    head: AssistantHead

    def __init__(
        self, loaded: LoadedModel, target: TargetRunner, *, graphs: Graphs | None = None, max_requests: int = 32
    ) -> None:
        super().__init__(loaded, target, 0, graphs=graphs, max_requests=max_requests)
        assert isinstance(target, ModelRunner)
        self._store = self.store_of(0)

    def store_of(self, num_features: int) -> "_ReadOnly":
        """Return the target's keys and values, with room for the features of as many tokens of a pass."""
        assert isinstance(self.target, ModelRunner)
        tensors = self.target.tensors
        with torch.inference_mode(mode=False):
            room = torch.zeros(num_features + 1, self.head.width, dtype=self.head.dtype, device=self.loaded.device)
        return _ReadOnly(tensors.keys, tensors.values, tensors.scales, tensors.states, {0: room})

    @torch.inference_mode()
    def score(self, pieces: Sequence[Piece]) -> tuple[Tensor, Tensor]:
        """Return [tokens, vocab] logits and the [tokens, width] features of the next level."""
        with on_device(self.loaded.device):
            return self.head.compute(pack(pieces, self._store, self.loaded.device, native=self.loaded.native))

    def piece(self, tokens: Sequence[int], read_slots: Slots, features: Tensor) -> Piece:
        """Return the piece of nodes of one level, which see the tokens that the target has computed, and no others.

        Args:
            read_slots: [tokens that the target has computed] their slots.
            features: [nodes, width].
        """
        count = len(tokens)
        return Piece(
            tokens=tokens,
            positions=[len(read_slots) + self.head.offset] * count,
            prefix_slots=read_slots,
            slots=np.repeat(read_slots[-1:], count),  # not written, and seen by none
            visible=np.zeros((count, count), dtype=np.bool_),
            num_logits=count,
            features=features,
        )


class _NoCache(FeatureCache):
    """The known tokens of each request, of which nothing is stored."""

    def sync(self, request: Request) -> Known | None:
        count = len(request.token_ids)
        if count < 2 or not self._head_runner.has_read(request):
            return None
        self.known[request.request_id] = Known(request.token_ids, count, count)
        return self.known[request.request_id]


class AssistantDrafter(FeatureDrafter):
    """A drafter that grows trees of an assistant's next tokens; arguments as for `SmallModelDrafter`."""

    runner: AssistantRunner
    kind = DraftKind(reads_features=True, shares_cache=True, stores_drafts=False)

    def _make_cache(self, runner: ModelRunner) -> DrafterCache:
        assert isinstance(runner, AssistantRunner)
        return _NoCache(runner, self.vocabulary, None)

    def _begin(self, growing_trees: Sequence[GrowingTree]) -> LevelCandidates:
        features = [self._first_feature(tree.request) for tree in growing_trees]  # [1 + computed, width] of each

        def candidates_of(growing: Sequence[GrowingTree], level: Level) -> Candidates:
            logits, outputs = self.runner.score([self._level(tree, features[tree.index]) for tree in growing])
            for tree, new in zip(growing, outputs.split([len(tree.frontier) for tree in growing]), strict=True):
                features[tree.index] = torch.cat([features[tree.index], new])
            return self._candidates(logits, level)

        return candidates_of

    def _first_feature(self, request: Request) -> Tensor:
        end = len(request.token_ids) - 1
        return self.runner.features(request.request_id, end - 1, end)

    def _level(self, tree: GrowingTree, features: Tensor) -> Piece:
        """Return the piece of the frontier's nodes; row 1 + n of the features is the output for node n."""
        new = list(tree.frontier)
        slots = self.runner.target.cache.slots(tree.request.request_id)[: len(tree.request.token_ids) - 1]
        return self.runner.piece(tree.tokens[new].tolist(), slots, features[(tree.parents[new] + 1).tolist()])

"""A head that grows trees of one pass, such as DFlash, DSpark and P-EAGLE.

The pass scores the tokens at each distance after the last known one. They become the levels of a tree, grown by the
accumulated acceptance probabilities (DDTree, arXiv 2604.12989), with no further pass. Rows of DFlash are independent of
the path; a token is then drawn from its row whatever the path is, so drawn trees stay exact.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specinfer.core.request import Request
from specinfer.drafters.drafter_cache import DrafterCache
from specinfer.drafters.feature_drafter import FeatureCache, FeatureDrafter, HeadRunner
from specinfer.drafters.growth.draft_sampling import Candidates, chooses_for, draw
from specinfer.drafters.growth.frontier import Level
from specinfer.drafters.growth.tree_batch import GrowingTree
from specinfer.drafters.small_model import LevelCandidates
from specinfer.model.batch import Piece
from specinfer.model.heads.head import Block, FeatureHead
from specinfer.model.kv_cache import Slots
from specinfer.model.runner import ModelRunner
from specinfer.verify.logits import is_adjusted

BLOCKS_TOGETHER = 16  # blocks of a text in one pass


class _Rows(NamedTuple):
    """The results of a pass over the blocks of some requests; rows of a request are adjacent."""

    logits: Tensor  # [requests * depths, vocab]
    hidden: Tensor  # [requests * depths, width]


def block_piece(block: Block, anchor: int, prefix_slots: Slots, slots: Slots) -> Piece:
    """Return a block that begins with this token, after the tokens of these slots."""
    return Piece(
        tokens=[anchor, *[block.mask_token] * (block.size - 1)],
        positions=range(len(prefix_slots), len(prefix_slots) + block.size),
        prefix_slots=prefix_slots,
        slots=slots,
        visible=np.tri(block.size, k=0 if block.is_causal else block.size, dtype=np.bool_),
        num_logits=block.max_depth,
    )


def first_logits(
    runner: ModelRunner, name: str, ids: Sequence[int], features: Tensor, anchors: Sequence[int]
) -> Tensor:
    """Return the [anchors, vocab] logits of the first tokens of blocks that begin at these tokens of a text.

    Args:
        name: The name by which the cache knows the text, which has nothing in it yet.
        features: [tokens - 1, width] those of all tokens but the last.
    """
    head, cache, count = runner.loaded.model, runner.cache, len(ids) - 1
    assert isinstance(head, FeatureHead)
    assert head.block is not None
    slots = cache.reserve(name, count)
    runner.forward([replace(Piece.from_span(ids[:-1], None, slots[:0], slots), features=features)])
    cache.commit(name, range(count))
    parts = []
    for start in range(0, len(anchors), BLOCKS_TOGETHER):
        group = anchors[start : start + BLOCKS_TOGETHER]
        pieces = [
            block_piece(head.block, ids[anchor], slots[:anchor], cache.reserve(name, head.block.size))
            for anchor in group
        ]
        logits = runner.forward(pieces)[:: head.block.max_depth]
        if head.is_pairwise:
            places = [int(piece.slots[-head.block.max_depth]) for piece in pieces]
            before = torch.tensor([ids[anchor] for anchor in group], device=logits.device)
            logits, _ = head.conditional(logits, runner.tensors.taps[0][places], before)
        parts.append(logits.clone())
        cache.commit(name, ())
    return torch.cat(parts)


class BlockCache(FeatureCache):
    """The cache of a head that drafts in one pass, without the last known token, which begins the block."""

    def score(self, requests: Sequence[Request]) -> _Rows:
        """Read what the cache lacks, and run one pass over a block for each request."""
        for request in requests:
            self.read_known(request)
        block = self._head_runner.head.block
        assert block is not None
        cache, depth = self._cache, block.max_depth
        try:
            pieces = [self._block(request, block) for request in requests]
            logits = self._runner.forward(pieces)
        finally:
            for request in requests:
                cache.commit(request.request_id, ())
        places = torch.from_numpy(np.concatenate([piece.slots[-depth:] for piece in pieces])).to(logits.device)
        return _Rows(logits, self._runner.tensors.taps[0].index_select(0, places))

    def _block(self, request: Request, block: Block) -> Piece:
        request_id, ids = request.request_id, self.known[request.request_id].ids
        piece = block_piece(block, ids[-1], self._cache.slots(request_id), self._cache.reserve(request_id, block.size))
        mask = self._head_runner.mask_features
        if mask is None:
            return piece
        first = self._head_runner.features(request_id, len(ids) - 1, len(ids))
        return replace(piece, features=torch.cat([first, mask.expand(block.size - 1, -1)]))


class BlockDrafter(FeatureDrafter):
    """A drafter that grows trees of one pass of a block head; arguments as for `SmallModelDrafter`."""

    _cache: BlockCache

    def _make_cache(self, runner: ModelRunner) -> DrafterCache:
        assert isinstance(runner, HeadRunner)
        head, block = runner.head, runner.head.block
        assert block is not None
        # The root of a pair is a known token, and computed with the others.
        first = int(head.reads_pairs)
        self.kind = self.kind._replace(block=range(first, block.size), max_depth=block.max_depth)
        return BlockCache(runner, self.vocabulary, None)

    @property
    def _head(self) -> FeatureHead:
        return self.runner.head  # another one after a change of the weights

    def _begin(self, growing_trees: Sequence[GrowingTree]) -> LevelCandidates:
        rows = self._cache.score([growing_tree.request for growing_tree in growing_trees])
        return partial(self._of_rows, rows._replace(logits=self.vocabulary.compact(rows.logits)))

    def _of_rows(self, rows: _Rows, growing: Sequence[GrowingTree], level: Level) -> Candidates:
        """Return the candidates of a level from the rows of the only pass, tree by tree."""
        counts = [len(tree.frontier) for tree in growing]
        places = [tree.index * self.kind.max_depth + tree.num_levels for tree in growing]
        if not self._head.is_pairwise and all(self._is_free(tree.request, tree.num_levels) for tree in growing):
            firsts = Level([frontier._replace(depths=frontier.depths[:1]) for frontier in level.frontiers])
            logits = rows.logits.index_select(0, torch.tensor(places, device=rows.logits.device))
            alike = draw(self.draft_sampling, logits, firsts, self.vocabulary.token_map)
            return _repeated(alike, counts)
        index = torch.from_numpy(np.repeat(places, counts)).to(rows.logits.device)
        logits, accepted = rows.logits.index_select(0, index), None
        if self._head.is_pairwise:
            last = np.concatenate([tree.tokens[tree.frontier.start : tree.frontier.stop] for tree in growing])
            logits, accepted = self._head.conditional(
                logits, rows.hidden.index_select(0, index), torch.tensor(last, device=logits.device)
            )
        candidates = draw(self.draft_sampling, logits, level, self.vocabulary.token_map)
        return candidates if accepted is None else _scaled(candidates, accepted)

    def _is_free(self, request: Request, depth: int) -> bool:
        """Return whether candidates of a request after paths of this length depend on the length alone."""
        return chooses_for(self.draft_sampling, request) and not is_adjusted(request, depth)


def _repeated(candidates: Candidates, counts: Sequence[int]) -> Candidates:
    """Return each row of chosen candidates as often as its tree has nodes."""
    return Candidates(np.repeat(candidates.tokens, counts, axis=0), np.repeat(candidates.confidence, counts, axis=0))


def _scaled(candidates: Candidates, accepted: Tensor) -> Candidates:
    """Return candidates whose confidence, that of the best one being given, is the predicted acceptance."""
    best = candidates.confidence.max(axis=1, keepdims=True)
    scale = accepted.cpu().numpy()[:, None] / np.maximum(best, 1e-9)
    return replace(candidates, confidence=np.minimum(candidates.confidence * scale, 1.0).astype(np.float32))

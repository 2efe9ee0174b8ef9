"""A block head that grows trees of one pass, such as DFlash and DSpark.

The pass scores the tokens at each distance after the last known one. They become the levels of a tree, grown by the
accumulated acceptance probabilities (DDTree, arXiv 2604.12989), with no further pass. Rows of DFlash are independent of
the path; a token is then drawn from its row whatever the path is, so drawn trees stay exact.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specinfer.core.request import Request
from specinfer.core.tree import TokenTree
from specinfer.drafters.drafter_cache import DrafterCache
from specinfer.drafters.feature_drafter import FeatureDrafter, HeadRunner
from specinfer.drafters.growth.draft_sampling import CHOSEN, Candidates, Node, draw
from specinfer.drafters.growth.expansion import GrowingTree, TreeBatch
from specinfer.drafters.merge.scoring import Scoring
from specinfer.drafters.vocabulary.token_map import Known, Vocabulary
from specinfer.model.batch import Piece
from specinfer.model.heads.block import BlockHead
from specinfer.model.runner import ModelRunner
from specinfer.verify.logits import is_adjusted


class _Rows(NamedTuple):
    """The results of a pass over the blocks of some requests; rows of a request are adjacent."""

    logits: Tensor  # [requests * depths, vocab]
    hidden: Tensor  # [requests * depths, width]


class BlockCache(DrafterCache):
    """The keys and values of a block head for each request's known tokens but the last."""

    def __init__(self, runner: HeadRunner, vocabulary: Vocabulary, scoring: Scoring | None) -> None:
        super().__init__(runner, vocabulary, scoring)
        self._head_runner = runner
        assert isinstance(runner.head, BlockHead)
        self._head = runner.head

    def sync(self, request: Request) -> Known | None:
        return super().sync(request) if self._head_runner.has_read(request) else None

    def _piece(self, request: Request, start: int, end: int, tree: TokenTree | None) -> Piece:
        piece = super()._piece(request, start, end, tree)
        return replace(piece, features=self._head_runner.features(request.request_id, start, end))

    def score(self, requests: Sequence[Request]) -> _Rows:
        """Read what the cache lacks, and run one pass over a block for each request."""
        self.read_all(requests, 1)
        cache, size, depth = self._cache, self._head.block_size, self._head.max_depth
        visible = np.tri(size, dtype=np.bool_) if self._head.is_causal else np.ones((size, size), dtype=np.bool_)
        pieces, slots = [], []
        try:
            for request in requests:
                ids = self.known[request.request_id].ids
                slots.append(cache.reserve(request.request_id, size))
                pieces.append(
                    Piece(
                        [ids[-1], *[self._head.mask_token] * (size - 1)],
                        range(len(ids) - 1, len(ids) - 1 + size),
                        cache.slots(request.request_id), slots[-1], visible, depth,
                    )
                )  # fmt: skip
            logits = self._runner.forward(pieces)
        finally:
            for request in requests:
                cache.commit(request.request_id, ())
        places = torch.from_numpy(np.concatenate([one[-depth:] for one in slots])).to(logits.device)
        return _Rows(logits, self._runner.tensors.taps[0][places])


class BlockDrafter(FeatureDrafter):
    """A drafter that grows trees of one pass of a block head; arguments as for `SmallModelDrafter`."""

    _cache: BlockCache

    def _make_cache(self, runner: ModelRunner) -> DrafterCache:
        assert isinstance(runner, HeadRunner)
        assert isinstance(runner.head, BlockHead)
        self._head, self.max_depth = runner.head, runner.head.max_depth
        return BlockCache(runner, self.vocabulary, self._scoring)

    def _grow(self, growing_trees: list[GrowingTree]) -> None:
        tree_batch = TreeBatch(growing_trees, self._calibration)
        rows = self._cache.score([growing_tree.request for growing_tree in growing_trees])
        rows = rows._replace(logits=self.vocabulary.compact(rows.logits))
        while nodes := tree_batch.wanted():
            tree_batch.extend(self._candidates(rows, growing_trees, nodes))

    def _candidates(self, rows: _Rows, growing_trees: Sequence[GrowingTree], nodes: Sequence[Node]) -> Candidates:
        """Return the candidates of the wanted nodes, tree by tree."""
        growing = [tree for tree in growing_trees if tree.frontier]
        counts = [len(tree.frontier) for tree in growing]
        places = [tree.index * self.max_depth + tree.num_levels for tree in growing]
        if not self._head.is_pairwise and all(self._is_free(tree.request) for tree in growing):
            firsts = np.cumsum([0, *counts[:-1]])
            alike = draw(
                self.draft_sampling, rows.logits[places], [nodes[i] for i in firsts], self.vocabulary.token_map
            )
            return _repeated(alike, counts)
        index = np.repeat(places, counts)
        logits, accepted = rows.logits[index], None
        if self._head.is_pairwise:
            last = [node.path[-1] if node.path else node.request.token_ids[-1] for node in nodes]
            logits, accepted = self._head.conditional(
                logits, rows.hidden[index], torch.tensor(last, device=logits.device)
            )
        candidates = draw(self.draft_sampling, logits, nodes, self.vocabulary.token_map)
        return candidates if accepted is None else _scaled(candidates, accepted)

    def _is_free(self, request: Request) -> bool:
        """Return whether candidates of a request depend on their depth alone."""
        return (self.draft_sampling in CHOSEN or request.params.is_greedy) and not is_adjusted(request)


def _repeated(candidates: Candidates, counts: Sequence[int]) -> Candidates:
    """Return each row of chosen candidates as often as its tree has nodes."""
    return Candidates(
        np.repeat(candidates.tokens, counts, axis=0),
        np.repeat(candidates.confidence, counts, axis=0),
        np.repeat(candidates.support, counts, axis=0),
        np.repeat(candidates.probs, counts, axis=0),
        np.repeat(candidates.places, counts, axis=0),
    )


def _scaled(candidates: Candidates, accepted: Tensor) -> Candidates:
    """Return candidates whose confidence, that of the best one being given, is the predicted acceptance."""
    best = candidates.confidence.max(axis=1, keepdims=True)
    scale = accepted.cpu().numpy()[:, None] / np.maximum(best, 1e-9)
    return replace(candidates, confidence=np.minimum(candidates.confidence * scale, 1.0).astype(np.float32))

"""Passes of a head over a chain of tokens, then a tree; of a block head without features over two blocks."""

from dataclasses import replace

import torch
from torch import Tensor

from specinfer.core.tree import TokenTree
from specinfer.drafters.block_drafter import block_piece
from specinfer.model.batch import Piece
from specinfer.model.heads.head import FeatureHead
from specinfer.model.load import LoadedModel
from specinfer.model.runner import ModelRunner
from tiny import random_prompts

TREE = TokenTree((8, 9, 10, 11, 9, 13), (-1, 0, 0, 1, 2, 1))
(CHAIN,) = random_prompts([20])


def chain_features(loaded: LoadedModel, count: int = len(CHAIN), seed: int = 0) -> Tensor:
    """Return [count, width] random features."""
    return torch.randn(count, 32, generator=torch.Generator().manual_seed(seed)).to(loaded.device, loaded.dtype)


def head_passes(loaded: LoadedModel, num_logits: int = 7) -> tuple[Tensor, Tensor]:
    """Return the logits of both passes, and the features that they store.

    Args:
        num_logits: Rows of the chain with logits, the last ones.
    """
    head, runner = loaded.model, ModelRunner(loaded, 64)
    assert isinstance(head, FeatureHead)
    slots = runner.cache.reserve("one", len(CHAIN))
    chain = Piece.of_span(CHAIN, TokenTree.root(CHAIN[-1]), runner.cache.slots("one"), slots)
    features = chain_features(loaded)
    if head.block is not None and head.mask_features is None:
        runner.forward([replace(chain, features=features, num_logits=0)])
        runner.cache.commit("one", range(len(CHAIN)))
        own = runner.cache.reserve("one", 2 * head.block.size).reshape(2, -1)
        ends = zip((20, 7), own, strict=True)
        logits = runner.forward([block_piece(head.block, 5, slots[:end], new) for end, new in ends])
        return logits, runner.tensors.taps[0][own.reshape(-1)].float()
    first = runner.forward([replace(chain, features=features, num_logits=num_logits)]).clone()
    runner.cache.commit("one", range(len(CHAIN)))
    slots = runner.cache.reserve("one", len(TREE))
    tree = Piece.of_span(TREE.tokens[:1], TREE, runner.cache.slots("one"), slots)
    second = runner.forward([replace(tree, features=chain_features(loaded, len(TREE), seed=1))])
    return torch.cat([first, second]), runner.tensors.taps[0][: len(CHAIN) + len(TREE)].float()

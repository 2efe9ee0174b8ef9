"""Hits of heads in the form in which they serve, on the hidden states of an example."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from specinfer.core.tree import TokenTree
from specinfer.drafters.block_drafter import block_piece
from specinfer.drafters.vocabulary.token_map import TokenMap
from specinfer.learning.adapt.held_out_evaluation import Hits, hits_in
from specinfer.learning.examples import TrainingExample
from specinfer.model.batch import Piece
from specinfer.model.heads.head import Block, FeatureHead
from specinfer.model.load import LoadedModel
from specinfer.model.runner import ModelRunner

_NAME = "example"
_BLOCKS = 16  # in one pass


def hits_of_head(loaded: LoadedModel, example: TrainingExample, vocab_size: int) -> Hits:
    """Return the hits of a head's first draft token at each position, [num_output].

    An example has at least three tokens. Nothing predicts the second one, whose hits are those of the third.
    """
    head = loaded.model
    assert isinstance(head, FeatureHead)
    assert example.taps is not None
    tokens = example.tokens.tolist()
    taps = _on_device(example.taps, loaded)
    if head.block is None:
        logits = _of_pairs(loaded, head, example, tokens, taps)
    else:
        logits = _of_blocks(loaded, head, head.block, example, tokens, taps)
    if loaded.token_map is not None:
        logits = TokenMap(loaded.token_map, vocab_size).expand(logits)
    return hits_in(logits, example, vocab_size)


def _on_device(taps: Mapping[int, Tensor], loaded: LoadedModel) -> dict[int, Tensor]:
    return {layer: tap.to(loaded.device) for layer, tap in taps.items()}


@torch.inference_mode()
def _of_pairs(
    loaded: LoadedModel, head: FeatureHead, example: TrainingExample, tokens: list[int], taps: Mapping[int, Tensor]
) -> Tensor:
    """Return [num_output, logits]: pair t, of the feature of token t and of token t + 1, predicts token t + 2."""
    ids = tokens[1:-1]
    runner = ModelRunner(loaded, len(ids))
    slots = runner.cache.reserve(_NAME, len(ids))
    piece = Piece.of_span(ids, TokenTree.root(ids[-1]), runner.cache.slots(_NAME), slots)
    features = head.project([taps[layer][: len(ids)] for layer in head.reads])
    first = max(example.num_prompt - 2, 0)
    logits = runner.forward([replace(piece, num_logits=len(ids) - first, features=features)])
    return torch.cat([logits[:1], logits]) if example.num_prompt == 1 else logits


@torch.inference_mode()
def _of_blocks(
    loaded: LoadedModel,
    head: FeatureHead,
    block: Block,
    example: TrainingExample,
    tokens: list[int],
    taps: Mapping[int, Tensor],
) -> Tensor:
    """Return [num_output, logits] of the first rows of blocks that begin with the token before each output token."""
    count = len(tokens) - 1
    runner = ModelRunner(loaded, count + _BLOCKS * block.size)
    slots = runner.cache.reserve(_NAME, count)
    features = head.project([taps[layer] for layer in head.reads])
    runner.forward([replace(Piece.of_span(tokens[:-1], None, slots[:0], slots), features=features)])
    runner.cache.commit(_NAME, range(count))
    found = []
    for start in range(example.num_prompt - 1, count, _BLOCKS):
        anchors = range(start, min(start + _BLOCKS, count))
        pieces = [
            block_piece(block, tokens[anchor], slots[:anchor], runner.cache.reserve(_NAME, block.size))
            for anchor in anchors
        ]
        logits = runner.forward(pieces)[:: block.max_depth]
        if head.is_pairwise:
            places = torch.tensor([int(piece.slots[-block.max_depth]) for piece in pieces], device=logits.device)
            before = torch.tensor([tokens[anchor] for anchor in anchors], device=logits.device)
            logits, _ = head.conditional(logits, runner.tensors.taps[0][places], before)
        found.append(logits.clone())
        runner.cache.commit(_NAME, ())
    return torch.cat(found)

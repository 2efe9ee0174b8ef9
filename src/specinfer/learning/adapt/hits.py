"""Hits: the probability that a drafted token is the target's, of weights in training or as they serve."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specinfer.core.tree import TokenTree
from specinfer.drafters.block_drafter import block_piece
from specinfer.drafters.vocabulary.token_map import TokenMap
from specinfer.learning.examples import Source, TrainingExample
from specinfer.model.batch import Piece
from specinfer.model.heads.head import Block, FeatureHead
from specinfer.model.load import LoadedModel
from specinfer.model.runner import ModelRunner

Hits = npt.NDArray[np.float32]
_NAME = "example"
_BLOCKS = 16  # in one pass


def hits_in(logits: Tensor, example: TrainingExample, vocab_size: int) -> Hits:
    """Return the probability that a drafted token is the target's, [num_output], as far as the example shows.

    For greedy text it is 1 where the best token is the output token, else 0. For sampled text it is the overlap of the
    two distributions on the target's best tokens, sum min(p, q).

    Args:
        logits: [num_output, vocab] the drafter's logits at each position.
        vocab_size: The target's vocabulary size; tokens beyond it are never drafted.
    """
    logits = logits[:, :vocab_size].float()
    if example.source is Source.GREEDY:
        output_ids = torch.from_numpy(example.tokens[example.num_prompt :]).to(logits.device)
        overlap = (logits.argmax(-1) == output_ids).float()
    else:
        q = logits.softmax(-1).gather(1, torch.from_numpy(example.top_ids).long().to(logits.device))
        p = torch.from_numpy(example.top_logprobs).float().exp().to(logits.device)
        overlap = torch.minimum(p, q).sum(-1)
    hits: Hits = overlap.cpu().numpy()
    return hits


@torch.inference_mode()
def served_hits(loaded: LoadedModel, example: TrainingExample, vocab_size: int) -> Hits:
    """Return the hits of a drafter's first draft token at each position, [num_output], in the form in which it serves.

    An example for a head has at least three tokens. Nothing predicts the second, whose hits are those of the third.
    """
    head, tokens = loaded.model, example.tokens.tolist()
    if not isinstance(head, FeatureHead):
        logits = _of_text(loaded, example, tokens[:-1])
    else:
        assert example.taps is not None
        taps = {layer: tap.to(loaded.device) for layer, tap in example.taps.items()}
        if head.block is None:
            logits = _of_pairs(loaded, head, example, tokens, taps)
        else:
            logits = _of_blocks(loaded, head, head.block, example, tokens, taps)
    if loaded.token_map is not None:
        logits = TokenMap(loaded.token_map, vocab_size).expand(logits)
    return hits_in(logits, example, vocab_size)


def _of_text(loaded: LoadedModel, example: TrainingExample, tokens: list[int]) -> Tensor:
    """Return [num_output, logits] of a language model."""
    runner = ModelRunner(loaded, len(tokens))
    slots = runner.cache.reserve(_NAME, len(tokens))
    piece = Piece.of_span(tokens, TokenTree.root(tokens[-1]), runner.cache.slots(_NAME), slots)
    return runner.forward([replace(piece, num_logits=example.num_output)])


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
    rows = []
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
        rows.append(logits.clone())
        runner.cache.commit(_NAME, ())
    return torch.cat(rows)

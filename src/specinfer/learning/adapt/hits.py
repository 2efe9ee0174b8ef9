"""Hits: the probability that a drafted token is the target's, of weights in training or as they serve."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specinfer.core.tree import TokenTree
from specinfer.drafters.block_drafter import BLOCKS_TOGETHER, first_logits
from specinfer.drafters.vocabulary.token_map import TokenMap
from specinfer.learning.distillation import overlap
from specinfer.learning.examples import Source, TrainingExample
from specinfer.model.batch import Piece
from specinfer.model.heads.head import FeatureHead
from specinfer.model.load import LoadedModel
from specinfer.model.runner import ModelRunner

Hits = npt.NDArray[np.float32]
_NAME = "example"


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
        right = (logits.argmax(-1) == output_ids).float()
    else:
        q = logits.softmax(-1).gather(1, torch.from_numpy(example.top_ids).long().to(logits.device))
        p = torch.from_numpy(example.top_logprobs).float().to(logits.device)
        right = overlap(q, p)
    hits: Hits = right.cpu().numpy()
    return hits


@torch.inference_mode()
def served_hits(loaded: LoadedModel, example: TrainingExample, vocab_size: int) -> Hits:
    """Return the hits of a drafter's first draft token at each position, [num_output], in the form in which it serves.

    An example for a head has at least three tokens. Nothing predicts the second, whose hits are those of the third.
    """
    head, tokens = loaded.model, example.tokens.tolist()
    if not isinstance(head, FeatureHead):
        logits = _of_text(loaded, tokens[:-1], example.num_output)
    else:
        assert example.taps is not None
        features = head.project([example.taps[layer].to(loaded.device) for layer in head.reads])
        if head.block is None:
            # Pair t, of the feature of token t and of token t + 1, predicts token t + 2.
            num_pairs, first = len(tokens) - 2, max(example.num_prompt - 2, 0)
            logits = _of_text(loaded, tokens[1:-1], num_pairs - first, features[:num_pairs])
            if example.num_prompt == 1:
                logits = torch.cat([logits[:1], logits])
        else:
            # Blocks begin with the token before each output token.
            runner = ModelRunner(loaded, len(tokens) - 1 + BLOCKS_TOGETHER * head.block.size)
            logits = first_logits(runner, _NAME, tokens, features, range(example.num_prompt - 1, len(tokens) - 1))
    if loaded.token_map is not None:
        logits = TokenMap(loaded.token_map, vocab_size).expand(logits)
    return hits_in(logits, example, vocab_size)


def _of_text(loaded: LoadedModel, ids: list[int], count: int, features: Tensor | None = None) -> Tensor:
    """Return the [count, vocab] logits after the last tokens of a text, of a head with their features."""
    runner = ModelRunner(loaded, len(ids))
    slots = runner.cache.reserve(_NAME, len(ids))
    piece = Piece.from_span(ids, TokenTree.root(ids[-1]), slots[:0], slots)
    return runner.forward([replace(piece, num_logits=count, features=features)])

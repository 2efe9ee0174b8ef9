"""Log-probabilities of chosen tokens and of the most probable ones, in PyTorch, for many rows of logits at once.

No shape depends on contents and nothing waits for the device, so this can be part of a captured graph.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from specinfer.kernels.choice import most_probable_in_order

_AT_ONCE = 32  # rows; the memory of a captured graph holds copies of so many


class TokenScores(NamedTuple):
    """Log-probabilities in rows of a target's logits."""

    values: Tensor  # [rows] float32, of the row's own token
    ranks: Tensor  # [rows] integers, 1 and the number of tokens that are more probable than it
    best: Tensor  # [rows, count] integers, the most probable tokens in descending order, of equal ones the first
    best_values: Tensor  # [rows, count] float32


def score_tokens(logits: Tensor, places: Tensor, tokens: Tensor, out: TokenScores) -> None:
    """Write the log-probabilities of a token, and those of the most probable tokens, after each place.

    Args:
        logits: [nodes, vocab] of a pass.
        places: [rows] int64 row of logits of each place.
        tokens: [rows] int64.
        out: The number of columns, at most the vocabulary, is that of the most probable tokens.
    """
    count = out.best.shape[1]
    for start in range(0, len(places), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        logprobs = torch.log_softmax(logits[places[part]].float(), dim=-1)
        own = logprobs.gather(1, tokens[part].unsqueeze(1))
        out.values[part].copy_(own.squeeze(1))
        out.ranks[part].copy_((logprobs > own).sum(dim=1) + 1)
        if count:
            values, best = most_probable_in_order(logprobs, count)
            out.best_values[part].copy_(values)
            out.best[part].copy_(best)

"""Log-probabilities of chosen tokens and of the most probable ones, in PyTorch, for many rows of logits at once.

No shape depends on contents and nothing waits for the device, so this can be part of a captured graph.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specinfer.ops.cpu.choice import most_probable_in_order

# Rows computed at once: a captured graph has memory for copies of all of them, a CPU's cache for one.
_AT_ONCE, _AT_ONCE_ON_CPU = 32, 1
_LEAST_SORTED = 6  # tokens of a row from which on a CPU sorts the row (NumPy's vectorised sort) sooner than it counts


class TokenScores(NamedTuple):
    """Log-probabilities in rows of a target's logits."""

    values: Tensor  # [rows, tokens] float32, of the row's own tokens
    ranks: Tensor  # [rows, tokens] integers, 1 and the number of tokens that are more probable; [rows, 0] for no ranks
    best: Tensor  # [rows, count] integers, the most probable tokens in descending order, of equal ones the first
    best_values: Tensor  # [rows, count] float32

    @classmethod
    def empty(cls, rows: int, num_tokens: int, count: int, device: torch.device) -> "TokenScores":
        own, best = torch.empty((rows, num_tokens), device=device), torch.empty((rows, count), device=device)
        return cls(own, torch.empty_like(own, dtype=torch.int64), torch.empty_like(best, dtype=torch.int64), best)


def score_tokens(logits: Tensor, places: Tensor, tokens: Tensor, out: TokenScores) -> None:
    """Write the log-probabilities of some tokens, and those of the most probable ones, after each place.

    Args:
        logits: [nodes, vocab] of a pass.
        places: [rows] int64 row of logits of each place.
        tokens: [rows, tokens] int64.
        out: The number of columns, at most the vocabulary, is that of the most probable tokens.
    """
    count, step = out.best.shape[1], _AT_ONCE_ON_CPU if logits.device.type == "cpu" else _AT_ONCE
    for start in range(0, len(places), step):
        part = slice(start, start + step)
        logprobs = torch.log_softmax(logits[places[part]].float(), dim=-1)
        of_tokens = logprobs.gather(1, tokens[part])
        out.values[part].copy_(of_tokens)
        if logits.device.type == "cpu" and out.ranks.shape[1] >= _LEAST_SORTED:
            out.ranks[part].copy_(_sorted_ranks(logprobs, of_tokens))
        else:
            for column in range(out.ranks.shape[1]):  # one after the other: together they would take more memory
                out.ranks[part, column].copy_((logprobs > of_tokens[:, column : column + 1]).sum(dim=1) + 1)
        if count:
            values, best = most_probable_in_order(logprobs, count)
            out.best_values[part].copy_(values)
            out.best[part].copy_(best)


def _sorted_ranks(logprobs: Tensor, of_tokens: Tensor) -> Tensor:
    """Return the ranks of some log-probabilities of each row, found in the row's sorted ones."""
    rows = zip(np.sort(logprobs.numpy(), axis=-1), of_tokens.numpy(), strict=True)
    ranks = [len(row) + 1 - np.searchsorted(row, values, side="right") for row, values in rows]
    return torch.from_numpy(np.stack(ranks))

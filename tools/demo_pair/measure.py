"""Quality of the demo pair: loss per token, and how often the drafter predicts the target.

All figures are teacher-forced. On text that the target generated greedily this loses nothing: a drafted token is
accepted while it equals the text, so the drafter's context is always the text itself.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

TOP = 5


@dataclass(frozen=True, slots=True)
class Agreement:
    """The agreement of the drafter with the target on some rows of text."""

    hit_rates: list[float]  # at k - 1: the rate at which the drafter's best k contain the target's argmax
    tokens_per_pass: float  # tokens per pass of a greedy chain, if the target had generated the text


def rows_of(tokens: Tensor, seq_len: int) -> Tensor:
    """Return a token stream cut into rows, [num_rows, seq_len]; the incomplete last row is dropped."""
    num_rows = len(tokens) // seq_len
    return tokens[: num_rows * seq_len].view(num_rows, seq_len).long()


@torch.inference_mode()
def mean_loss(model: Any, rows: Tensor, batch: int = 8) -> float:
    """Return the mean negative log-likelihood of each token after the first of its row, in nats."""
    model.eval()
    total = 0.0
    for part in rows.split(batch):
        logits = model(part[:, :-1]).logits.float().flatten(0, 1)
        total += functional.cross_entropy(logits, part[:, 1:].flatten(), reduction="sum").item()
    return total / rows[:, 1:].numel()


def bits_per_byte(loss: float, num_tokens: int, num_bytes: int) -> float:
    return loss * num_tokens / num_bytes / math.log(2)


@torch.inference_mode()
def agreement(target: Any, drafter: Any, rows: Tensor, *, skip: int = 0, chain: int = 6, batch: int = 8) -> Agreement:
    """Compare the two after each token of `rows`, without the first `skip` tokens of each row."""
    target.eval()
    drafter.eval()
    hits = torch.zeros(TOP)
    num_places = num_passes = num_tokens = 0
    for part in rows.split(batch):
        best = target(part).logits[:, skip:].argmax(-1, keepdim=True)  # [rows, places, 1]
        guesses = drafter(part).logits[:, skip:].topk(TOP).indices  # [rows, places, TOP]
        hit = (guesses == best).cumsum(-1).bool()  # at k - 1: among the best k
        hits += hit.sum((0, 1)).cpu()
        num_places += best.numel()
        for row in hit[:, :, 0].tolist():
            lengths = pass_lengths(row, chain)
            num_passes += len(lengths)
            num_tokens += sum(lengths)
    return Agreement((hits / num_places).tolist(), num_tokens / num_passes)


def pass_lengths(agrees: list[bool], chain: int) -> list[int]:
    """Return the tokens of each target pass: the accepted part of a chain, and one token of the target."""
    lengths, place = [], 0
    while place < len(agrees):
        length = 1
        while length <= chain and place + length - 1 < len(agrees) and agrees[place + length - 1]:
            length += 1
        lengths.append(length)
        place += length
    return lengths

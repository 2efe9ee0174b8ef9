"""Processing of logits for many requests at once, in plain PyTorch; ops/triton has the same functions.

They compute what `verify.logits` computes for one request: `mask_logits` and `adjust_logits` the constraints, biases
and penalties of `adjust`, and `least_kept` the limit of `truncate`. Parameters are tensors with a number for each
request. Nothing waits for the device.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from specinfer.ops.tree_layout import WORD

MAX_ENDS = 16  # tokens of a request that end its output, and that are held back


@dataclass(frozen=True, slots=True)
class Truncation:
    """Which improbable tokens are dropped. All are [requests]."""

    temperatures: Tensor  # float32; 0 is greedy, for which nothing is dropped
    log_min_p: Tensor  # float32; -inf keeps all
    top_k: Tensor  # int32; 0 keeps all
    top_p: Tensor  # float64; 1 keeps all

    def first(self, count: int) -> "Truncation":
        """Return that of the first requests."""
        return Truncation(*(getattr(self, field.name)[:count] for field in fields(self)))


@dataclass(frozen=True, slots=True)
class Adjustments:
    """Biases and penalties of requests, and the tokens that they count."""

    is_adjusted: Tensor  # [requests] int32, 1 where anything applies
    bias: Tensor  # [requests, vocab] float32; -inf forbids a token
    seen: Tensor  # [requests, vocab] int32, twice the count in the output, and 1 more if it is in the prompt
    repeated_positive: Tensor  # [requests] float32, factor of logits above 0 of tokens seen
    repeated_negative: Tensor  # [requests] float32, factor of the other logits of tokens seen
    frequency: Tensor  # [requests] float32, subtracted once for each occurrence in the output
    presence: Tensor  # [requests] float32, subtracted once
    num_early: Tensor  # [requests] int32 tokens still to be emitted before the output may end; 0 or less: it may
    ends: Tensor  # [requests, MAX_ENDS] int32 tokens that end it; -1 after the last

    @classmethod
    def empty(cls, num_requests: int, vocab: int, device: torch.device) -> "Adjustments":
        with torch.inference_mode(mode=False):
            bias = torch.zeros((num_requests, vocab), dtype=torch.float32, device=device)
            seen = torch.zeros((num_requests, vocab), dtype=torch.int32, device=device)
            is_adjusted = torch.zeros(num_requests, dtype=torch.int32, device=device)
            numbers = torch.zeros((4, num_requests), dtype=torch.float32, device=device)
            num_early = torch.zeros_like(is_adjusted)
            ends = torch.full((num_requests, MAX_ENDS), -1, dtype=torch.int32, device=device)
        positive, negative, frequency, presence = numbers
        return cls(is_adjusted, bias, seen, positive, negative, frequency, presence, num_early, ends)

    def first(self, count: int) -> "Adjustments":
        """Return those of the first requests."""
        return Adjustments(*(getattr(self, field.name)[:count] for field in fields(self)))

    def move(self, source: int, row: int) -> None:
        """Copy those of one request to another row."""
        for field in fields(self):
            column: Tensor = getattr(self, field.name)
            column[row].copy_(column[source])


@dataclass(frozen=True, slots=True)
class Paths:
    """Nodes of trees, as the draft tokens between each of them and the root."""

    numbers: Tensor  # [requests, nodes] int32 number of each node in `tokens`; below `first` for the root
    tokens: Tensor  # [requests, n] integers
    parents: Tensor  # [requests, n] int32 numbers of parents
    first: int  # lowest number of a node that is not the root
    max_depth: int


def least_kept(logits: Tensor, truncation: Truncation) -> Tensor:
    """Return the score of the least probable token that min-p, top-k and top-p keep: [rows] float32; -inf keeps all.

    Scores are logits divided by the temperature.

    Args:
        logits: [requests * nodes, vocab].
    """
    vocab, nodes = logits.shape[1], len(logits) // len(truncation.top_k)
    temperatures, log_min_p, top_k, top_p = (
        getattr(truncation, field.name).repeat_interleave(nodes).unsqueeze(1) for field in fields(truncation)
    )
    is_sampled = temperatures > 0
    values = (logits.float() / torch.where(is_sampled, temperatures, 1.0)).sort(dim=1, descending=True).values
    best = values[:, :1]
    least = torch.where(log_min_p > -torch.inf, best + log_min_p, -torch.inf)
    count = top_k.long()
    kept = values.gather(1, (count - 1).clamp(min=0, max=vocab - 1))
    least = torch.where((count > 0) & (count < vocab), torch.maximum(least, kept), least)
    mass = (values - best).exp().masked_fill(values < least, 0.0).cumsum(dim=1, dtype=torch.float64)
    last = (mass[:, :-1] < top_p * mass[:, -1:]).sum(dim=1, keepdim=True)
    least = torch.where(top_p < 1, torch.maximum(least, values.gather(1, last)), least)
    return torch.where(is_sampled, least, -torch.inf).squeeze(1)


def mask_logits(logits: Tensor, bits: Tensor, is_masked: Tensor) -> None:
    """Set the logits of tokens that are not allowed to -inf.

    Args:
        logits: [rows, vocab] float32, written to.
        bits: [rows, words] int32, the bits of 32 tokens in each word, set for allowed ones.
        is_masked: [rows] int32; 0 where all tokens are allowed, and no bits are read.
    """
    shifts = torch.arange(WORD, dtype=torch.int32, device=bits.device)
    is_allowed = (bits.unsqueeze(2) >> shifts & 1).flatten(1)[:, : logits.shape[1]] > 0
    logits.masked_fill_(~is_allowed & (is_masked > 0).unsqueeze(1), -torch.inf)


def adjust_logits(logits: Tensor, adjustments: Adjustments, paths: Paths) -> None:
    """Apply biases and penalties, as if the output continued with the path to each node.

    Args:
        logits: [requests * nodes, vocab] float32, written to.
    """
    requests, nodes = paths.numbers.shape
    values = logits.unflatten(0, (requests, nodes))
    seen = adjustments.seen.unsqueeze(1).repeat(1, nodes, 1)
    at, depths = paths.numbers.long(), torch.zeros_like(paths.numbers)
    for _ in range(paths.max_depth):
        is_drafted, place = at >= paths.first, at.clamp(min=0)
        depths = depths + is_drafted
        tokens = paths.tokens.long().gather(1, place)
        seen.scatter_add_(2, tokens.unsqueeze(2), 2 * is_drafted.int().unsqueeze(2))
        at = torch.where(is_drafted, paths.parents.long().gather(1, place), -1)
    counts = (seen >> 1).float()
    positive, negative, frequency, presence = (
        getattr(adjustments, name)[:, None, None]
        for name in ("repeated_positive", "repeated_negative", "frequency", "presence")
    )
    found = values + adjustments.bias.unsqueeze(1)
    found = torch.where(seen > 0, found * torch.where(found > 0, positive, negative), found)
    found = found - counts * frequency
    found = found - (counts > 0).float() * presence
    # Padding is a column more, which is dropped.
    is_end = torch.zeros((requests, logits.shape[1] + 1), dtype=torch.bool, device=logits.device)
    ends = torch.where(adjustments.ends < 0, logits.shape[1], adjustments.ends).long()
    is_end = is_end.scatter(1, ends, torch.ones_like(ends, dtype=torch.bool))[:, :-1].unsqueeze(1)
    is_early = (depths < adjustments.num_early.unsqueeze(1)).unsqueeze(2)
    found = found.masked_fill(is_end & is_early, -torch.inf)
    values.copy_(torch.where(adjustments.is_adjusted[:, None, None] > 0, found, values))

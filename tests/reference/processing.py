"""Processing of logits for many requests at once in plain PyTorch: the reference of its kernels."""

from dataclasses import fields

import torch
from torch import Tensor

from specinfer.ops.logits import Adjustments, Paths, Truncation
from specinfer.ops.tree_layout import WORD


def least_kept(logits: Tensor, truncation: Truncation) -> Tensor:
    """Compute `least_kept` of `ops/triton/truncation.py`."""
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
    """Compute `mask_logits` of `ops/triton/adjustment.py`."""
    shifts = torch.arange(WORD, dtype=torch.int32, device=bits.device)
    is_allowed = (bits.unsqueeze(2) >> shifts & 1).flatten(1)[:, : logits.shape[1]] > 0
    logits.masked_fill_(~is_allowed & (is_masked > 0).unsqueeze(1), -torch.inf)


def adjust_logits(logits: Tensor, adjustments: Adjustments, paths: Paths) -> None:
    """Compute `adjust_logits` of `ops/triton/adjustment.py`."""
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

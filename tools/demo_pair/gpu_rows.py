"""Triton kernels of training on a GPU: attention of one token a row, and the loss of a draft distribution."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_KEYS = 64  # read at once
_TOKENS = 2048


@triton.jit
def _attend_program(
    query, cache, first, out, num_keys, scale, row_stride, head_stride, value_start,
    GROUPS: tl.constexpr, QUERIES: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Attend with the query heads of one key head. Grid: [rows, key heads]."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heads, dims = tl.arange(0, QUERIES), tl.arange(0, DIM)
    own = (row * tl.num_programs(1) + head) * GROUPS * DIM + heads[:, None] * DIM + dims
    q = tl.load(query + own, (heads < GROUPS)[:, None], other=0.0)
    keys = cache + row * row_stride + head * head_stride
    begin = tl.load(first + row)
    best = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mean = tl.zeros([QUERIES, DIM], tl.float32)
    for start in range(begin // KEYS * KEYS, num_keys, KEYS):
        places = start + tl.arange(0, KEYS)
        seen = (places >= begin) & (places < num_keys)
        at = keys + places[:, None] * DIM + dims
        key = tl.load(at, seen[:, None], other=0.0)
        scores = tl.where(seen, tl.dot(q, tl.trans(key)) * scale, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        parts = tl.exp(scores - higher[:, None])
        factor = tl.exp(best - higher)
        total = total * factor + tl.sum(parts, 1)
        value = tl.load(at + value_start, seen[:, None], other=0.0)
        mean = mean * factor[:, None] + tl.dot(parts.to(value.dtype), value)
        best = higher
    tl.store(out + own, (mean / total[:, None]).to(out.dtype.element_ty), (heads < GROUPS)[:, None])


def attend_one(query: Tensor, cache: Tensor, first: Tensor, num_keys: int) -> Tensor:
    """Return the [rows, width] attention of one token a row.

    Args:
        query: [rows, heads, dim].
        cache: [2, rows, key heads, size, dim] keys and values.
        first: [rows] the first place of the cache that a row sees.
        num_keys: Number of places of the cache that are filled.
    """
    rows, heads, dim = query.shape
    query, out = query.contiguous(), query.new_empty(rows, heads * dim)
    groups = heads // cache.shape[2]
    assert cache.stride()[3:] == (dim, 1)
    _attend_program[rows, cache.shape[2]](
        query, cache, first, out, num_keys, dim**-0.5, cache.stride(1), cache.stride(2), cache.stride(0),
        GROUPS=groups, QUERIES=max(16, triton.next_power_of_2(groups)), DIM=dim, KEYS=_KEYS,
    )  # fmt: skip
    return out


@triton.jit
def _loss_program(logits, probs, outputs, weights, losses, overlaps, vocab, TOKENS: tl.constexpr):
    """Store the loss and the overlap of one row, and its gradient in place of its logits. Grid: [rows]."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocab
    probs += tl.load(outputs + row) * vocab
    best = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    for start in range(0, vocab, TOKENS):
        tokens = start + tl.arange(0, TOKENS)
        x = tl.load(logits + tokens, tokens < vocab, other=float("-inf"))
        higher = tl.maximum(best, tl.max(x, 0))
        total = total * tl.exp(best - higher) + tl.sum(tl.exp(x - higher), 0)
        best = higher
    scale = best + tl.log(total)
    divergence, overlap, below = tl.zeros((), tl.float32), tl.zeros((), tl.float32), tl.zeros((), tl.float32)
    for start in range(0, vocab, TOKENS):
        tokens = start + tl.arange(0, TOKENS)
        log_q = tl.load(logits + tokens, tokens < vocab, other=0.0) - scale
        p, q = tl.load(probs + tokens, tokens < vocab, other=0.0), tl.where(tokens < vocab, tl.exp(log_q), 0.0)
        divergence += tl.sum(tl.where(p > 0, p * (tl.log(tl.maximum(p, 1e-37)) - log_q), 0.0), 0)
        overlap += tl.sum(tl.minimum(p, q), 0)
        below += tl.sum(tl.where(q < p, q, 0.0), 0)
    tl.store(losses + row, divergence + 1 - overlap)
    tl.store(overlaps + row, overlap)
    weight = tl.load(weights + row)
    for start in range(0, vocab, TOKENS):
        tokens = start + tl.arange(0, TOKENS)
        q = tl.exp(tl.load(logits + tokens, tokens < vocab, other=0.0) - scale)
        p = tl.load(probs + tokens, tokens < vocab, other=0.0)
        gradient = q - p - tl.where(q < p, q, 0.0) + q * below
        tl.store(logits + tokens, weight * gradient, tokens < vocab)


class RejectionLoss(torch.autograd.Function):
    """Weighted sum over rows of KL(p || q) + 1 - sum(min(p, q)), and the overlaps sum(min(p, q)).

    The second part is the probability that a token drawn from q is rejected. The logits are overwritten by their
    gradient, so that nothing of their size is kept besides them.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, probs: Tensor, outputs: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum and the [rows] overlaps.

        Args:
            logits: [rows, vocab] float32, contiguous.
            probs: [outputs, vocab] float32, the target's; each row sums to 1.
            outputs: [rows] the row of `probs` that each is compared with.
            weights: [rows] float32.
        """
        assert logits.is_contiguous()
        assert probs.is_contiguous()
        losses, overlaps = torch.empty_like(weights), torch.empty_like(weights)
        _loss_program[len(logits),](
            logits, probs, outputs, weights, losses, overlaps, logits.shape[1], TOKENS=_TOKENS, num_warps=8
        )
        ctx.save_for_backward(logits)
        ctx.mark_non_differentiable(overlaps)
        return (losses * weights).sum(), overlaps

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the logits, which `forward` computed."""
        (found,) = ctx.saved_tensors
        return found.mul_(gradients[0]), None, None, None


def rejection_loss_on_gpu(logits: Tensor, probs: Tensor, outputs: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return `RejectionLoss`; arguments as for its `forward`."""
    found: tuple[Tensor, Tensor] = RejectionLoss.apply(logits, probs, outputs, weights)
    return found

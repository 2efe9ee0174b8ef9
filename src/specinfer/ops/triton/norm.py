"""The sum of hidden states and a layer's result, and its RMS norm (arXiv 1910.07467), in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specinfer.ops.triton.dependent_launch import launch_options, wait_for_inputs


@triton.jit
def load_sum(parts, size, mask, DTYPE: tl.constexpr, PARTS: tl.constexpr):
    """Load numbers, or the sum of their `PARTS` parts rounded to `DTYPE`, as float32."""
    total = tl.load(parts, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts + part * size, mask=mask, other=0.0)
    return total if PARTS == 1 else total.to(DTYPE).to(tl.float32)


@triton.jit
def add_norm_program(
    hidden, added, weight, out, width, size, out_stride, eps,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Compute one token; what is added has `PARTS` parts, or is nothing."""
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64) * width
    place = tl.arange(0, BLOCK)
    inside = place < width
    total = tl.load(hidden + row + place, mask=inside, other=0.0)
    if PARTS > 0:
        more = load_sum(added + row + place, size, inside, total.dtype, PARTS)
        total = (total.to(tl.float32) + more).to(total.dtype)
        tl.store(hidden + row + place, total, mask=inside)
    values = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / width + eps)
    normed = (values * scale).to(total.dtype).to(tl.float32)  # rounded as transformers does
    normed = normed * tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    to = out + tl.program_id(0).to(tl.int64) * out_stride
    tl.store(to + place, normed.to(total.dtype), mask=inside)


def add_norm(hidden: Tensor, added: Tensor | None, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """Add `added` to `hidden` in place, and return the RMS norm (arXiv 1910.07467) of the sum, [tokens, width].

    Args:
        hidden: [tokens, width] residual stream, contiguous, modified in place.
        added: Tensor of the same shape and type, its parts as `few_rows_product` returns them, or None to add nothing.
        weight: [width].
        out: [tokens, width] of contiguous rows, which may be parts of longer ones, or None for a new tensor.
    """
    assert hidden.is_contiguous()
    assert added is None or added.is_contiguous()
    tokens, width = hidden.shape
    result = torch.empty_like(hidden) if out is None else out
    assert result.stride(1) == 1
    if tokens:
        block = triton.next_power_of_2(width)
        add_norm_program[(tokens,)](
            hidden, hidden if added is None else added, weight, result, width, hidden.numel(), result.stride(0), eps,
            PARTS=0 if added is None else added.numel() // hidden.numel(), BLOCK=block,
            num_warps=min(max(block // 512, 1), 16), enable_fp_fusion=True, **launch_options(hidden.device),
        )  # fmt: skip
    return result

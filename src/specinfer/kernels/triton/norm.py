"""The sum of hidden states and a layer's result, and its RMS norm (arXiv 1910.07467), in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def add_norm_program(
    hidden, added, weight, out, width, out_stride, eps, HAS_ADDED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Compute one token."""
    row = tl.program_id(0).to(tl.int64) * width
    place = tl.arange(0, BLOCK)
    inside = place < width
    total = tl.load(hidden + row + place, mask=inside, other=0.0)
    if HAS_ADDED:
        more = tl.load(added + row + place, mask=inside, other=0.0)
        total = (total.to(tl.float32) + more.to(tl.float32)).to(total.dtype)
        tl.store(hidden + row + place, total, mask=inside)
    values = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / width + eps)
    normed = (values * scale).to(total.dtype).to(tl.float32)  # rounded as transformers does
    normed = normed * tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    to = out + tl.program_id(0).to(tl.int64) * out_stride
    tl.store(to + place, normed.to(total.dtype), mask=inside)


def add_norm(hidden: Tensor, added: Tensor | None, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """Compute `plain_layer.add_norm`."""
    assert hidden.is_contiguous()
    assert added is None or added.is_contiguous()
    tokens, width = hidden.shape
    result = torch.empty_like(hidden) if out is None else out
    assert result.stride(1) == 1
    if tokens:
        block = triton.next_power_of_2(width)
        add_norm_program[(tokens,)](
            hidden, hidden if added is None else added, weight, result, width, result.stride(0), eps,
            HAS_ADDED=added is not None, BLOCK=block, num_warps=min(max(block // 512, 1), 16),
            enable_fp_fusion=True,
        )  # fmt: skip
    return result

"""Sums of the numbers of each row, for means, softmaxes and norms that PyTorch would split by the number of rows.

Order of sums: a row is a program. Column i of a block is added to sum i, block after block, and then these sums to each
other. Both depend on the width alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_MOST = 1024  # columns of a block


@triton.jit
def row_sum_program(x, out, width, BLOCK: tl.constexpr):
    """Sum up a row in float32."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        place = start + tl.arange(0, BLOCK)
        total += tl.load(x + row * width + place, mask=place < width, other=0.0).to(tl.float32)
    tl.store(out + row, tl.sum(total, axis=0))


def row_sum(x: Tensor) -> Tensor:
    """Return the float32 sums [rows] of [rows, width]."""
    x = x.contiguous()
    result = torch.empty(len(x), dtype=torch.float32, device=x.device)
    if len(x):
        block = min(int(triton.next_power_of_2(x.shape[1])), _MOST)
        row_sum_program[(len(x),)](x, result, x.shape[1], BLOCK=block, num_warps=4, enable_fp_fusion=False)
    return result

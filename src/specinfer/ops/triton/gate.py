"""SiLU of gates times values (SwiGLU, arXiv 2002.05202), from one product that has both next to each other."""

import triton
import triton.language as tl
from torch import Tensor

from specinfer.ops.triton.dependent_launch import launch_options, wait_for_inputs

_BLOCK = 1024


@triton.jit
def silu_times(gates, values, DTYPE: tl.constexpr):
    """Return SiLU of gates times values in a type, rounded to it in between as transformers does."""
    x = gates.to(tl.float32)
    silu = (x / (1.0 + tl.exp(-x))).to(DTYPE).to(tl.float32)
    return (silu * values.to(tl.float32)).to(DTYPE)


@triton.jit
def gate_program(gated, out, width, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """Compute a block of one token's numbers."""
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < width
    gates = tl.load(gated + row * 2 * width + place, mask=inside, other=0.0)
    values = tl.load(gated + row * 2 * width + width + place, mask=inside, other=0.0)
    tl.store(out + row * width + place, silu_times(gates, values, gates.dtype), mask=inside)


def gate(gated: Tensor, out: Tensor | None = None) -> Tensor:
    """Return [tokens, width] silu(gates) * values (SwiGLU, arXiv 2002.05202).

    Args:
        gated: [tokens, 2 * width] gates, then values; contiguous.
    """
    assert gated.is_contiguous()
    tokens, width = gated.shape[0], gated.shape[1] // 2
    result = gated.new_empty(tokens, width) if out is None else out
    if tokens:
        block = min(_BLOCK, triton.next_power_of_2(width))
        gate_program[(tokens, triton.cdiv(width, block))](
            gated, result, width, BLOCK=block, num_warps=4, enable_fp_fusion=True, **launch_options(gated.device)
        )
    return result

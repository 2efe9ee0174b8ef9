"""Additions of adapters (LoRA, arXiv 2106.09685) to rows of a linear layer, each row with the adapter of its slot."""

import triton
import triton.language as tl
from torch import Tensor

_RANKS = 16  # of a program, or of a step
_INPUTS = 256  # of a step
_OUTPUTS = 64  # of a program


@triton.jit
def down_program(
    x, lora_indices, downs, ranks, out, inputs, max_rank, RANKS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Compute some of the numbers between both matrices of one row's adapter; `downs` are addresses."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * RANKS
    slot = tl.load(lora_indices + row)
    count = tl.load(ranks + slot)
    if first < count:
        down = tl.load(downs + slot).to(tl.pointer_type(x.dtype.element_ty))
        rank = first + tl.arange(0, RANKS)
        total = tl.zeros([RANKS], tl.float32)
        for start in range(0, inputs, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < inputs
            values = tl.load(x + row * inputs + column, mask=inside, other=0.0).to(tl.float32)
            place = rank[:, None].to(tl.int64) * inputs + column[None, :]
            weights = tl.load(down + place, mask=(rank < count)[:, None] & inside[None, :], other=0.0)
            total += tl.sum(weights.to(tl.float32) * values[None, :], axis=1)
        tl.store(out + row * max_rank + rank, total.to(out.dtype.element_ty), mask=rank < count)


@triton.jit
def up_program(
    y, between, lora_indices, ups, ranks, outputs, max_rank, RANKS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Add to a block of one row's outputs; `ups` are addresses."""
    row, output = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(lora_indices + row)
    count = tl.load(ranks + slot)
    if count > 0:
        up = tl.load(ups + slot).to(tl.pointer_type(y.dtype.element_ty))
        inside = output < outputs
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, count, RANKS):
            rank = start + tl.arange(0, RANKS)
            values = tl.load(between + row * max_rank + rank, mask=rank < count, other=0.0).to(tl.float32)
            place = output[:, None].to(tl.int64) * count + rank[None, :]
            weights = tl.load(up + place, mask=inside[:, None] & (rank < count)[None, :], other=0.0)
            total += tl.sum(weights.to(tl.float32) * values[None, :], axis=1)
        added_to = y + row * outputs + output
        added = total.to(y.dtype.element_ty).to(tl.float32)
        tl.store(
            added_to,
            (tl.load(added_to, mask=inside, other=0.0).to(tl.float32) + added).to(y.dtype.element_ty),
            mask=inside,
        )


def add_low_rank(y: Tensor, x: Tensor, lora_indices: Tensor, places: Tensor, max_rank: int) -> None:
    """Add to `y` [rows, outputs] in place what the adapter of each row adds to a linear layer (arXiv 2106.09685).

    Args:
        x: [rows, inputs].
        lora_indices: [rows] int32 slot of the row's adapter.
        places: [3, slots] int64 of each slot: addresses of its adapter's matrices [rank, inputs] and [outputs, rank],
            contiguous and of the type of `y`, and its rank, or 0 for none.
        max_rank: Largest rank that a slot's adapter may ever have.
    """
    assert y.is_contiguous()
    assert x.dtype == y.dtype
    x = x.contiguous()
    (rows, inputs), outputs = x.shape, y.shape[1]
    between = x.new_empty(rows, max_rank)
    if not rows:
        return
    downs, ups, ranks = places.unbind(0)
    down_program[(rows, triton.cdiv(max_rank, _RANKS))](
        x, lora_indices, downs, ranks, between, inputs, max_rank, RANKS=_RANKS, BLOCK=_INPUTS, num_warps=4,
        enable_fp_fusion=True,
    )  # fmt: skip
    up_program[(rows, triton.cdiv(outputs, _OUTPUTS))](
        y, between, lora_indices, ups, ranks, outputs, max_rank, RANKS=_RANKS, BLOCK=_OUTPUTS, num_warps=2,
        enable_fp_fusion=True,
    )  # fmt: skip

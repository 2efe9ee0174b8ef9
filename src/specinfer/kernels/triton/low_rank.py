"""Additions of adapters (LoRA, arXiv 2106.09685) to rows of a linear layer, each row with the adapter of its lane."""

import triton
import triton.language as tl
from torch import Tensor

_RANKS = 16  # of a program, or of a step
_INPUTS = 256  # of a step
_OUTPUTS = 64  # of a program


@triton.jit
def down_program(
    x, lanes, downs, ranks, out, inputs, max_rank, RANKS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Compute some of the numbers between both matrices of one row's adapter; `downs` are addresses."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * RANKS
    lane = tl.load(lanes + row)
    count = tl.load(ranks + lane)
    if first < count:
        down = tl.load(downs + lane).to(tl.pointer_type(x.dtype.element_ty))
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
    y, between, lanes, ups, ranks, outputs, max_rank, RANKS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Add to a block of one row's outputs; `ups` are addresses."""
    row, output = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    lane = tl.load(lanes + row)
    count = tl.load(ranks + lane)
    if count > 0:
        up = tl.load(ups + lane).to(tl.pointer_type(y.dtype.element_ty))
        inside = output < outputs
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, count, RANKS):
            rank = start + tl.arange(0, RANKS)
            values = tl.load(between + row * max_rank + rank, mask=rank < count, other=0.0).to(tl.float32)
            place = output[:, None].to(tl.int64) * count + rank[None, :]
            weights = tl.load(up + place, mask=inside[:, None] & (rank < count)[None, :], other=0.0)
            total += tl.sum(weights.to(tl.float32) * values[None, :], axis=1)
        there = y + row * outputs + output
        added = total.to(y.dtype.element_ty).to(tl.float32)
        tl.store(
            there, (tl.load(there, mask=inside, other=0.0).to(tl.float32) + added).to(y.dtype.element_ty), mask=inside
        )


def add_low_rank(y: Tensor, x: Tensor, lanes: Tensor, places: Tensor, max_rank: int) -> None:
    """Compute `plain_layer.add_low_rank`.

    Args:
        places: [3, lanes] int64 of each lane: addresses of its matrices [rank, inputs] and [outputs, rank], contiguous
            and of the type of `y`, and its rank, or 0 for none.
        max_rank: Largest rank that a lane may ever have.
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
        x, lanes, downs, ranks, between, inputs, max_rank, RANKS=_RANKS, BLOCK=_INPUTS, num_warps=4,
        enable_fp_fusion=True,
    )  # fmt: skip
    up_program[(rows, triton.cdiv(outputs, _OUTPUTS))](
        y, between, lanes, ups, ranks, outputs, max_rank, RANKS=_RANKS, BLOCK=_OUTPUTS, num_warps=2,
        enable_fp_fusion=True,
    )  # fmt: skip

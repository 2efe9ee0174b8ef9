"""Products with quantized weights. For few rows, weights are read once, widened in registers and summed in float32.

Weights are the left factor and rows the right one, so that a block of outputs fills the tensor cores even for few rows.
Codes are multiplied as whole numbers, exact in every type of rows, and each group's sum is scaled in float32. Where a
number is added to all weights of a group, it is multiplied by the sum of the group's inputs.
Small layers are split along their inputs too, so that the whole device reads. A second launch sums the parts, always in
the same order. How a layer is split does not depend on the rows. For many rows, weights are widened once, in memory,
and PyTorch multiplies.

Order of sums: an output of a row is the sum of parts, one after the other, and a part that of steps. Both are chosen by
the shape of the weights. Within a step, the instruction that multiplies the tile decides; in a `fixed_order`, tiles
have the same number of rows for any number of rows, so it is always the same one. Then weights may also be no codes.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from specinfer.ops.fixed_order import is_fixed
from specinfer.ops.quantized_weight import QuantizedWeight
from specinfer.ops.routes import BLOCKS, Routes, block_of
from specinfer.ops.splits import OUTPUTS, STEP_OF_NUMBERS, num_parts
from specinfer.ops.triton.float8 import has_float8_instructions
from specinfer.ops.triton.weights import (
    HALVES,
    LEVELS,
    NO_OFFSET,
    NUMBERS,
    has_one_scale,
    load_groups,
    load_numbers,
    stored_arguments,
    widen,
)

_LEAST_BYTES = 16  # of a piece: inputs of a product of tensor cores
_STEP_BYTES = 64  # of an output, in a step: two sectors of memory, in copies of 16 bytes
_WHOLE_STEP = 128  # inputs of a step where all inputs share a scale
_AT_ONCE = 2**26  # weights widened at a time


@triton.jit
def _piece(block, PIECES: tl.constexpr, INDEX: tl.constexpr):
    """Return one of 1, 2 or 4 equal pieces of the columns of a block; it stays in the registers that it is in."""
    for level in tl.static_range(PIECES // 2):
        halves = tl.reshape(block, [block.shape[0], 2, block.shape[1] // 2])
        low, high = tl.split(tl.permute(halves, [0, 2, 1]))
        block = high if (INDEX >> (PIECES // 2 - 1 - level)) & 1 else low
    return block


@triton.jit(do_not_specialize=["num_rows"])
def product_program(
    rows, codes, scales, offsets, nest, levels, bias, out, pairs, experts, num_experts,
    num_rows, inputs, outputs, row_bytes, num_groups, num_steps, steps_each,
    KIND: tl.constexpr, ZERO: tl.constexpr, NATIVE: tl.constexpr, IN_FOURS: tl.constexpr, STEP: tl.constexpr,
    PIECES: tl.constexpr, GROUP: tl.constexpr, OFFSET: tl.constexpr, NESTED: tl.constexpr, IN_NEST: tl.constexpr,
    HAS_BIAS: tl.constexpr, IS_PART: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    PRECISION: tl.constexpr, EACH: tl.constexpr = 0,
):  # fmt: skip
    """Compute a block of rows of a block of outputs, summed over a part of the inputs.

    Neighbouring programs compute blocks of rows of the same outputs, and so read the same weights. A step's codes are
    loaded together and multiplied in pieces of `STEP` inputs: a group, several of which the codes are scaled before the
    product (`GROUP` < `STEP`), or a part of the only one (`GROUP` 0). With `EACH` above 0, rows of the result are pairs
    of a row, which has so many, and an expert with its own weights.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    part = tl.program_id(2)
    of_output = output.to(tl.int64)
    given, last = row, outputs
    if EACH > 0:
        expert = tl.load(experts + tl.program_id(0))
        row = tl.load(pairs + row)
        given = row // EACH
        is_there = expert < num_experts
        last, num_steps = tl.where(is_there, last, 0), tl.where(is_there, num_steps, 0)
        of_output += expert * outputs
    has_output, has_row = output < last, row < num_rows
    dtype: tl.constexpr = rows.dtype.element_ty
    is_half: tl.constexpr = (KIND == HALVES) | (KIND == LEVELS)
    width: tl.constexpr = PIECES * STEP // (2 if is_half else 1)  # bytes of a step
    column = tl.arange(0, width)
    code_rows = codes + of_output[:, None] * row_bytes
    row_starts = rows + given[None, :].to(tl.int64) * inputs
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    first = part * steps_each
    piece = tl.arange(0, PIECES)
    if GROUP == STEP:
        ahead = load_groups(
            scales, offsets, nest, of_output, first * PIECES + piece, num_groups, has_output,
            OFFSET, NESTED, IN_NEST,
        )  # fmt: skip
    for step in range(first, min(first + steps_each, num_steps)):
        byte = step * width + column
        code = tl.load(code_rows + byte[None, :], mask=has_output[:, None] & (byte < row_bytes)[None, :], other=0)
        if GROUP == STEP:  # numbers of groups are not copied ahead by the compiler
            scale, offset = ahead
            ahead = load_groups(
                scales, offsets, nest, of_output, (step + 1) * PIECES + piece, num_groups, has_output,
                OFFSET, NESTED, IN_NEST,
            )  # fmt: skip
        for index in tl.static_range(PIECES):
            place = (step * PIECES + index) * STEP + tl.arange(0, STEP)
            values = load_numbers(_piece(code, PIECES, index), levels, dtype, KIND, ZERO, NATIVE)
            if (GROUP > 0) & (GROUP < STEP):
                each = scales + of_output[:, None] * num_groups + (place // GROUP)[None, :]
                each = tl.load(each, mask=has_output[:, None] & (place < inputs)[None, :], other=0.0)
                values = (values.to(tl.float32) * each.to(tl.float32)).to(dtype)
            if is_half & IN_FOURS:
                # Of each 32 inputs a thread of the tensor cores then multiplies 8 neighbours: 4 bytes of codes.
                values = tl.permute(tl.reshape(values, [OUTPUTS, STEP // 32, 4, 4, 2]), [0, 1, 3, 2, 4])
                values = tl.reshape(values, [OUTPUTS, STEP])
                place = place // 32 * 32 + place % 8 // 2 * 8 + place % 32 // 8 * 2 + place % 2
                place = tl.max_contiguous(tl.multiple_of(place, 2), 2)
            x = tl.load(row_starts + place[:, None], mask=has_row[None, :] & (place < inputs)[:, None], other=0.0)
            if GROUP == STEP:
                total += tl.dot(values, x, input_precision=PRECISION) * _piece(scale, PIECES, index)
                if OFFSET != NO_OFFSET:
                    total += _piece(offset, PIECES, index) * tl.sum(x.to(tl.float32), axis=0)[None, :]
            else:
                total = tl.dot(values, x, total, input_precision=PRECISION)
    if (KIND != NUMBERS) & (GROUP == 0):
        total *= tl.load(scales + of_output, mask=has_output, other=0.0)[:, None]
    to = row[None, :].to(tl.int64) * outputs + output[:, None]
    inside = has_output[:, None] & has_row[None, :]
    if IS_PART:
        tl.store(out + part.to(tl.int64) * num_rows * outputs + to, total, mask=inside)
    else:
        if HAS_BIAS:
            total += tl.load(bias + of_output, mask=has_output, other=0.0).to(tl.float32)[:, None]
        tl.store(out + to, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def add_parts_program(
    parts, bias, out, size, outputs, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr
):
    """Sum the parts of a block of numbers."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    total = tl.zeros([BLOCK], tl.float32)
    parts += place
    for _ in tl.static_range(PARTS):
        total += tl.load(parts, mask=inside, other=0.0)
        parts += size
    if HAS_BIAS:
        total += tl.load(bias + place % outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


def step_of(weight: QuantizedWeight | Tensor) -> tuple[int, int]:
    """Return the inputs of a step of a program, and the pieces that they are multiplied in.

    A piece is a group, or several small ones of 4 bits. A step has as many as make `_STEP_BYTES` of an output's codes.
    """
    if isinstance(weight, Tensor):
        return STEP_OF_NUMBERS, 1
    if has_one_scale(weight):
        return _WHOLE_STEP, 1
    in_byte = 2 if weight.is_packed else 1
    piece = max(weight.group_size, _LEAST_BYTES * in_byte)
    pieces = max(_STEP_BYTES * in_byte // piece, 1) if piece == weight.group_size else 1
    return pieces * piece, pieces


def in_fours(rows: Tensor) -> bool:
    """Return whether tensor cores take 4 neighbours at most from registers: those of Hopper GPUs, of half precision."""
    return rows.dtype != torch.float32 and _is_hopper(rows.device)


@cache
def _is_hopper(device: torch.device) -> bool:
    if device.type == "cpu":  # Triton's interpreter
        return False
    target = triton.runtime.driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch // 10 == 9)


def product(
    rows: Tensor,
    weight: QuantizedWeight | Tensor,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    *,
    parts: int | None = None,
    has_float8: bool | None = None,
) -> Tensor:
    """Return [rows, outputs] products with quantized weights, summed in float32, plus the bias, in the type of `rows`.

    Args:
        rows: [rows, inputs] float32, bfloat16 or float16, contiguous.
        weight: Weights, of 4 bits packed, of 5 and 6 bits with one code in a byte; or [outputs, inputs] of the type of
            rows.
        bias: [outputs].
        parts: Number of parts that inputs are split into, or None for `num_parts`.
        has_float8: Whether the device has instructions for e4m3, or None to detect it.
    """
    assert rows.is_contiguous()
    num_rows, inputs = rows.shape
    (outputs, row_bytes), num_groups = _sizes_of(weight)
    result = rows.new_empty(num_rows, outputs) if out is None else out
    if not num_rows:
        return result
    step, pieces = step_of(weight)
    parts = num_parts(inputs, outputs, step) if parts is None else parts
    has_float8 = has_float8_instructions(rows.device) if has_float8 is None else has_float8
    num_steps = -(-inputs // step)
    summed = result if parts == 1 else rows.new_empty(parts, num_rows, outputs, dtype=torch.float32)
    block = block_of(num_rows, rows.dtype, is_codes=isinstance(weight, QuantizedWeight))
    together, stages = _sizes(rows.dtype, block)
    given = rows if bias is None else bias
    stored, constants = stored_arguments(weight)
    product_program[(triton.cdiv(num_rows, block), triton.cdiv(outputs, together), parts)](
        rows, *stored, given, summed, rows, rows, 0,
        num_rows, inputs, outputs, row_bytes, num_groups, num_steps, -(-num_steps // parts),
        **constants, NATIVE=has_float8, IN_FOURS=in_fours(rows), STEP=step // pieces, PIECES=pieces,
        HAS_BIAS=bias is not None, IS_PART=parts > 1, ROWS=block, OUTPUTS=together, PRECISION="ieee",
        num_warps=together // 16, num_stages=stages,
        enable_fp_fusion=not is_fixed(),
    )  # fmt: skip
    if parts > 1:
        size = num_rows * outputs
        add_parts_program[(triton.cdiv(size, 1024),)](
            summed,
            given,
            result,
            size,
            outputs,
            PARTS=parts,
            HAS_BIAS=bias is not None,
            BLOCK=1024,
            num_warps=4,
            enable_fp_fusion=True,
        )
    return result


def routed_product(
    rows: Tensor,
    weight: QuantizedWeight | Tensor,
    routes: Routes,
    each: int,
    bias: Tensor | None = None,
    *,
    has_float8: bool | None = None,
) -> Tensor:
    """Return [pairs, outputs] products with the weights of each pair's expert, and zeros for pairs without one.

    Args:
        rows: [pairs / each, inputs], contiguous.
        weight: The weights of all experts, one after the other, as for `product`.
        each: Number of neighbouring pairs that a row belongs to.
        bias: [experts * outputs].
        has_float8: As for `product`.
    """
    assert rows.is_contiguous()
    ((of_all, row_bytes), num_groups), inputs = _sizes_of(weight), rows.shape[1]
    outputs = of_all // routes.num_experts
    result = rows.new_zeros(routes.num_pairs, outputs)
    step, pieces = step_of(weight)
    has_float8 = has_float8_instructions(rows.device) if has_float8 is None else has_float8
    num_steps = -(-inputs // step)
    together, stages = _sizes(rows.dtype, routes.size)
    stored, constants = stored_arguments(weight)
    product_program[(len(routes.experts), triton.cdiv(outputs, together), 1)](
        rows, *stored, rows if bias is None else bias, result, routes.pairs, routes.experts, routes.num_experts,
        routes.num_pairs, inputs, outputs, row_bytes, num_groups, num_steps, num_steps,
        **constants, NATIVE=has_float8, IN_FOURS=in_fours(rows), STEP=step // pieces, PIECES=pieces,
        HAS_BIAS=bias is not None, IS_PART=False, ROWS=routes.size, OUTPUTS=together, PRECISION="ieee", EACH=each,
        num_warps=together // 16, num_stages=stages,
        enable_fp_fusion=not is_fixed(),
    )  # fmt: skip
    return result


def _sizes_of(weight: QuantizedWeight | Tensor) -> tuple[torch.Size, int]:
    """Return [outputs, bytes or numbers of a row], and the groups of a row."""
    return (weight.shape, 0) if isinstance(weight, Tensor) else (weight.codes.shape, weight.scales.shape[1])


def _sizes(dtype: torch.dtype, block: int) -> tuple[int, int]:
    """Return the outputs of a program with a block of rows, and its stages."""
    is_wide = dtype == torch.float32
    together = OUTPUTS if block == BLOCKS[0] or is_wide else 2 * OUTPUTS  # more for more rows
    stages = 2 if is_wide else 3 if block == BLOCKS[-1] else 4
    return together, stages  # fits into 99 KB, the least shared memory of GPUs


def product_of_many(
    rows: Tensor, weight: QuantizedWeight, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Compute `product` for some outputs at a time, with weights widened once for all rows."""
    outputs, inputs = weight.out_features, rows.shape[1]
    together = max(1, _AT_ONCE // inputs)
    result = rows.new_empty(len(rows), outputs) if out is None else out
    for start in range(0, outputs, together):
        part = slice(start, start + together)
        wide = widen(weight.part(part), rows.dtype)
        result[:, part] = functional.linear(rows, wide, None if bias is None else bias[part])
    return result

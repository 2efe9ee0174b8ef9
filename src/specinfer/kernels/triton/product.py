"""Products with quantized weights. For few rows, weights are read once, widened in registers and summed in float32.

Weights are the left factor and rows the right one, so that a block of outputs fills the tensor cores even for few rows.
Small layers are split along their inputs too, so that the whole device reads. A second launch sums the parts, always in
the same order. How a layer is split does not depend on the rows. For many rows, weights are widened once, in memory,
and PyTorch multiplies.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

# Kinds of weights; see quantization.py for the groups of neighbouring inputs that share a scale.
INT8, INT4, FLOAT8 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_KINDS = {"int8": 0, "int4": 1, "fp8": 2}
_STEPS = {"int8": 64, "int4": 32, "fp8": 128}  # inputs per step; for integers one group
_OUTPUTS = 64  # outputs of a program with at most 16 rows; with more rows twice as many
_ROWS = (16, 32, 64)
_PROGRAMS = 264  # fewest, if there are enough inputs: two per multiprocessor of a large GPU
_LEAST_STEPS = 4  # of a program
_NATIVE_FLOAT8 = (8, 9)  # the first compute capability with instructions for it
_BYTES = 1024  # of a program that widens
_AT_ONCE = 2**26  # weights widened at a time


@triton.jit
def _widened(codes, DTYPE: tl.constexpr, NATIVE: tl.constexpr):
    """Widen e4m3 bytes: exponent and mantissa move to their float32 places, then 2**120 corrects the exponent."""
    if NATIVE:
        return codes.to(tl.float8e4nv, bitcast=True).to(DTYPE)
    bits = codes.to(tl.int32)
    bits = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
    return (bits.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(DTYPE)


@triton.jit
def product_program(
    rows, codes, scales, bias, out, num_rows, inputs, outputs, row_bytes, num_steps, steps_each,
    KIND: tl.constexpr, NATIVE: tl.constexpr, STEP: tl.constexpr, HAS_BIAS: tl.constexpr, IS_PART: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute a block of rows of a block of outputs, summed over a part of the inputs.

    Neighbouring programs compute blocks of rows of the same outputs, and so read the same weights.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    part = tl.program_id(2)
    has_output, has_row = output < outputs, row < num_rows
    dtype: tl.constexpr = rows.dtype.element_ty
    width: tl.constexpr = STEP // 2 if KIND == INT4 else STEP  # bytes of a step
    column = tl.arange(0, width)
    code_rows = codes + output[:, None].to(tl.int64) * row_bytes
    row_starts = rows + row[None, :].to(tl.int64) * inputs
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    first = part * steps_each
    for step in range(first, min(first + steps_each, num_steps)):
        byte = step * width + column
        code = tl.load(code_rows + byte[None, :], mask=has_output[:, None] & (byte < row_bytes)[None, :], other=0)
        if KIND == INT4:
            even = 2 * byte  # a byte's first input is in the lower half
            x = tl.load(row_starts + even[:, None], mask=has_row[None, :] & (even < inputs)[:, None], other=0.0)
            y = tl.load(row_starts + even[:, None] + 1, mask=has_row[None, :] & (even + 1 < inputs)[:, None], other=0.0)
            low = ((code & 15).to(tl.int32) - 8).to(dtype)
            high = ((code >> 4).to(tl.int32) - 8).to(dtype)
            products = tl.dot(low, x, input_precision=PRECISION)
            products = tl.dot(high, y, products, input_precision=PRECISION)
        else:
            x = tl.load(row_starts + byte[:, None], mask=has_row[None, :] & (byte < inputs)[:, None], other=0.0)
            if KIND == INT8:
                products = tl.dot((code.to(tl.int32) - 128).to(dtype), x, input_precision=PRECISION)
            else:
                total = tl.dot(_widened(code, dtype, NATIVE), x, total, input_precision=PRECISION)
        if KIND != FLOAT8:
            scale = tl.load(scales + output.to(tl.int64) * num_steps + step, mask=has_output, other=0.0)
            total += products * scale.to(tl.float32)[:, None]
    if KIND == FLOAT8:
        total *= tl.load(scales + output, mask=has_output, other=0.0)[:, None]
    to = row[None, :].to(tl.int64) * outputs + output[:, None]
    inside = has_output[:, None] & has_row[None, :]
    if IS_PART:
        tl.store(out + part.to(tl.int64) * num_rows * outputs + to, total, mask=inside)
    else:
        if HAS_BIAS:
            total += tl.load(bias + output, mask=has_output, other=0.0).to(tl.float32)[:, None]
        tl.store(out + to, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def add_parts_program(
    parts, bias, out, size, outputs, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr
):
    """Sum the parts of a block of numbers."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + part * size.to(tl.int64) + place, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + place % outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def widen_program(
    codes, scales, out, inputs, row_bytes, num_groups,
    KIND: tl.constexpr, NATIVE: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Widen a block of bytes of one output's weights; `GROUP` bytes share a scale."""
    row, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    byte = start + tl.arange(0, BLOCK)
    inside = byte < row_bytes
    code = tl.load(codes + row * row_bytes + byte, mask=inside, other=0)
    if KIND == FLOAT8:
        values = _widened(code, tl.float32, NATIVE) * tl.load(scales + row)
    else:
        scale = tl.load(scales + row * num_groups + byte // GROUP, mask=inside, other=0.0).to(tl.float32)
        if KIND == INT8:
            values = (code.to(tl.int32) - 128).to(tl.float32) * scale
        else:
            low = ((code & 15).to(tl.int32) - 8).to(tl.float32) * scale
            values = tl.interleave(low, ((code >> 4).to(tl.int32) - 8).to(tl.float32) * scale)
    place = start + tl.arange(0, BLOCK)
    if KIND == INT4:
        place = 2 * start + tl.arange(0, 2 * BLOCK)
    tl.store(out + row * inputs + place, values.to(out.dtype.element_ty), mask=place < inputs)


def num_parts(inputs: int, outputs: int, kind: str) -> int:
    """Return the number of parts that a layer's inputs are split into: 1, 2, 4, 8 or 16."""
    blocks, steps, parts = -(-outputs // _OUTPUTS), -(-inputs // _STEPS[kind]), 1
    while parts < 16 and blocks * parts < _PROGRAMS and steps // (2 * parts) >= _LEAST_STEPS:
        parts *= 2
    return parts


def product(
    rows: Tensor,
    codes: Tensor,
    scales: Tensor,
    kind: str,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    *,
    parts: int | None = None,
    has_float8: bool | None = None,
) -> Tensor:
    """Compute `plain_layer.product`.

    Args:
        parts: Number of parts that inputs are split into, or None for `num_parts`.
        has_float8: Whether the device has instructions for e4m3, or None to detect it.
    """
    assert rows.is_contiguous()
    assert codes.is_contiguous()
    assert scales.is_contiguous()
    num_rows, inputs = rows.shape
    outputs, row_bytes = codes.shape
    result = rows.new_empty(num_rows, outputs) if out is None else out
    if not num_rows:
        return result
    step, parts = _STEPS[kind], num_parts(inputs, outputs, kind) if parts is None else parts
    has_float8 = _has_float8(rows.device) if has_float8 is None else has_float8
    num_steps = -(-inputs // step)
    summed = result if parts == 1 else rows.new_empty(parts, num_rows, outputs, dtype=torch.float32)
    is_wide = rows.dtype == torch.float32
    sizes = _ROWS[:-1] if is_wide else _ROWS  # sums of 64 rows of float32 do not fit into registers
    block = next((size for size in sizes if num_rows <= size), sizes[-1])
    together = _OUTPUTS if block == _ROWS[0] or is_wide else 2 * _OUTPUTS
    stages = 2 if is_wide else 3 if block == _ROWS[-1] else 4  # fits into 99 KB, the least shared memory of GPUs
    given = codes if bias is None else bias
    product_program[(triton.cdiv(num_rows, block), triton.cdiv(outputs, together), parts)](
        rows, codes, scales, given, summed, num_rows, inputs, outputs, row_bytes, num_steps, -(-num_steps // parts),
        KIND=_KINDS[kind], NATIVE=has_float8, STEP=step, HAS_BIAS=bias is not None, IS_PART=parts > 1,
        ROWS=block, OUTPUTS=together, PRECISION="ieee", num_warps=together // 16, num_stages=stages,
        enable_fp_fusion=True,
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


def product_of_many(
    rows: Tensor, codes: Tensor, scales: Tensor, kind: str, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Compute `plain_layer.product` for some outputs at a time, with weights widened once for all rows."""
    outputs, inputs = len(codes), rows.shape[1]
    together = max(1, _AT_ONCE // inputs)
    result = rows.new_empty(len(rows), outputs) if out is None else out
    for start in range(0, outputs, together):
        part = slice(start, start + together)
        weight = widen(codes[part], scales[part], kind, inputs, rows.dtype)
        result[:, part] = functional.linear(rows, weight, None if bias is None else bias[part])
    return result


def widen(
    codes: Tensor, scales: Tensor, kind: str, inputs: int, dtype: torch.dtype, *, has_float8: bool | None = None
) -> Tensor:
    """Compute `plain_layer.widened`."""
    outputs, row_bytes = codes.shape
    has_float8 = _has_float8(codes.device) if has_float8 is None else has_float8
    weight = torch.empty((outputs, inputs), dtype=dtype, device=codes.device)
    widen_program[(outputs, triton.cdiv(row_bytes, _BYTES))](
        codes, scales, weight, inputs, row_bytes, 1 if kind == "fp8" else scales.shape[1],
        KIND=_KINDS[kind], NATIVE=has_float8, GROUP=_STEPS[kind] // 2 if kind == "int4" else _STEPS[kind],
        BLOCK=_BYTES, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return weight


@cache
def _has_float8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _NATIVE_FLOAT8

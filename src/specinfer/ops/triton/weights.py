"""Quantized weights in Triton kernels: the numbers that codes stand for, and the scales of groups."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specinfer.ops.quantized_weight import NEST, QuantizedWeight
from specinfer.ops.triton.float8 import has_float8_instructions, widen_e4m3

# Kinds of codes, see `QuantizedWeight`: whole numbers of a byte, or of half a byte, levels of half a byte, and e4m3;
# and weights that are no codes, in the type of the rows.
BYTES, HALVES, LEVELS, FLOAT8, NUMBERS = (tl.constexpr(kind) for kind in range(5))
NO_OFFSET, ADDED, ZEROS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # what is added to a group's weights
_BYTES = 1024  # of a program that widens


@triton.jit
def load_numbers(codes, levels, DTYPE: tl.constexpr, KIND: tl.constexpr, ZERO: tl.constexpr, NATIVE: tl.constexpr):
    """Return the numbers that bytes stand for, in the order of the inputs; of codes of half a byte two each."""
    if (KIND == HALVES) | (KIND == LEVELS):
        return _numbers(tl.interleave(codes & 15, codes >> 4), levels, DTYPE, KIND, ZERO, NATIVE)
    else:
        return _numbers(codes, levels, DTYPE, KIND, ZERO, NATIVE)


@triton.jit
def _numbers(codes, levels, DTYPE: tl.constexpr, KIND: tl.constexpr, ZERO: tl.constexpr, NATIVE: tl.constexpr):
    """Return the numbers that codes of one kind stand for, one of each code."""
    if KIND == NUMBERS:
        return codes
    if KIND == FLOAT8:
        return widen_e4m3(codes, DTYPE, NATIVE)
    if KIND == LEVELS:
        return tl.load(levels + codes).to(DTYPE)
    return (codes.to(tl.int32) - ZERO).to(DTYPE)


@triton.jit
def load_nested(
    numbers, nest, output, group, num_groups, mask,
    INDEX: tl.constexpr, NESTED: tl.constexpr, IN_NEST: tl.constexpr,
):  # fmt: skip
    """Load numbers of groups as float32, times those of `IN_NEST` groups if there are some."""
    found = tl.load(numbers + output * num_groups + group, mask=mask, other=0).to(tl.float32)
    if NESTED > 0:
        place = output * (num_groups // IN_NEST) + group // IN_NEST
        found *= tl.load(nest + place * NESTED + INDEX, mask=mask, other=0.0).to(tl.float32)
    return found


@triton.jit
def load_offsets(
    offsets, scale, nest, output, group, num_groups, mask,
    OFFSET: tl.constexpr, NESTED: tl.constexpr, IN_NEST: tl.constexpr,
):  # fmt: skip
    """Return what is added to each weight of groups."""
    if OFFSET == ADDED:
        return load_nested(offsets, nest, output, group, num_groups, mask, 1, NESTED, IN_NEST)
    return -scale * tl.load(offsets + output * num_groups + group, mask=mask, other=0).to(tl.float32)


@triton.jit
def load_groups(
    scales, offsets, nest, output, group, num_groups, has_output,
    OFFSET: tl.constexpr, NESTED: tl.constexpr, IN_NEST: tl.constexpr,
):  # fmt: skip
    """Return the scales of groups, [outputs, groups], and what is added to their weights, or the scales again."""
    output, group = output[:, None], group[None, :]
    inside = has_output[:, None] & (group < num_groups)
    scale = load_nested(scales, nest, output, group, num_groups, inside, 0, NESTED, IN_NEST)
    if OFFSET == NO_OFFSET:
        return scale, scale
    else:
        return scale, load_offsets(offsets, scale, nest, output, group, num_groups, inside, OFFSET, NESTED, IN_NEST)


@triton.jit
def widen_program(
    codes, scales, offsets, nest, levels, out, inputs, row_bytes, num_groups,
    KIND: tl.constexpr, ZERO: tl.constexpr, NATIVE: tl.constexpr, GROUP: tl.constexpr, OFFSET: tl.constexpr,
    NESTED: tl.constexpr, IN_NEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Widen a block of bytes of one output's weights; `GROUP` inputs share a scale, or with 0 all of them."""
    row, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    byte = start + tl.arange(0, BLOCK)
    inside = byte < row_bytes
    code = tl.load(codes + row * row_bytes + byte, mask=inside, other=0)
    values = load_numbers(code, levels, tl.float32, KIND, ZERO, NATIVE)
    in_byte: tl.constexpr = values.shape[0] // BLOCK
    place = in_byte * start + tl.arange(0, in_byte * BLOCK)
    inside = place < inputs
    if GROUP == 0:
        values *= tl.load(scales + row)
    else:
        group = place // GROUP
        scale = load_nested(scales, nest, row, group, num_groups, inside, 0, NESTED, IN_NEST)
        values *= scale
        if OFFSET != NO_OFFSET:
            values += load_offsets(offsets, scale, nest, row, group, num_groups, inside, OFFSET, NESTED, IN_NEST)
    tl.store(out + row * inputs + place, values.to(out.dtype.element_ty), mask=inside)


def widen(weight: QuantizedWeight, dtype: torch.dtype, *, has_float8: bool | None = None) -> Tensor:
    """Compute `quantization.dequantize`."""
    outputs, row_bytes = weight.codes.shape
    has_float8 = has_float8_instructions(weight.codes.device) if has_float8 is None else has_float8
    wide = torch.empty((outputs, weight.in_features), dtype=dtype, device=weight.codes.device)
    stored, constants = stored_arguments(weight)
    widen_program[(outputs, triton.cdiv(row_bytes, _BYTES))](
        *stored, wide, weight.in_features, row_bytes, weight.scales.shape[1],
        **constants, NATIVE=has_float8, BLOCK=_BYTES, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return wide


def has_one_scale(weight: QuantizedWeight) -> bool:
    """Return whether all inputs share a scale of floating-point codes."""
    return weight.is_float and weight.scales.shape[1] == 1


def stored_arguments(weight: QuantizedWeight | Tensor) -> tuple[tuple[Any, ...], dict[str, int]]:
    """Return the arguments of a kernel that describe weights: tensors, and constants."""
    if isinstance(weight, Tensor):
        assert weight.is_contiguous()
        constants = {"KIND": NUMBERS.value, "ZERO": 0, "GROUP": 0, "OFFSET": NO_OFFSET.value, "NESTED": 0, "IN_NEST": 1}
        return (weight,) * 5, constants
    offsets = weight.zeros if weight.added is None else weight.added
    given = (weight.scales, offsets, weight.nest, None if weight.is_float else weight.levels)
    assert weight.codes.is_contiguous()
    assert all(tensor is None or tensor.is_contiguous() for tensor in given)
    assert weight.is_packed == (weight.bits == 4)
    kind = FLOAT8 if weight.is_float else LEVELS if weight.levels is not None else HALVES if weight.bits == 4 else BYTES
    constants = {
        "KIND": kind.value,
        "ZERO": weight.zero,
        "GROUP": 0 if has_one_scale(weight) else weight.group_size,
        "OFFSET": (NO_OFFSET if offsets is None else ZEROS if weight.added is None else ADDED).value,
        "NESTED": 0 if weight.nest is None else weight.nest.shape[2],
        "IN_NEST": max(NEST // weight.group_size, 1),
    }
    # Where there is nothing, a tensor that is not read.
    return (weight.codes, *(weight.scales if tensor is None else tensor for tensor in given)), constants

"""Rounding of weights to integers of 4 or 8 bits, and the numbers that codes stand for.

Each row is divided into groups of neighbouring inputs, and a weight is `(code - zero) * scale of its group`. Weights of
files that are quantized already may have other groups, a number that is added, or levels in place of codes.
Codes may be floating-point numbers of 8 bits, see float8.py.

On a CPU activations are rounded to 8 bits at each call, by row and by the same groups; not for floating-point codes.
Products are summed within a group as integers, and groups in a fixed order, so a row's result does not depend on the
other rows. On a GPU activations are not rounded.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from specinfer.ops.cpu.library import each_alone
from specinfer.ops.quantized_weight import GROUP_SIZES, ZEROS, QuantizedWeight

Bits = Literal[8, 4]
BITS: dict[str, Bits] = {"int8": 8, "int4": 4}
RANGES: dict[int, tuple[int, int]] = {8: (-127, 127), 4: (-8, 7)}  # of codes without the zero
# The smallest magnitude that is not treated as 0.
TINY = 2.0**-120

_LARGEST = 127  # of 8-bit weights
# Numbers of steps from 0 to a group's largest weight that are tried for 4 bits. That weight gets the lowest code of -8
# to 7. Fewer steps leave room on the other side; more are finer and clip the largest weight. Other numbers gain little.
_STEPS = (8.0, 8.6, 7.0)
_MOST_VALUES = 16  # of 4 bits; groups with no more distinct ones were rounded before, and keep their values
_ALL_STEPS = (8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0)  # tried for such groups, whose largest weight may have any code
_AT_ONCE = 2**18  # weights quantized at a time, few enough for the processor's cache
_SMALL = 2**15  # weights that PyTorch computes on one thread


def quantize(weight: Tensor, bits: Bits) -> QuantizedWeight:
    """Round weights to the nearest values of this many bits, some rows at a time.

    Args:
        weight: [out, in], finite.
    """
    group_size, zero = GROUP_SIZES[bits], ZEROS[bits]
    size, depth = weight.shape
    groups = -(-depth // group_size)
    codes = torch.empty((size, groups * group_size), dtype=torch.uint8, device=weight.device)
    scales = torch.empty((size, groups), dtype=torch.bfloat16, device=weight.device)
    if weight.is_meta:  # read later: only shapes matter
        return QuantizedWeight(codes, scales, bits, depth)
    lowest, highest = RANGES[bits]

    def round_rows(part: slice) -> None:
        values = functional.pad(weight[part].float(), (0, codes.shape[1] - depth))
        values = values.view(-1, groups, group_size)
        scale = find_scales(values, bits).to(torch.bfloat16)
        scales[part] = scale.squeeze(2)
        rounded = (values / scale.float().masked_fill(scale == 0, torch.inf)).round_().clamp_(lowest, highest)
        codes[part] = rounded.add_(zero).to(torch.uint8).view(-1, codes.shape[1])

    rows = max(1, _AT_ONCE // codes.shape[1])
    parts = [slice(start, start + rows) for start in range(0, size, rows)]
    if weight.device.type == "cpu" and codes.numel() > _SMALL:
        each_alone(round_rows, parts)
    else:
        for part in parts:
            round_rows(part)
    return QuantizedWeight(codes, scales, bits, depth)


def find_scales(values: Tensor, bits: Bits) -> Tensor:
    """Return scales [rows, groups, 1] for groups of weights, [rows, groups, size]."""
    if bits == 8:
        return _full_range(values)
    # Rounded scales are compared in double, where none that is exact loses against another.
    return (
        _least_squares(values.double(), _ALL_STEPS) if _has_few_values(values[:1]) else _least_squares(values, _STEPS)
    )


def _full_range(values: Tensor) -> Tensor:
    """Return scales [rows, groups, 1] that map the largest magnitude of each group of `values` to the largest code.

    Args:
        values: [rows, groups, size].
    """
    return values.abs().amax(dim=2, keepdim=True) / _LARGEST


def _has_few_values(values: Tensor) -> bool:
    """Return whether each group of [rows, groups, size] weights has so few distinct ones that they were rounded."""
    return all(len(group.unique()) <= _MOST_VALUES for group in values.flatten(0, 1))


def _least_squares(values: Tensor, numbers: Sequence[float]) -> Tensor:
    """Return scales [rows, groups, 1] with the least squared error among roundings to these numbers of steps.

    Args:
        values: [rows, groups, size].
    """
    highest, lowest = values.amax(dim=2, keepdim=True), values.amin(dim=2, keepdim=True)
    largest = torch.where(highest > -lowest, highest, lowest)
    # Avoids NaN for a group of zeros.
    unit = values / largest.masked_fill(largest.abs() < TINY, torch.inf)
    codes, products = torch.empty_like(unit), torch.empty_like(unit)
    best_gain, best = torch.full_like(largest, -1.0), torch.zeros_like(largest)
    for steps in numbers:
        torch.mul(unit, -steps, out=codes).round_().clamp_(-8, 7)
        fit = torch.mul(unit, codes, out=products).sum(dim=2, keepdim=True)
        norm = torch.mul(codes, codes, out=products).sum(dim=2, keepdim=True).clamp_(min=1.0)
        scale = fit / norm  # has the least squared error for these codes; `gain` is the decrease of the error
        if values.dtype == torch.float64:
            scale = (scale * largest).bfloat16() / largest.masked_fill(largest == 0, torch.inf)
        gain = scale * (2 * fit - norm * scale) if values.dtype == torch.float64 else fit * scale
        best = torch.where(gain > best_gain, scale, best)
        best_gain = torch.maximum(gain, best_gain)
    return best * largest


def dequantize(weight: QuantizedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the [out, in] numbers that the codes stand for."""
    values = weight.numbers().view(weight.out_features, -1, weight.group_size)
    values *= weight.group_scales().unsqueeze(2)
    if (added := weight.group_added()) is not None:
        values += added.unsqueeze(2)
    return values.flatten(1)[:, : weight.in_features].to(dtype)

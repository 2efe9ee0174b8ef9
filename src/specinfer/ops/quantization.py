"""Weights of 4 to 8 bits, and their product with activations rounded to 8 bits.

Each row is divided into groups of neighbouring inputs, and a weight is `(code - zero) * scale of its group`. Weights of
files that are quantized already may have other groups, a number that is added, or levels in place of codes.
Codes may be floating-point numbers of 8 bits, see float8.py: then activations are not rounded.
Otherwise they are rounded at each call, by row and by the same groups. Products are summed within a group as integers,
which float32 represents exactly in any order. Groups are summed in a fixed order, so a row's result does not depend on
the other rows. This plain PyTorch code defines the format: other implementations must give the same results except for
the last bits.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from specinfer.ops import float8
from specinfer.ops.cpu.library import each_alone
from specinfer.ops.quantized_weight import GROUP_SIZES, ZEROS, QuantizedWeight

Bits = Literal[8, 4]
BITS: dict[str, Bits] = {"int8": 8, "int4": 4}
RANGES: dict[int, tuple[int, int]] = {8: (-127, 127), 4: (-8, 7)}  # of codes without the zero
# The smallest magnitude that is not treated as 0: below it, 127 over the magnitude may be infinite.
TINY = 2.0**-120

_LARGEST = 127  # of rounded activations, and of 8-bit weights
# Numbers of steps from 0 to a group's largest weight that are tried for 4 bits. That weight gets the lowest code of -8
# to 7. Fewer steps leave room on the other side; more are finer and clip the largest weight. Other numbers gain little.
_STEPS = (8.0, 8.6, 7.0)
_MOST_VALUES = 16  # of 4 bits; groups with no more distinct ones were rounded before, and keep their values
_ALL_STEPS = (8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0)  # tried for such groups, whose largest weight may have any code
_AT_ONCE = 2**18  # weights quantized at a time, few enough for the processor's cache
_SMALL = 2**15  # weights that PyTorch computes on one thread
_MAX_ROWS, _MAX_PRODUCTS = 256, 2**20  # rows multiplied at a time; products in memory, which fit into the cache


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


def widened_product(rows: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Return [rows, out] products with weights that are widened to the type of `rows`, for some outputs at a time."""
    result = rows.new_empty(len(rows), weight.out_features)
    for part in float8.row_ranges(torch.Size((weight.out_features, rows.shape[1]))):
        wide = dequantize(weight.part(part), rows.dtype)
        result[:, part] = functional.linear(rows, wide, None if bias is None else bias[part])
    return result


def quantize_rows(x: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Round rows to integers from -127 to 127, and return them with their scales.

    NaN and infinity become NaN. A group whose magnitudes are all below `TINY` becomes 0.

    Args:
        x: [rows, in].

    Returns:
        [rows, groups, size] integers and [rows, groups] scales, both float32.
    """
    values = functional.pad(x.float(), (0, -x.shape[1] % group_size)).unflatten(1, (-1, group_size))
    largest = values.abs().amax(dim=2, keepdim=True)
    largest.masked_fill_(largest < TINY, 0.0)
    factor = (_LARGEST / largest).masked_fill_(largest == 0, 0.0)
    return (values * factor).round_().clamp_(-_LARGEST, _LARGEST), (largest / _LARGEST).squeeze(2)


def linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Return [rows, out] in the type of `x`: the sum over groups of scale * scale * integer, in float32, plus the bias.

    Args:
        x: [rows, in].
        bias: [out].
    """
    if weight.is_float:
        return functional.linear(x.float(), dequantize(weight), None if bias is None else bias.float()).to(x.dtype)
    groups, group_size = weight.scales.shape[1], weight.group_size
    result = torch.empty((len(x), weight.out_features), dtype=x.dtype, device=x.device)
    if not len(x):
        return result
    rounded, scales = quantize_rows(x, group_size)
    rounded, scales = rounded.transpose(0, 1), scales.T.unsqueeze(2)  # [groups, rows, size], [groups, rows, 1]
    columns = max(1, _MAX_PRODUCTS // (groups * max(min(len(x), _MAX_ROWS), group_size)))
    for first in range(0, weight.out_features, columns):
        part = slice(first, first + columns)
        numbers = weight.numbers(part).view(-1, groups, group_size)
        numbers = numbers.permute(1, 2, 0)  # [groups, size, columns]
        weight_scales = weight.group_scales(part).T.unsqueeze(1)  # [groups, 1, columns]
        offsets = weight.group_added(part)
        added = None if bias is None else bias[part].float()
        for start in range(0, len(x), _MAX_ROWS):
            rows = slice(start, start + _MAX_ROWS)
            products = torch.bmm(rounded[:, rows], numbers)  # [groups, rows, columns] integers
            if offsets is None:
                products *= scales[:, rows] * weight_scales
            else:
                sums = rounded[:, rows].sum(dim=2, keepdim=True)  # [groups, rows, 1]
                products = (products * weight_scales + sums * offsets.T.unsqueeze(1)) * scales[:, rows]
            total = products[0]
            for product in products[1:]:  # a loop, because a sum over the dimension may use any order
                total += product
            result[rows, part] = total if added is None else total.add_(added)
    return result

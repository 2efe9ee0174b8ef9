"""Weights of 4 to 8 bits, and their product with activations rounded to 8 bits.

Each row is divided into groups of neighbouring inputs, and a weight is `(code - zero) * scale of its group`. Weights of
files that are quantized already may have other groups, a number that is added, or levels in place of codes.
Codes may be floating-point numbers of 8 bits, see float8.py: then activations are not rounded.
Otherwise they are rounded at each call, by row and by the same groups. Products are summed within a group as integers,
which float32 represents exactly in any order. Groups are summed in a fixed order, so a row's result does not depend on
the other rows. This plain PyTorch code defines the format: other implementations must give the same results except for
the last bits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

Bits = Literal[8, 4]
BITS: dict[str, Bits] = {"int8": 8, "int4": 4}
GROUP_SIZES: dict[int, int] = {8: 64, 4: 32}
ZEROS: dict[int, int] = {8: 128, 6: 32, 5: 16, 4: 8}  # the codes that stand for 0
NEST = 256  # inputs whose groups' scales have a scale of their own
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
_MAX_ROWS, _MAX_PRODUCTS = 256, 2**20  # rows multiplied at a time; products in memory, which fit into the cache


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """The weights of a linear layer; inputs are padded to whole groups, with the code that stands for 0.

    A weight is `(code - zero) * scale + added`. With `nest`, scales and what is added are whole numbers times those of
    `NEST` inputs. The zero is that of all codes of so many bits, or one of each group. There is none where something is
    added, and the levels stand for themselves.
    """

    codes: Tensor  # [out, groups * group size] uint8
    # [out, groups] bfloat16 or float16, of either sign; int8, or uint8 with `added`, if nested; float32 of float codes
    scales: Tensor
    bits: int
    in_features: int
    group: int | None = None  # inputs of a group; None for the one of GROUP_SIZES
    added: Tensor | None = None  # [out, groups] float16, or uint8 if nested
    nest: Tensor | None = None  # [out, inputs / NEST, 1, or 2 with `added`] float16
    levels: Tensor | None = None  # [16] int8: the numbers that the codes stand for, or [256] float32 of float codes
    zeros: Tensor | None = None  # [out, groups] uint8

    @classmethod
    def of_bytes(cls, codes: Tensor, scales: Tensor, bits: int, in_features: int) -> "QuantizedWeight":
        """Make weights from `codes` [out, bytes of a row] uint8.

        A byte has one code, or two of 4 bits, the first in the lower half.
        """
        if bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], dim=2).flatten(1)
        return cls(codes, scales, bits, in_features)

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def group_size(self) -> int:
        return self.group or GROUP_SIZES[self.bits]

    @property
    def is_float(self) -> bool:
        """True if codes are floating-point numbers."""
        return self.levels is not None and self.levels.is_floating_point()

    @property
    def zero(self) -> int:
        """The code that stands for 0 in all groups, or 0 if there is none."""
        return ZEROS[self.bits] if self.added is None and self.levels is None and self.zeros is None else 0

    def reordered(self, order: Callable[[Tensor], Tensor]) -> "QuantizedWeight":
        """Return the same rows in the order that a function brings those of a tensor into."""
        return self.joined([self], lambda tensors: order(tensors[0]))

    def can_split(self, part: range) -> bool:
        """Return whether these inputs are whole groups, and whole ones of groups whose scales have a scale."""
        size = self.group_size if self.nest is None else NEST
        return part.start % size == 0 and (part.stop % size == 0 or part.stop == self.in_features)

    def of_inputs(self, part: range) -> "QuantizedWeight":
        """Return the weights of some inputs, see `can_split`."""
        assert self.can_split(part)

        def cut(tensor: Tensor, size: int) -> Tensor:
            return tensor[:, part.start // size : -(-part.stop // size)].contiguous()

        group = self.group_size
        added, zeros = (None if one is None else cut(one, group) for one in (self.added, self.zeros))
        codes = cut(self.codes.unflatten(1, (-1, group)), group).flatten(1)
        nest = None if self.nest is None else cut(self.nest, NEST)
        return replace(
            self, codes=codes, scales=cut(self.scales, group), in_features=len(part), added=added, nest=nest,
            zeros=zeros,
        )  # fmt: skip

    def outline(self, rows: int) -> "QuantizedWeight":
        """Return weights on the meta device in the same format, with so many rows."""
        return self.reordered(lambda one: torch.empty((rows, *one.shape[1:]), dtype=one.dtype, device="meta"))

    @staticmethod
    def joined(
        weights: "Sequence[QuantizedWeight]", join: Callable[[list[Tensor]], Tensor] = torch.cat
    ) -> "QuantizedWeight":
        """Return the rows of several weights of the same format, one after the other or in the order of `join`."""
        first = weights[0]
        assert all(one.format == first.format for one in weights)
        added, nest, zeros = (
            None if getattr(first, name) is None else join([getattr(one, name) for one in weights])
            for name in ("added", "nest", "zeros")
        )
        codes, scales = (join([getattr(one, name) for one in weights]) for name in ("codes", "scales"))
        return replace(first, codes=codes, scales=scales, added=added, nest=nest, zeros=zeros)

    @property
    def format(self) -> tuple[object, ...]:
        """Properties that weights must share to be joined."""
        levels = None if self.levels is None else self.is_float or tuple(self.levels.tolist())
        optional = self.added is None, self.nest is None, self.zeros is None, levels
        return (self.bits, self.group_size, self.in_features, self.scales.dtype, *optional)

    def numbers(self, part: slice = slice(None)) -> Tensor:
        """Return the float32 numbers that scales multiply, of some rows: [rows, groups * group size]."""
        codes = self.codes[part]
        if self.levels is not None:
            return self.levels[codes.long()].float()
        return codes.to(torch.float32).sub_(self.zero)

    def group_scales(self, part: slice = slice(None)) -> Tensor:
        """Return the [rows, groups] float32 scales of some rows."""
        return self._nested(self.scales, 0, part)

    def group_added(self, part: slice = slice(None)) -> Tensor | None:
        """Return the [rows, groups] float32 numbers that are added to each weight of some rows, or None."""
        if self.zeros is not None:
            return -self.zeros[part].float() * self.group_scales(part)
        return None if self.added is None else self._nested(self.added, 1, part)

    def _nested(self, numbers: Tensor, index: int, part: slice) -> Tensor:
        numbers = numbers[part].float()
        if self.nest is None:
            return numbers
        outer = self.nest[part, :, index].float()
        return numbers * outer.repeat_interleave(NEST // self.group_size, dim=1)


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
    rows = max(1, _AT_ONCE // codes.shape[1])
    for start in range(0, size, rows):
        part = slice(start, start + rows)
        values = functional.pad(weight[part].float(), (0, codes.shape[1] - depth))
        values = values.view(-1, groups, group_size)
        scale = find_scales(values, bits).to(torch.bfloat16)
        scales[part] = scale.squeeze(2)
        rounded = (values / scale.float().masked_fill(scale == 0, torch.inf)).round_().clamp_(lowest, highest)
        codes[part] = rounded.add_(zero).to(torch.uint8).view(-1, codes.shape[1])
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

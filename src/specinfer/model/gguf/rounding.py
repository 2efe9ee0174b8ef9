"""Rounding of weights to the types with nested scales, Q4_K, Q5_K and Q6_K; the `gguf` package rounds to the others.

A group's scale, and what is subtracted, are those with the least squared error among several ways to round. Errors of
large weights count more. The scales of 256 weights are then rounded to whole numbers themselves, and codes chosen for
these. The bytes are those that `blocks.py` reads.
"""

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from specinfer.ops import each_alone

_NEST = 256
_AT_ONCE = 2**17  # weights that a thread rounds at a time, few enough for the cache of a processor
_TINY = 1e-30
# By bits, for scales with a number that is subtracted: how far from the whole range the searched steps begin, and how
# many there are.
_STEPS, _STEP = {4: (-1.35, 18), 5: (-1.35, 14)}, 0.15
_LARGEST_SCALE = 63  # of 6 bits
# What is written in place of a type whose blocks of 256 weights do not fit into a row.
_NARROW = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


def fitting(kind: GGMLQuantizationType, width: int) -> GGMLQuantizationType:
    """Return the type for rows of this many weights: the given one, or a type with smaller blocks."""
    return GGMLQuantizationType[_NARROW[kind.name]] if width % _NEST and kind.name in _NARROW else kind


def rounded(numbers: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Return the bytes [..., bytes of a row] of float32 weights [..., width] in a type."""
    rows = numbers.reshape(-1, numbers.shape[-1])
    step = max(_AT_ONCE // rows.shape[1], 1)
    parts = each_alone(lambda first: _rounded_rows(rows[first : first + step], kind), range(0, len(rows), step))
    return np.concatenate(parts).reshape(*numbers.shape[:-1], -1)


def _rounded_rows(rows: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    if kind.name not in _NARROW:
        found: np.ndarray = gguf.quants.quantize(rows, kind)
        return found
    write = _six_bits if kind.name == "Q6_K" else _with_offsets
    return write(torch.from_numpy(rows).reshape(-1, _NEST), int(kind.name[1])).view(len(rows), -1).numpy()


def _with_offsets(blocks: Tensor, bits: int) -> Tensor:
    """Return [blocks, bytes] of Q4_K or Q5_K: weights are codes times a scale, less a number of the group."""
    values = blocks.view(-1, 8, 32)
    scales, less = _least_squares(values, bits)
    nest = torch.stack([scales.amax(dim=1), less.amax(dim=1)], dim=1) / _LARGEST_SCALE
    nest = nest.half()
    own = [_whole(one, nest[:, i : i + 1].float()) for i, one in enumerate((scales, less))]
    scale, low = (one * nest[:, i : i + 1].float() for i, one in enumerate(own))
    codes = _divided(values + low.unsqueeze(2), scale.unsqueeze(2)).clamp_(0, (1 << bits) - 1).to(torch.uint8)
    six = [one.to(torch.uint8) for one in own]
    first = [one[:, :4] | one[:, 4:] >> 4 << 6 for one in six]
    last = six[0][:, 4:] & 15 | (six[1][:, 4:] & 15) << 4
    parts = [nest.view(torch.uint8), *first, last]
    if bits == 5:
        places = torch.arange(8, dtype=torch.uint8).unsqueeze(1)
        parts.append((codes >> 4 << places).sum(dim=1, dtype=torch.uint8))
    pairs = (codes & 15).view(-1, 4, 2, 32)
    parts.append((pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1))
    return torch.cat(parts, dim=1)


def _least_squares(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return scales and what is subtracted, both at least 0, [blocks, groups] each."""
    most, groups = (1 << bits) - 1, values.shape[:2]
    values = _side_by_side(values)
    weights = values.pow(2).mean(dim=0).sqrt() + values.abs()
    weighted = weights * values
    lowest, highest = values.amin(dim=0).clamp_(max=0.0), values.amax(dim=0)
    codes, room = torch.empty_like(values), torch.empty_like(values)

    def choose_codes(low: Tensor, unit: Tensor) -> None:
        factor = _inverse(unit)
        torch.addcmul(-low * factor, values, factor, out=codes).round_().clamp_(0, most)

    def error(scale: Tensor, low: Tensor) -> Tensor:
        return torch.sub(low, values, out=room).addcmul_(codes, scale).square_().mul_(weights).sum(dim=0)

    best_scale, best_low = (highest - lowest) / most, lowest
    choose_codes(best_low, best_scale)
    best = error(best_scale, best_low)
    start, count = _STEPS[bits]
    all_weights, all_values = weights.sum(dim=0), weighted.sum(dim=0)
    for step in range(count):
        choose_codes(best_low, (highest - best_low) / (most + start + step * _STEP))  # from the best one so far
        products = torch.mul(weighted, codes, out=room).sum(dim=0)
        ones = torch.mul(weights, codes, out=room).sum(dim=0)
        squares = room.mul_(codes).sum(dim=0)
        determinant = (all_weights * squares - ones * ones).clamp_(min=_TINY)
        scale = (all_weights * products - all_values * ones) / determinant
        low = (squares * all_values - ones * products) / determinant
        scale = torch.where(low > 0, products / squares.clamp(min=_TINY), scale)
        low.clamp_(max=0.0)
        found = error(scale, low)
        is_less = (found < best) & (scale > 0)
        best = torch.where(is_less, found, best)
        best_scale, best_low = torch.where(is_less, scale, best_scale), torch.where(is_less, low, best_low)
    return best_scale.view(groups), -best_low.view(groups)


def _side_by_side(values: Tensor) -> Tensor:
    """Return [size, blocks * groups] weights of [blocks, groups, size]: sums of a group are those of many at once."""
    return values.flatten(0, 1).T.contiguous()


def _six_bits(blocks: Tensor, _bits: int) -> Tensor:
    """Return [blocks, bytes] of Q6_K: weights are codes from -32 to 31 times a scale of either sign."""
    values = blocks.view(-1, 16, 16)
    scales = _symmetric_scales(values)
    largest = scales.gather(1, scales.abs().argmax(dim=1, keepdim=True))
    nest = (-largest / 128).half()
    own = _divided(scales, nest.float()).clamp_(-128, 127)
    codes = _divided(values, (own * nest.float()).unsqueeze(2)).clamp_(-32, 31).to(torch.int8)
    runs = (codes + 32).to(torch.uint8).view(-1, 2, 4, 32)  # of each half: four of 32
    low, high = runs & 15, runs >> 4
    lower = torch.cat([low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4], dim=2)
    upper = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    return torch.cat(
        [lower.flatten(1), upper.flatten(1), own.to(torch.int8).view(torch.uint8), nest.view(torch.uint8)], dim=1
    )


def _symmetric_scales(values: Tensor) -> Tensor:
    """Return [blocks, groups] scales; the largest weight of each group gets a code near -32."""
    groups = values.shape[:2]
    values = _side_by_side(values)
    highest, lowest = values.amax(dim=0), values.amin(dim=0)
    inverse = _inverse(torch.where(highest > -lowest, highest, lowest))
    cubes, codes, room = values.pow(3), torch.empty_like(values), torch.empty_like(values)
    best_scale, best = torch.zeros_like(inverse), torch.zeros_like(inverse)
    for step in range(-9, 10):
        torch.mul(values, inverse * -(32 + step / 10), out=codes).round_().clamp_(-32, 31)
        fit = torch.mul(cubes, codes, out=room).sum(dim=0)
        scale = fit / codes.mul_(values).square_().sum(dim=0).clamp_(min=_TINY)
        gain = fit * scale  # the decrease of the squared error
        best_scale = torch.where(gain > best, scale, best_scale)
        best = torch.maximum(gain, best)
    return best_scale.view(groups)


def _inverse(scale: Tensor) -> Tensor:
    """Return 1 / `scale`, 0 where it is 0."""
    return scale.masked_fill(scale == 0, torch.inf).reciprocal_()


def _divided(values: Tensor, scale: Tensor) -> Tensor:
    """Return the nearest whole numbers of `scale`, 0 where it is 0."""
    return (values * _inverse(scale)).round_()


def _whole(numbers: Tensor, unit: Tensor) -> Tensor:
    return _divided(numbers, unit).clamp_(0, _LARGEST_SCALE)

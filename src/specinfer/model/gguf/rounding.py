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

_NEST = 256
_AT_ONCE = 2**17  # weights rounded at a time, few enough for the cache of a processor
_TINY = 1e-30
# By bits, for scales with a number that is subtracted: how far from the whole range the searched steps begin, and how
# many there are, a tenth apart.
_STEPS = {4: (-1.0, 21), 5: (-0.5, 16)}
_LARGEST_SCALE = 63  # of 6 bits
# What is written in place of a type whose blocks of 256 weights do not fit into a row.
_NARROW = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


def fitting(kind: GGMLQuantizationType, width: int) -> GGMLQuantizationType:
    """Return the type for rows of so many weights: the given one, or a type with smaller blocks."""
    return GGMLQuantizationType[_NARROW[kind.name]] if width % _NEST and kind.name in _NARROW else kind


def rounded(numbers: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Return the bytes [..., bytes of a row] of float32 weights [..., width] in a type."""
    if kind.name not in _NARROW:
        found: np.ndarray = gguf.quants.quantize(numbers, kind)
        return found
    blocks = torch.from_numpy(numbers).reshape(-1, _NEST)
    write = _six_bits if kind.name == "Q6_K" else _with_offsets
    bits = int(kind.name[1])
    parts = [write(part, bits) for part in blocks.split(_AT_ONCE // _NEST)]
    return torch.cat(parts).view(*numbers.shape[:-1], -1).numpy()


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
    most = (1 << bits) - 1
    weights = values.pow(2).mean(dim=2, keepdim=True).sqrt() + values.abs()
    lowest = values.amin(dim=2, keepdim=True).clamp(max=0.0)
    highest = values.amax(dim=2, keepdim=True)
    best_scale, best_low = (highest - lowest) / most, lowest
    best = _error(values, weights, best_scale, best_low, _divided(values - lowest, best_scale).clamp_(0, most))

    def total(numbers: Tensor) -> Tensor:
        return (weights * numbers).sum(dim=2, keepdim=True)

    start, count = _STEPS[bits]
    all_weights, all_values = total(torch.ones(())), total(values)
    for step in range(count):
        unit = (highest - best_low) / (most + start + step / 10)  # from the best one so far
        codes = _divided(values - best_low, unit).clamp_(0, most)
        ones, squares, products = total(codes), total(codes * codes), total(codes * values)
        determinant = (all_weights * squares - ones * ones).clamp_(min=_TINY)
        scale = (all_weights * products - all_values * ones) / determinant
        low = (squares * all_values - ones * products) / determinant
        scale = torch.where(low > 0, products / squares.clamp(min=_TINY), scale)
        low = low.clamp(max=0.0)
        error = _error(values, weights, scale, low, codes)
        is_less = (error < best) & (scale > 0)
        best = torch.where(is_less, error, best)
        best_scale, best_low = torch.where(is_less, scale, best_scale), torch.where(is_less, low, best_low)
    return best_scale.squeeze(2), -best_low.squeeze(2)


def _error(values: Tensor, weights: Tensor, scale: Tensor, low: Tensor, codes: Tensor) -> Tensor:
    return (weights * (codes * scale + low - values).pow(2)).sum(dim=2, keepdim=True)


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
    highest, lowest = values.amax(dim=2, keepdim=True), values.amin(dim=2, keepdim=True)
    largest = torch.where(highest > -lowest, highest, lowest)
    weights, best_scale, best = values * values, torch.zeros_like(largest), torch.zeros_like(largest)
    for step in range(-9, 10):
        codes = _divided(values, -largest / (32 + step / 10)).clamp_(-32, 31)
        fit = (weights * codes * values).sum(dim=2, keepdim=True)
        norm = (weights * codes * codes).sum(dim=2, keepdim=True).clamp_(min=_TINY)
        gain = fit * fit / norm  # the decrease of the squared error
        best_scale = torch.where(gain > best, fit / norm, best_scale)
        best = torch.maximum(gain, best)
    return best_scale.squeeze(2)


def _divided(values: Tensor, scale: Tensor) -> Tensor:
    """Return the nearest whole numbers of `scale`, 0 where it is 0."""
    return (values / scale.masked_fill(scale == 0, torch.inf)).round_()


def _whole(numbers: Tensor, unit: Tensor) -> Tensor:
    return _divided(numbers, unit).clamp_(0, _LARGEST_SCALE)

"""Weights of 8 bits in floating point (e4m3 of arXiv 2209.05433: 4 bits of exponent, 3 of mantissa).

A weight is `code * scale of its output`. Activations are not rounded; only the weights read from memory are smaller.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

CODES = torch.float8_e4m3fn
LEVELS = torch.arange(256, dtype=torch.uint8).view(CODES).float()  # the numbers that codes stand for; two are NaN
_LARGEST = torch.finfo(CODES).max  # 448
# The smallest magnitude that is not treated as 0: a smaller one would give a subnormal scale.
_TINY = 2.0**-100
_AT_ONCE = 2**22  # weights rounded or widened at a time, to keep copies in other types small


@dataclass(frozen=True, slots=True)
class Float8Weight:
    """The weights of a linear layer. Codes are bytes, which can be copied, stored and concatenated on any device."""

    codes: Tensor  # [out, in] uint8, the bits of e4m3
    scales: Tensor  # [out] float32, above 0


def quantize(weight: Tensor) -> Float8Weight:
    """Round weights to the nearest values of the format; the largest of each output becomes the format's largest.

    Args:
        weight: [out, in], finite.
    """
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    if weight.is_meta:  # read later: only shapes matter
        return Float8Weight(codes, scales)
    for part in row_ranges(weight.shape):
        values = weight[part].float()
        largest = values.abs().amax(dim=1)
        scale = largest.masked_fill(largest < _TINY, _LARGEST) / _LARGEST
        scales[part] = scale
        rounded = (values / scale.unsqueeze(1)).clamp_(-_LARGEST, _LARGEST)  # larger values have no code
        codes[part] = rounded.to(CODES).view(torch.uint8)
    return Float8Weight(codes, scales)


def dequantize(weight: Float8Weight, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the [out, in] numbers that the codes stand for."""
    if weight.codes.is_meta:
        return torch.empty(weight.codes.shape, dtype=dtype, device="meta")
    return (weight.codes.view(CODES).float() * weight.scales.unsqueeze(1)).to(dtype)


def has_nan(codes: Tensor) -> bool:
    """Return whether there is a code that stands for no number; e4m3 has two, and no infinity."""
    return bool(codes.numel()) and (int(codes.max()) == 0xFF or int(codes.view(torch.int8).max()) == 0x7F)


def row_ranges(shape: torch.Size) -> list[slice]:
    """Return the ranges of outputs of [out, in] weights that are processed at a time."""
    rows = max(1, _AT_ONCE // max(shape[1], 1))
    return [slice(start, start + rows) for start in range(0, shape[0], rows)]

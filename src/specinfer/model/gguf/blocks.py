"""Blocks of GGUF files as quantized weights: the same codes and scales, in the order that our kernels take them.

A block holds neighbouring weights of a row. The layouts are those of ggml's `ggml-common.h`.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from specinfer.ops import QuantizedWeight

_IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4_LEVELS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the numbers of E2M1
_Blocks = Tensor  # [rows, blocks, bytes] uint8


def has_codes(kind: GGMLQuantizationType) -> bool:
    """Return whether our kernels take the codes of a type as they are."""
    return kind.name in _DECODE


def weight_of(rows: Tensor, kind: GGMLQuantizationType) -> QuantizedWeight:
    """Return the weights that [rows, bytes] uint8 of a type in `has_codes` hold."""
    numbers, size = GGML_QUANT_SIZES[kind]
    blocks = rows.view(len(rows), -1, size)
    return _DECODE[kind.name](blocks, blocks.shape[1] * numbers)


def _halves(data: Tensor) -> Tensor:
    """Return [rows, blocks * numbers] float16 of two bytes each."""
    return data.contiguous().view(torch.float16).flatten(1)


def _nibbles(data: Tensor) -> Tensor:
    """Return the codes of [..., bytes]: the lower halves of all bytes, then the upper ones."""
    return torch.cat([data & 15, data >> 4], dim=-1)


def _bits(data: Tensor) -> Tensor:
    """Return [..., bytes * 8] bits, the lowest of each byte first."""
    return (data.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2)


def _of_32(
    b: _Blocks, width: int, bits: int, *, has_added: bool = False, levels: Sequence[int] | None = None
) -> QuantizedWeight:
    """Decode blocks of 32 weights: the scale, what is added, the fifth bits, and the four lower ones."""
    start = 4 if has_added else 2
    codes, added = _nibbles(b[..., start + 4 * (bits == 5) :]), _halves(b[..., 2:4]) if has_added else None
    if bits == 5:
        codes |= _bits(b[..., start : start + 4]) << 4
    numbers = None if levels is None else _levels(levels)
    return QuantizedWeight(codes.flatten(1), _halves(b[..., :2]), bits, width, 32, added, levels=numbers)


def _q8_0(b: _Blocks, width: int) -> QuantizedWeight:
    return QuantizedWeight((b[..., 2:] ^ 128).flatten(1), _halves(b[..., :2]), 8, width, 32)


def _k_scales(b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the [rows, blocks * 8] scales and subtracted numbers that 12 bytes of 6 bits each hold."""
    first, second, third = b[..., :4], b[..., 4:8], b[..., 8:]
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], dim=-1)
    less = torch.cat([second & 63, third >> 4 | second >> 6 << 4], dim=-1)
    return scales.flatten(1), less.flatten(1)


def _pairs_of_32(data: Tensor) -> Tensor:
    """Return [..., groups, 32] codes; 32 bytes hold those of two groups."""
    codes: Tensor = _nibbles(data.unflatten(-1, (-1, 32)))
    return codes.view(*data.shape[:-1], -1, 32)


def _nested_with_added(b: _Blocks, width: int, bits: int) -> QuantizedWeight:
    """Decode Q4_K, or Q5_K, which has the fifth bits of a byte of each group in turn."""
    scales, less = _k_scales(b[..., 4:16])
    codes = _pairs_of_32(b[..., 16 + 32 * (bits == 5) :])
    if bits == 5:
        codes |= _bits_of_groups(b[..., 16:48]) << 4
    return QuantizedWeight(codes.flatten(1), scales, bits, width, 32, less, _signed(b[..., :4]))


def _bits_of_groups(data: Tensor) -> Tensor:
    """Return [..., 8, bytes] bits: of each group one of every byte, the lowest first."""
    bits: Tensor = data.unsqueeze(-2) >> torch.arange(8, dtype=torch.uint8).unsqueeze(1) & 1
    return bits


def _signed(data: Tensor) -> Tensor:
    """Return [rows, blocks, 2] scales of scales and of what is added, of which files have the negative."""
    nest: Tensor = data.contiguous().view(torch.float16).clone()
    nest[..., 1] *= -1
    return nest


def _crumbs(data: Tensor, size: int) -> Tensor:
    """Return [..., parts, 4, size] codes of 2 bits: for each part of this many bytes, the lowest ones first."""
    places = torch.arange(0, 8, 2, dtype=torch.uint8).unsqueeze(1)
    codes: Tensor = data.unflatten(-1, (-1, size)).unsqueeze(-2) >> places & 3
    return codes


def _q6_k(b: _Blocks, width: int) -> QuantizedWeight:
    lower = b[..., :128].unflatten(-1, (2, 64))
    codes = _nibbles(lower).unflatten(-1, (4, 32)) | _crumbs(b[..., 128:192], 32) << 4
    return QuantizedWeight(
        codes.flatten(1), b[..., 192:208].contiguous().view(torch.int8).flatten(1), 6, width, 16,
        nest=_halves(b[..., 208:]).unsqueeze(2),
    )  # fmt: skip


def _q3_k(b: _Blocks, width: int) -> QuantizedWeight:
    # Zero is 4, and that of 6 bits 32.
    codes = _crumbs(b[..., 32:96], 32).flatten(-3, -2) + 4 * _bits_of_groups(b[..., :32]) + 28
    stored = b[..., 96:108]
    upper = _crumbs(stored[..., 8:], 4).flatten(-3)
    scales = (_nibbles(stored[..., :8]) | upper << 4).to(torch.int8) - 32
    nest = _halves(b[..., 108:]).unsqueeze(2)
    return QuantizedWeight(codes.flatten(1), scales.flatten(1), 6, width, 16, nest=nest)


def _q2_k(b: _Blocks, width: int) -> QuantizedWeight:
    codes, stored = _crumbs(b[..., 16:80], 32).flatten(1), b[..., :16].flatten(1)
    return QuantizedWeight(codes, stored & 15, 6, width, 16, stored >> 4, _signed(b[..., 80:]))


def _levels(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int8)


def _iq4_xs(b: _Blocks, width: int) -> QuantizedWeight:
    upper = _crumbs(b[..., 2:4], 1).flatten(-3)
    lower = torch.stack([b[..., 4:8] & 15, b[..., 4:8] >> 4], dim=-1).flatten(-2)
    scales = (lower | upper << 4).to(torch.int8) - 32
    codes = _nibbles(b[..., 8:].unflatten(-1, (8, 16)))
    nest = _halves(b[..., :2]).unsqueeze(2)
    return QuantizedWeight(codes.flatten(1), scales.flatten(1), 4, width, nest=nest, levels=_levels(_IQ4_LEVELS))


def _mxfp4(b: _Blocks, width: int) -> QuantizedWeight:
    scales = torch.ldexp(torch.ones(b.shape[:2]), b[..., 0].int() - 128).bfloat16()
    return QuantizedWeight(_nibbles(b[..., 1:]).flatten(1), scales, 4, width, levels=_levels(_FP4_LEVELS))


def _nvfp4(b: _Blocks, width: int) -> QuantizedWeight:
    codes = _nibbles(b[..., 4:].unflatten(-1, (4, 8)))
    return QuantizedWeight(
        codes.flatten(1), _E4M3_HALVES[b[..., :4].long()].flatten(1), 4, width, 16, levels=_levels(_FP4_LEVELS)
    )  # fmt: skip


def _e4m3_halves() -> Tensor:
    """Return [256] halves of the numbers of FP8 without a sign, whose bit is ignored; NaN counts as 0."""
    numbers = torch.arange(128, dtype=torch.uint8).view(torch.float8_e4m3fn).float() / 2
    numbers[127] = 0.0
    return torch.cat([numbers, numbers[:127], torch.tensor([240.0])])


_E4M3_HALVES = _e4m3_halves()
_DECODE: dict[str, Callable[[_Blocks, int], QuantizedWeight]] = {
    "Q4_0": partial(_of_32, bits=4), "Q4_1": partial(_of_32, bits=4, has_added=True),
    "Q5_0": partial(_of_32, bits=5), "Q5_1": partial(_of_32, bits=5, has_added=True), "Q8_0": _q8_0,
    "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": partial(_nested_with_added, bits=4),
    "Q5_K": partial(_nested_with_added, bits=5), "Q6_K": _q6_k,
    "IQ4_NL": partial(_of_32, bits=4, levels=_IQ4_LEVELS), "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4, "NVFP4": _nvfp4,
}  # fmt: skip

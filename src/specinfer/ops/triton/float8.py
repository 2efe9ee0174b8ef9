"""Numbers of 8 bits in Triton kernels, as bytes: from a compute capability on, hardware widens e4m3, and before it
bit operations do. Bits are rounded by operations everywhere, so that all devices store the same.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from specinfer.ops.kv_types import KV_TYPES

# Kinds of the cache's numbers, as `KV_TYPES` has them: those that Triton reads as they are, and e4m3 and e5m2 as bytes.
AS_STORED, E4M3, E5M2 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_NATIVE = (8, 9)  # the first compute capability with instructions for it


@triton.jit
def widen_e4m3(codes, DTYPE: tl.constexpr, NATIVE: tl.constexpr):
    """Widen e4m3 bytes: exponent and mantissa move to their float32 places, then 2**120 corrects the exponent.

    Without instructions for it, NaN becomes 480.
    """
    if NATIVE:
        return codes.to(tl.float8e4nv, bitcast=True).to(DTYPE)
    bits = codes.to(tl.int32)
    bits = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
    return (bits.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(DTYPE)


@triton.jit
def widened(numbers, DTYPE: tl.constexpr, KIND: tl.constexpr, NATIVE: tl.constexpr):
    """Return stored numbers as they are computed with, NaN too; `DTYPE` is for those of 8 bits."""
    if KIND == E4M3:
        wide = widen_e4m3(numbers, DTYPE, NATIVE)
        if not NATIVE:
            wide = tl.where((numbers & 0x7F) == 0x7F, float("nan"), wide).to(DTYPE)
    elif KIND == E5M2:  # the upper half of a float16
        wide = (numbers.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(DTYPE)
    else:
        wide = numbers
    return wide


@triton.jit
def to_stored(numbers, inverse, DTYPE: tl.constexpr, KIND: tl.constexpr):
    """Compute `kv_types.to_stored`; `DTYPE` is for numbers that are not of 8 bits."""
    if KIND == AS_STORED:
        stored = numbers.to(DTYPE)
    else:
        stored = _rounded(numbers, inverse, KIND)
    return stored


@triton.jit
def _rounded(numbers, inverse, KIND: tl.constexpr):
    """Return the bytes of the nearest numbers of a type of 8 bits."""
    bits = (numbers.to(tl.float32) * inverse).to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # As bits of a float32: the exponent by which the types differ, the largest number and the smallest normal one. The
    # last place of `places` is that of subnormal numbers.
    bias: tl.constexpr = 0x3C000000 if KIND == E4M3 else 0x38000000
    shift: tl.constexpr = 20 if KIND == E4M3 else 21
    largest: tl.constexpr = 0x43E00000 if KIND == E4M3 else 0x47600000
    least: tl.constexpr = bias + 0x800000
    places: tl.constexpr = 16384.0 if KIND == E4M3 else 128.0
    places_bits: tl.constexpr = 0x46800000 if KIND == E4M3 else 0x43000000
    normal = (size + ((1 << (shift - 1)) - 1) + ((size >> shift) & 1) - bias) >> shift
    subnormal = (size.to(tl.float32, bitcast=True) + places).to(tl.int32, bitcast=True) - places_bits
    code = tl.where(size < least, subnormal, normal)
    code = tl.where(size > largest, (largest - bias) >> shift, code)
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


def kind_of(pool: Tensor) -> int:
    """Return the kind of the numbers in a pool of the cache, for `KIND`."""
    return KV_TYPES[pool.dtype].kernel


def as_stored(pool: Tensor) -> Tensor:
    """Return the pool as kernels take it: not all devices have pointers to numbers of 8 bits."""
    return pool.view(torch.uint8) if kind_of(pool) else pool


@cache
def has_float8_instructions(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _NATIVE

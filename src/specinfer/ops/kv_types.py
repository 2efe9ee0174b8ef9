"""Types of the numbers in a KV cache. Those of 8 bits (arXiv 2209.05433) are multiples of a scale for each layer.

Conversions to them round to the nearest, of two equally near to the even one, and saturate: what is larger than the
largest number of the type becomes that, and so does infinity. NaN stays NaN. Conversions from them are exact.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class KVType(NamedTuple):
    """The numbers by which back ends know a type.

    Attributes:
        native: Number of the `Type` in types.h.
        kernel: `KIND` of Triton's kernels, see `triton.float8`; 0 for numbers that Triton reads as they are.
    """

    native: int
    kernel: int


# Only these types can be stored: back ends take their numbers from here.
KV_TYPES = {
    torch.float32: KVType(0, 0),
    torch.bfloat16: KVType(1, 0),
    torch.float16: KVType(2, 0),
    torch.float8_e4m3fn: KVType(9, 1),
    torch.float8_e5m2: KVType(10, 2),
}
# The bits that are all set in infinity and NaN (e4m3fn: in NaN), and the whole numbers of their size.
NOT_FINITE: dict[torch.dtype, tuple[type[np.unsignedinteger[Any]], int]] = {
    torch.float32: (np.uint32, 0x7F800000),
    torch.bfloat16: (np.uint16, 0x7F80),
    torch.float16: (np.uint16, 0x7C00),
    torch.float8_e4m3fn: (np.uint8, 0x7F),
    torch.float8_e5m2: (np.uint8, 0x7C),
}
FLOAT8 = tuple(dtype for dtype in KV_TYPES if dtype.itemsize == 1)


class KVScales(NamedTuple):
    """Units of the stored numbers of a layer: keys and values are multiples of them."""

    key: float = 1.0
    value: float = 1.0

    @property
    def inverses(self) -> tuple[float, float]:
        """The numbers that keys and values are multiplied by before they are stored."""
        return 1.0 / self.key, 1.0 / self.value


NO_SCALES = KVScales()


def to_stored(numbers: Tensor, dtype: torch.dtype, inverse: float = 1.0) -> Tensor:
    """Return numbers as they are stored; only types of 8 bits have scales."""
    if dtype not in FLOAT8:
        return numbers.to(dtype)
    largest = torch.finfo(dtype).max
    return (numbers.float() * inverse).clamp(-largest, largest).to(dtype)


def rows_of(pool: Tensor, slots: Tensor) -> Tensor:
    """Return the rows of a pool in these slots; those of 8 bits as bytes, which PyTorch selects on every device."""
    if pool.dtype not in FLOAT8:
        return pool.index_select(0, slots)
    return pool.view(torch.uint8).index_select(0, slots).view(pool.dtype)

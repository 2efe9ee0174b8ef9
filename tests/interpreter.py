"""Triton's interpreter, with bfloat16 as a GPU has it.

The interpreter of Triton 3.9 holds bfloat16 as its 16 bits. It cuts float32 off where a GPU rounds, and takes the bits
for whole numbers in casts from integers and in `tl.dot`.
"""

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import triton.language as tl
from triton.runtime import interpreter


@cache
def mend() -> None:
    """Puts that right, for the whole process."""
    cast, dot, handle = (
        interpreter.InterpreterBuilder.cast_impl,
        interpreter.InterpreterBuilder.create_dot,
        interpreter.TensorHandle,
    )

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        kind, wanted = src.dtype.scalar, dst_type.scalar
        if wanted != tl.bfloat16 or kind == tl.bfloat16:
            return cast(self, src, dst_type)
        return handle(_rounded(src.data.astype(np.float32)), wanted)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        a, b = (handle(_widened(x.data), tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return dot(self, a, b, d, *rest)

    interpreter.InterpreterBuilder.cast_impl = cast_impl
    interpreter.InterpreterBuilder.create_dot = create_dot


def _rounded(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The bits of the nearest bfloat16, of two equally near the even one."""
    bits = values.view(np.uint32).astype(np.uint64)
    nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), nearest)


def _widened(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)

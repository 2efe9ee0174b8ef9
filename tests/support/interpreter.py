"""Triton's interpreter, with bfloat16 as a GPU has it, and with checks of memory; importing this is enough.

That of Triton 3.9 holds a bfloat16 as its 16 bits. It cuts float32 off where a GPU rounds, and takes the bits for whole
numbers in `tl.dot` and in casts from integers.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

import memory_checks as memory_checks

# Of whole files: with a GPU kernels are compiled, and their tests are those marked `gpu`.
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
_cast, _dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot


def _cast_of_any_type(self: Any, x: Any, dst_type: Any) -> Any:
    if dst_type.scalar != tl.bfloat16 or x.dtype.scalar == tl.bfloat16:
        return _cast(self, x, dst_type)
    return TensorHandle(_rounded(x.data.astype(np.float32)), tl.bfloat16)


def _dot_of_any_type(self: Any, a: Any, b: Any, *others: Any) -> Any:
    widened = [self.create_fp_ext(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)]
    return _dot(self, *widened, *others)


def _rounded(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The bits of the nearest bfloat16, of two equally near the even one."""
    bits = values.view(np.uint32).astype(np.uint64)
    nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), nearest)


InterpreterBuilder.cast_impl = _cast_of_any_type
InterpreterBuilder.create_dot = _dot_of_any_type

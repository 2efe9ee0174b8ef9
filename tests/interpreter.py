"""Triton's interpreter, with what its own lacks: it multiplies the bits of bfloat16 as if they were whole numbers."""

from typing import Any

import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder

# Of whole files: with a GPU kernels are compiled, and their tests are those marked `gpu`.
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
_dot = InterpreterBuilder.create_dot


def _dot_of_any_type(self: Any, a: Any, b: Any, *others: Any) -> Any:
    widened = [self.create_fp_ext(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)]
    return _dot(self, *widened, *others)


InterpreterBuilder.create_dot = _dot_of_any_type

"""Products of Triton's interpreter as those of tensor cores: a number depends on its row and its column alone.

The interpreter hands a whole tile to NumPy, whose sums depend on where a row is in it. Here each product is added to
all sums at a time, in the order of the inputs.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from triton.language import float32
from triton.runtime import interpreter as triton_interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle, _LangPatchScope

import interpreter as interpreter
from specinfer.model.fixed_passes import fix_order
from specinfer.model.layers.device import DeviceDecoder, can_fuse_on_device
from specinfer.model.load import LoadedModel
from specinfer.ops import kernels

_launch, _patch_lang = GridExecutor.__call__, triton_interpreter._patch_lang
_patched = set[Any]()


def dot_in_order(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
    left, right = (self.create_fp_ext(x, float32).data if x.dtype.scalar != float32 else x.data for x in (a, b))
    total = np.array(d.data, dtype=np.float32)
    for k in range(left.shape[1]):
        total += left[:, k : k + 1] * right[k : k + 1, :]
    return TensorHandle(total, d.dtype.scalar)


class Launch(NamedTuple):
    """A launch: its kernel, and the numbers that it was given, as arguments, constants and options."""

    kernel: str
    numbers: dict[str, Any]

    def deciding(self) -> tuple[Any, ...]:
        """What may decide in which order a row's numbers are added up."""
        return self.kernel, tuple(sorted((name, x) for name, x in self.numbers.items() if name not in _FREE))


# Names of numbers that do not decide in which order the numbers of a row are added up: how many rows, requests, experts
# and programs there are, where tensors are, and which launch computes a part of attention, as all compute it alike.
_FREE = frozenset(
    {
        "num_rows", "num_tokens", "num_requests", "num_parts", "size", "num_experts", "stride_table",
        "stride_nodes", "stride_words", "IS_SPLIT", "IS_CHAIN",
    }
)  # fmt: skip
launches = list[Launch]()  # of the test


def _without_modes(self: Any, *args: Any, **kwargs: Any) -> None:
    given = dict(zip(self.arg_names, args, strict=False)) | kwargs
    numbers = {name: x for name, x in given.items() if isinstance(x, bool | int | float)}
    aligned = {f"{name} is aligned": x.data_ptr() % 16 == 0 for name, x in given.items() if isinstance(x, Tensor)}
    launches.append(Launch(self.fn.__name__, numbers | aligned))
    _patched.clear()
    with _disable_current_modes():  # the interpreter copies arguments by operations of PyTorch
        _launch(self, *args, **kwargs)


def _patched_once(function: Any) -> Any:
    """Patch the modules of the language that a function has, and each but once in a launch."""
    modules = {module for module in (tl, tl.core) if any(module is each for each in function.__globals__.values())}
    if modules <= _patched:
        return _LangPatchScope()
    _patched.update(modules)
    return _patch_lang(function)


def in_order(loaded: LoadedModel) -> LoadedModel:
    """Give passes of a model a fixed order, as at load on a GPU; layers are fused where they are fused there."""
    if can_fuse_on_device(loaded.model, torch.device("cuda")):
        loaded = replace(loaded, model=DeviceDecoder(loaded.model, loaded.max_position).eval())
    fix_order(loaded.model)
    return loaded


@pytest.fixture
def one_order(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels run in the interpreter, with products in the order of the inputs.

    The language is patched once in a launch, not at each call of a function, which takes most of the time.
    """
    launches.clear()
    with monkeypatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", dot_in_order)
        patch.setattr(GridExecutor, "__call__", _without_modes)
        patch.setattr(triton_interpreter, "_patch_lang", _patched_once)
        patch.setattr(kernels, "back_end", kernels.kernel)
        yield

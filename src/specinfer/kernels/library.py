"""The compiled library: found, loaded and called. The only place that knows it is C."""

import ctypes
import logging
import os
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

WIDTH = 32  # columns of a panel; as in linear.cpp
KINDS = {torch.bfloat16: "bf16", torch.float32: "fp32"}
_ISAS = ("portable code", "AVX2", "AVX-512")
logger = logging.getLogger(__name__)


@cache
def library() -> ctypes.CDLL | None:
    """None if it was not built, cannot be loaded, or SPECINFER_NATIVE=0 forbids it."""
    if os.environ.get("SPECINFER_NATIVE", "1") == "0":
        return None
    built = sorted(Path(__file__).parent.glob("_linear*.so"))
    if not built:
        return None
    try:
        # OpenMP must be the one PyTorch has: two of them would keep each other's threads from running.
        place = Path(torch.__file__).parent
        for openmp in (*place.glob("lib/libgomp*"), *place.parent.glob("torch.libs/libgomp*")):
            ctypes.CDLL(str(openmp), mode=ctypes.RTLD_GLOBAL)
        loaded = ctypes.CDLL(str(built[-1]))
        for kind in KINDS.values():
            pointers, sizes = ctypes.c_void_p, ctypes.c_int64
            getattr(loaded, f"specinfer_pack_{kind}").argtypes = [pointers] * 2 + [sizes] * 2 + [ctypes.c_int]
            getattr(loaded, f"specinfer_unpack_{kind}").argtypes = [pointers] * 2 + [sizes] * 2 + [ctypes.c_int]
            getattr(loaded, f"specinfer_linear_{kind}").argtypes = [pointers] * 5 + [sizes] * 3 + [ctypes.c_int]
    except (OSError, AttributeError) as error:
        logger.warning("native kernels cannot be used, models run as PyTorch has them: %s", error)
        return None
    return loaded


def describe() -> str:
    """What is used, in words."""
    loaded = library()
    return "none" if loaded is None else _ISAS[loaded.specinfer_isa()]


def pack(weight: Tensor) -> Tensor:
    """[panels, in, WIDTH]; of `weight` [out, in], whose type is one of `KINDS`."""
    size, depth = weight.shape
    packed = torch.empty((-(-size // WIDTH), depth, WIDTH), dtype=weight.dtype)
    _call("pack", weight.dtype, weight.contiguous(), packed, size, depth)
    return packed


def unpack(packed: Tensor, size: int) -> Tensor:
    """[out, in] as they were."""
    weight = torch.empty((size, packed.shape[1]), dtype=packed.dtype)
    _call("unpack", packed.dtype, packed, weight, size, packed.shape[1])
    return weight


def linear(x: Tensor, packed: Tensor, bias: Tensor | None, size: int) -> Tensor:
    """[rows, out]; of `x` [rows, in], of the weights' type. A row's result does not depend on the other rows."""
    x = x.contiguous()
    rows, depth = x.shape
    result, room = torch.empty((rows, size), dtype=x.dtype), torch.empty(rows * depth)
    _call("linear", x.dtype, x, packed, bias, result, room, rows, depth, size)
    return result


def _call(name: str, dtype: torch.dtype, *arguments: Tensor | int | None) -> None:
    function = getattr(library(), f"specinfer_{name}_{KINDS[dtype]}")
    function(*(a.data_ptr() if isinstance(a, Tensor) else a for a in arguments), torch.get_num_threads())

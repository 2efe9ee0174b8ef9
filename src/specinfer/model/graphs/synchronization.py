"""SynchronizationCheck: detection of operations that wait for the device, which a captured program must not do."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Operations whose result the host must read: a number, or the size of a result.
_TAGS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
# Products of groups of rows with a matrix each, as experts are computed; PyTorch's has kernels for bfloat16 on Hopper
# and Blackwell (compute capability 9 and 10). Otherwise it loops over groups, whose sizes the host reads, until cuBLAS
# of CUDA 13.3 or later takes its place.
_GROUPED, _GROUPED_LOOP = "_grouped_mm", "grouped_mm_fallback"
_WITH_KERNELS, _WITH_CUBLAS = (9, 10), (13, 3)


class SynchronizationError(Exception):
    """Error for a program that waits for the device."""


class SynchronizationCheck(TorchDispatchMode):
    """A mode that refuses operations of this thread that make the host wait for the device.

    A capture that breaks on such an operation leaves state in PyTorch that not all versions remove.

    Raises:
        SynchronizationError: The program reached such an operation, which is not run.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _synchronizes(func, args, kwargs):
            raise SynchronizationError(f"{func.overloadpacket.__name__} waits for the device")
        with self:  # in inference mode, a composite operation arrives as a whole
            found = func.decompose(*args, **kwargs)
        return func(*args, **kwargs) if found is NotImplemented else found


def _synchronizes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    name = func.overloadpacket.__name__
    if name in (_GROUPED, _GROUPED_LOOP):  # they read the sizes where this mode does not see it
        rows: Tensor = args[0]
        return rows.is_cuda and (name == _GROUPED_LOOP or _loops_over_groups(rows.dtype, rows.device))
    if name == "index":  # a mask index counts its true elements
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if name in ("copy_", "_to_copy"):
        source, place = (args[1], args[0].device) if name == "copy_" else (args[0], kwargs.get("device"))
        is_asynchronous = kwargs.get("non_blocking", len(args) > 2 and args[2])
        return place is not None and source.device.type != place.type and not is_asynchronous
    if name == "lift_fresh":  # from torch.tensor, whose numbers are on the host
        tensor: Tensor = args[0]
        return tensor.device.type != "cpu"
    if name == "repeat_interleave" and kwargs.get("output_size") is not None:
        return False
    return not _TAGS.isdisjoint(func.tags)


def _loops_over_groups(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether PyTorch computes products of groups one after the other."""
    version = torch.version.cuda
    if version is None or tuple(map(int, version.split(".")[:2])) >= _WITH_CUBLAS:
        return False
    return dtype != torch.bfloat16 or torch.cuda.get_device_capability(device)[0] not in _WITH_KERNELS

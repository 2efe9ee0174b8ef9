"""Transfers of numbers between host and device: several arrays in one copy, and one wait for all that comes back."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes; kernels are compiled once more for tensors that begin elsewhere


def is_apart(tensor: Tensor) -> bool:
    """Return whether a tensor is on an accelerator, which the host waits for when it reads the numbers."""
    return tensor.device.type != "cpu"


def send(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to a device, in order with its other work; nobody waits. On a CPU the memory is shared."""
    here = torch.from_numpy(array)
    if device.type != "cuda":
        return here.to(device, non_blocking=True)
    with torch.cuda.device(device):  # otherwise pages would be pinned through another GPU
        return here.pin_memory().to(device, non_blocking=True)


def send_together(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Copy arrays to a device in one transfer, for which nobody waits."""
    starts = list(accumulate((-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays), initial=0))
    packed = np.zeros(starts[-1], dtype=np.uint8)
    for start, array in zip(starts, arrays, strict=False):
        packed[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    sent = send(packed, device)
    return [
        sent[start : start + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for start, array in zip(starts, arrays, strict=False)
    ]


def on_host(tensors: Sequence[Tensor]) -> list[npt.NDArray[Any]]:
    """Return tensors as arrays; a device is waited for once, and on a CPU the memory is shared."""
    return fetch(tensors) if is_apart(tensors[0]) else [tensor.numpy() for tensor in tensors]


def fetch(tensors: Sequence[Tensor]) -> list[npt.NDArray[Any]]:
    """Copy tensors to the host in one transfer; a device is waited for once."""
    packed = torch.cat([tensor.flatten().view(torch.uint8) for tensor in tensors]).cpu().numpy()
    parts = np.split(packed, list(accumulate(tensor.nbytes for tensor in tensors))[:-1])
    return [
        part.view(torch.empty(0, dtype=tensor.dtype).numpy().dtype).reshape(tensor.shape)
        for part, tensor in zip(parts, tensors, strict=True)
    ]

"""Kernels for GPUs, written in Triton. Nothing here imports Triton before a kernel is wanted: it may be missing.

A kernel's file imports it as a whole, and so must only be imported where `runs_on` says yes, or by tests, which set
TRITON_INTERPRET=1 before: then kernels run on the CPU, a program after the other.
"""

import logging
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


def runs_on(tensor: Tensor) -> bool:
    """Whether kernels take this tensor: it is on a CUDA device, and Triton is installed.

    If so, its device is the thread's current one from now on: that is where Triton launches.
    """
    if not tensor.is_cuda or not _has_triton():
        return False
    if torch.cuda.current_device() != tensor.device.index:
        torch.cuda.set_device(tensor.device)
    return True


@cache
def _has_triton() -> bool:
    if find_spec("triton") is not None:
        return True
    logger.warning("Triton is not installed: kernels run as PyTorch has them; pip install specinfer[gpu]")
    return False

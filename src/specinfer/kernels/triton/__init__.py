"""Kernels for GPUs, written in Triton. Nothing here imports Triton before a kernel is wanted: it may be missing.

A kernel's file imports it as a whole, and so must only be imported where `runs_on` says yes, or by tests, which set
TRITON_INTERPRET=1 before: then kernels run on the CPU, a program after the other.
"""

import logging
import math
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


def runs_on(tensor: Tensor) -> bool:
    """Whether kernels take this tensor: it is on a CUDA device, and Triton is installed and can make kernels for it.

    If so, its device is the thread's current one from now on: that is where Triton launches.
    """
    if not tensor.is_cuda or not _has_triton():
        return False
    if torch.cuda.current_device() != tensor.device.index:
        torch.cuda.set_device(tensor.device)
    return _works_on(tensor.device)


@cache
def _has_triton() -> bool:
    if find_spec("triton") is not None:
        return True
    logger.warning("Triton is not installed: kernels run as PyTorch has them; pip install specinfer[gpu]")
    return False


@cache
def _works_on(device: torch.device) -> bool:
    """Tried with the smallest kernel: Triton needs a C compiler and Python's headers, and knows not every GPU."""
    try:
        from specinfer.kernels.triton.gate import gate

        opened = gate(torch.ones(1, 2, device=device)).item()
    except Exception as error:  # whatever a compiler or a driver lacks
        logger.debug("a kernel could not be run", exc_info=True)
        why = str(error).partition("\n")[0] or type(error).__name__
        logger.warning("Triton cannot run on %s, kernels run as PyTorch has them: %s", device, why)
        return False
    return abs(opened - 1 / (1 + math.exp(-1))) < 1e-3

"""GPU kernels written in Triton. This module does not import Triton, which may not be installed.

A kernel's module imports Triton. It must only be imported where `runs_on` returns True, or by tests that set
TRITON_INTERPRET=1 first: then kernels run on the CPU, one program after the other.
"""

import logging
import math
import os
import tempfile
import threading
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from subprocess import CalledProcessError

import torch
from torch import Tensor

from specinfer.core.errors import first_line
from specinfer.core.files import TemporaryFolder, cache_folder

logger = logging.getLogger(__name__)
_LOCK = threading.Lock()
_temporary: list[TemporaryFolder] = []  # the folder, once it is needed


def runs_on(tensor: Tensor) -> bool:
    """Return whether kernels support this tensor: it is on a CUDA device for which Triton can compile kernels.

    If so, the tensor's device becomes the thread's current device, because Triton launches kernels there.
    """
    if not tensor.is_cuda:
        return False
    if torch.cuda.current_device() != tensor.device.index:
        torch.cuda.set_device(tensor.device)
    return why_not_on(tensor.device) is None


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which a GPU is the current one; Triton launches kernels there, not where tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@cache
def why_not_on(device: torch.device) -> str | None:
    """Return why kernels cannot run on this device, or None if they can; the smallest one is run as a test.

    Triton needs a C compiler and Python's headers, and does not support every GPU.
    """
    if find_spec("triton") is None:
        logger.warning("Triton is not installed: models run as transformers has them; pip install specinfer[gpu]")
        return "it is not installed; pip install specinfer[gpu]"
    try:
        _choose_cache()
        from specinfer.ops.triton.gate import gate

        with on_device(device):
            opened = gate(torch.ones(1, 2, device=device)).item()
        is_right = abs(opened - 1 / (1 + math.exp(-1))) < 1e-3
        reason = None if is_right else "its smallest kernel gives wrong numbers"
    except CalledProcessError as error:  # of a long command; the compiler's own words are on the terminal
        compiler = Path(error.cmd[0]).name
        reason = f"{compiler} failed on what launches kernels; are Python's headers (python3-dev) installed?"
    except Exception as error:  # a compiler or a driver may fail in many ways
        logger.debug("a kernel could not be run", exc_info=True)
        reason = first_line(error)
    if reason is not None:
        logger.warning("Triton cannot run on %s, models run as transformers has them: %s", device, reason)
    return reason


def _choose_cache() -> None:
    """Let Triton keep compiled kernels in SpecInfer's cache, unless the user chose a place: a service has no home.

    Where that cannot be written they are kept until the process ends, since Triton must write to compile.
    """
    os.environ.setdefault("TRITON_CACHE_MANAGER", f"{__name__}.spare_cache:SpareCache")
    if not os.environ.keys().isdisjoint({"TRITON_CACHE_DIR", "TRITON_HOME"}):
        return
    folder = cache_folder() / "triton"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        folder = temporary_folder(folder, error)
    os.environ["TRITON_CACHE_DIR"] = str(folder)


def temporary_folder(place: Path, error: OSError) -> Path:
    """Return the folder for compiled kernels until the process ends, and log once why `place` cannot be written."""
    with _LOCK:
        if not _temporary:
            logger.warning(
                "compiled kernels are not kept for the next start: %s cannot be written (%s); "
                "set XDG_CACHE_HOME or TRITON_CACHE_DIR", place, error.strerror,
            )  # fmt: skip
            _temporary.append(TemporaryFolder("triton"))
        return _temporary[0].path

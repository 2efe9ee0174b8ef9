"""Devices and types by their names on the command line, checked before anything is loaded."""

import ctypes
import gc
import logging
import math
import os
import platform
import re
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import cast

import torch

from specinfer.core.config import KV_CACHE_DTYPES, EngineConfig, check_device
from specinfer.core.errors import first_line
from specinfer.ops.kv_types import KV_TYPES

logger = logging.getLogger(__name__)
_DEVICES, _DRIVER = Path("/dev"), Path("/proc/driver/nvidia/version")  # of NVIDIA's driver on Linux
_WSL = Path("/usr/lib/wsl/lib")  # libraries of Windows' drivers, which have no other files in its Linux
_MAX_VERSION = 80  # bytes of a driver's version, as NVML has it
DTYPES: dict[str, str | torch.dtype] = {
    "auto": "auto",
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
    "float": torch.float32,
}
# Products of 4096 outputs in blocks of 128 by 256 then have two blocks for each multiprocessor, so that few are idle.
_TOKENS_PER_CORE = 16
_BFLOAT16 = (8, 0)  # the first compute capability with units for it
_MOST_TOKENS = 2048  # of a step by default: requests that decode wait for prompts that are read in the same pass


def find_kv_dtype(name: str) -> torch.dtype | None:
    """Return the type of keys and values of this name, one of `KV_CACHE_DTYPES`, or None for that of the model.

    Raises:
        ValueError: It is not known how numbers of this type are stored.
    """
    known = KV_CACHE_DTYPES[name]
    dtype = None if known is None else getattr(torch, known)
    if dtype is not None and dtype not in KV_TYPES:
        names = ", ".join(known for known in KV_CACHE_DTYPES if known != name)
        raise ValueError(f"kv_cache_dtype: {name!r} is not in KV_TYPES (ops/kv_types.py); use {names}")
    return cast(torch.dtype | None, dtype)


def find_device(name: str) -> torch.device:
    """Return the device of this name; "auto" is the GPU if there is one, else the CPU.

    Raises:
        ValueError: The device is not known, not supported or not available.
    """
    check_device(name)
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        warn_of_unused_gpu()
        return torch.device("cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        why = why_no_cuda()
        raise ValueError(
            f'device: no CUDA device {name!r} is available; use "cpu" or "auto"' + (f" ({why})" if why else "")
        )
    return device


@cache
def warn_of_unused_gpu() -> None:
    """Log once that the CPU is used on a machine with a GPU, unless the user hides it."""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if not is_hidden and (_has_device_file() or driver_version()):
        logger.warning("device: the CPU is used, since PyTorch sees no GPU: %s", why_no_cuda())


def why_no_cuda() -> str | None:
    """Return why PyTorch has no CUDA device, in its own words where it has any, or None if it has one."""
    if torch.version.cuda is None and torch.version.hip is None:
        remedy = "to use a GPU of NVIDIA, pip uninstall torch and install a build for CUDA"
        return f"PyTorch {torch.__version__} is a build without CUDA; {remedy}"
    try:
        torch.cuda.init()
    except Exception as error:  # a driver may fail in many ways
        reason = first_line(error).rstrip(".")
        return reason if _has_device_file() else f"{reason}; in a container: docker run --gpus all"
    return None


def check_gpu(device: torch.device) -> torch.device:
    """Check that a GPU computes: PyTorch may have no code for it, or its memory may be full.

    Returns:
        The device with its number: "cuda" alone is the current GPU of whatever thread uses it.

    Raises:
        ValueError: It does not. Without this check loading would fail while weights are read.
    """
    if device.type != "cuda":
        return device
    gc.collect()  # an engine that nobody uses any more may be part of cycles, and would keep its memory
    try:
        number = torch.ones(1, device=device)
        number.add_(1).item()
    except Exception as error:  # as above
        raise ValueError(
            f"device: PyTorch {torch.__version__} cannot compute on {device}: {first_line(error)}; choose another "
            "device, free its memory if that is full, or install a build of PyTorch for it"
        ) from error
    return number.device


@cache
def warn_of_slow_type(device: torch.device, dtype: torch.dtype) -> None:
    """Log once that a GPU computes slowly in a type, for which it has no units."""
    is_slow = device.type == "cuda" and dtype == torch.bfloat16
    if is_slow and torch.cuda.get_device_capability(device) < _BFLOAT16:
        logger.warning(
            "dtype: %s has no units for bfloat16 (they come with compute capability 8.0); float16 is faster there",
            device_name(device),
        )


def driver_version() -> str | None:
    """Return the version of NVIDIA's driver, or None if it is not loaded or the system does not report it."""
    with suppress(OSError):  # only on Linux
        version = re.search(r"\d+(\.\d+)+", _DRIVER.read_text(encoding="utf-8"))
        return version[0] if version else None
    return _wsl_driver_version()


def _wsl_driver_version() -> str | None:
    """Return the version of NVIDIA's driver for Windows, asked by its library NVML in Windows' Linux (WSL), or None."""
    with suppress(OSError, AttributeError):
        library, version = ctypes.CDLL(str(_WSL / "libnvidia-ml.so.1")), ctypes.create_string_buffer(_MAX_VERSION)
        if library.nvmlInit_v2() == 0:
            try:
                if library.nvmlSystemGetDriverVersion(version, _MAX_VERSION) == 0:
                    return version.value.decode()
            finally:
                library.nvmlShutdown()
    return None


def _has_device_file() -> bool:
    return any(_DEVICES.glob("nvidia[0-9]*")) or (_WSL / "libcuda.so.1").exists()


def prompt_tokens(device: torch.device) -> int:
    """Return the usual number of prompt tokens in a step: on a GPU the more, the more it computes at a time."""
    least = EngineConfig().max_num_batched_tokens
    if device.type != "cuda":
        return least
    tokens = _TOKENS_PER_CORE * torch.cuda.get_device_properties(device).multi_processor_count
    return min(max(1 << round(math.log2(tokens)), least), _MOST_TOKENS)


def device_name(device: torch.device) -> str:
    """Return the manufacturer's name of a device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model()


def cpu_model() -> str:
    """Return the processor's name as the system reports it."""
    with suppress(OSError):  # only on Linux
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()

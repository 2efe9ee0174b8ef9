"""Devices and types by their names on the command line, checked before anything is loaded."""

import math
import platform
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

import torch

from specinfer.core.config import EngineConfig, check_device

DTYPES: dict[str, str | torch.dtype] = {
    "auto": "auto",
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
    "float": torch.float32,
}
KV_CACHE_DTYPES: dict[str, torch.dtype | None] = {
    "auto": None,  # that of the model
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
# Products of 4096 outputs in blocks of 128 by 256 then have two blocks for each multiprocessor, so that few are idle.
_TOKENS_PER_CORE = 16
_MOST_TOKENS = 2048  # of a step by default: requests that decode wait for prompts that are read in the same pass


def find_device(name: str) -> torch.device:
    """Return the device of this name; "auto" is the GPU if there is one, else the CPU.

    Raises:
        ValueError: The device is not known, not supported or not available.
    """
    check_device(name)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f'device: no CUDA device {name!r} is available; use "cpu" or "auto"')
    return device


def prompt_tokens(device: torch.device) -> int:
    """Return the usual number of prompt tokens in a step: on a GPU the more, the more it computes at a time."""
    least = EngineConfig().max_num_batched_tokens
    if device.type != "cuda":
        return least
    tokens = _TOKENS_PER_CORE * torch.cuda.get_device_properties(device).multi_processor_count
    return min(max(1 << round(math.log2(tokens)), least), _MOST_TOKENS)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which a GPU is the current one; Triton launches kernels there, not where tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


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

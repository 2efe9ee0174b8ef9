"""What the process may hold, and what it does: as the operating system counts it."""

import contextlib
import ctypes
import os
from pathlib import Path

import torch

from specinfer.model.offload.layer_stream import LayerStream

_SHARE = 0.8  # of what is to be had
_CACHE_SHARE = 0.15  # of the budget, for keys and values
_WIDTHS = 6  # of the widest matrix: numbers that a pass holds for each token, where nobody knows better
_LOGIT_ROWS = 256  # of the vocabulary, that verification holds
_PROC = Path("/proc")
_CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)


_CPU = torch.device("cpu")


def usual_budget(device: torch.device = _CPU, num_sharing: int = 1) -> int:
    """Most of what is to be had now, shared by so many processes, and what is held already."""
    return held_bytes(device) + int(_SHARE * available_bytes(device)) // num_sharing


class Budget:
    """Bytes for all models and caches, and whatever else the device's memory holds; None: the usual.

    On a CPU that is the whole process, with Python and libraries; on a GPU all that its driver counts.

    Raises:
        ValueError: The GPU has less.
    """

    def __init__(self, num_bytes: int | None, device: torch.device = _CPU) -> None:
        self.num_bytes = usual_budget(device) if num_bytes is None else num_bytes
        self._device = device
        if device.type == "cuda" and self.num_bytes > (whole := torch.cuda.mem_get_info(device)[1]):
            raise ValueError(
                f"memory_budget: {self.num_bytes / 2**20:.0f} MiB are more than the device's {whole / 2**20:.0f}; give "
                "at most that"
            )

    @property
    def cache_bytes(self) -> int:
        """For keys and values, unless the caller says more or less."""
        return int(_CACHE_SHARE * self.num_bytes)

    def spare(self, planned: int, cache_bytes: int, what: str) -> int:
        """What is left beside what is held now, `planned` bytes more, and the cache.

        Raises:
            ValueError: Nothing; the message names what would do.
        """
        least = held_bytes(self._device) + planned
        if least + cache_bytes > self.num_bytes:
            # The cache would have its share of a larger budget, too.
            enough = least + cache_bytes if cache_bytes < 0.99 * self.cache_bytes else least / (1 - _CACHE_SHARE)
            raise ValueError(
                f"memory_budget: {self.num_bytes / 2**20:.0f} MiB are too few for {what}; "
                f"give at least {enough // 2**20 + 1:.0f}MiB"
            )
        return self.num_bytes - least - cache_bytes


def settle(
    budget: Budget, stream: LayerStream, cache_bytes: int, num_rows: int, vocab_size: int, room: int | None = None
) -> None:
    """Lets as many layers stay as there is room for, beside what is held now and what a pass takes.

    Args:
        cache_bytes: Of keys and values of all models, none of them written yet.
        num_rows: Tokens of a pass.
        room: Floats that a pass holds for each of them, if that is known.

    Raises:
        ValueError: The budget is too small even if none stays.
    """
    activations = 4 * (num_rows * (room or _WIDTHS * stream.widest) + 2 * _LOGIT_ROWS * vocab_size)
    give_back()
    stream.settle(budget.spare(activations, cache_bytes, "two layers, the cache, embeddings and head"))


def give_back() -> None:
    """Has the C library return what was freed while loading: it keeps hundreds of MiB for what may come."""
    with contextlib.suppress(AttributeError, OSError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def held_bytes(device: torch.device = _CPU) -> int:
    """What is resident of this process, or taken of a GPU by all; 0 where the system does not tell."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what PyTorch keeps for later counts as taken
        free, whole = torch.cuda.mem_get_info(device)
        return whole - free
    return _field(_PROC / "self/status", "VmRSS")


def available_bytes(device: torch.device = _CPU) -> int:
    """What the machine, and the process's group, or a GPU, can still give."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = _field(_PROC / "meminfo", "MemAvailable") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    for limit, used in _CGROUPS:
        try:
            free = min(free, max(int(limit.read_text()) - int(used.read_text()), 0))
        except (OSError, ValueError):  # no such group, or no limit
            continue
    return free


def _field(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)

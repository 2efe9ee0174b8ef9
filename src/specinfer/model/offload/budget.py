"""What the process may hold, and what it does: as the operating system counts it."""

import contextlib
import ctypes
import os
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

from specinfer.model.offload.layer_stream import LayerStream

_ALL = "two layers, the cache, embeddings and head"
_SHARE = 0.8  # of what is to be had
_CACHE_SHARE = 0.15  # of the budget, for keys and values
WIDTHS = 6  # of the widest matrix: numbers that a pass holds for each token, where nobody knows better
_GUESS_SHARE, _LEAST_GUESSES, _MOST_NODES = 0.05, 512, 256  # of a pass: of the budget; at least; of a request
_KEPT_BYTES = 16 * 2**20  # that the C library may keep of what was freed
_TRIM_THRESHOLD = -1  # of mallopt(3)
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
        self.device = device
        if device.type == "cuda" and self.num_bytes > (whole := torch.cuda.mem_get_info(device)[1]):
            raise ValueError(
                f"memory_budget: {self.num_bytes / 2**20:.0f} MiB are more than the device's {whole / 2**20:.0f}; give "
                "at most that"
            )

    @property
    def cache_bytes(self) -> int:
        """For keys and values, unless the caller says more or less."""
        return int(_CACHE_SHARE * self.num_bytes)

    def spare(self, planned: int, cache_bytes: int, what: str = _ALL) -> int:
        """What is left beside what is held now, `planned` bytes more, and the cache.

        Raises:
            ValueError: Nothing; the message names what would do.
        """
        least = held_bytes(self.device) + planned
        if least + cache_bytes > self.num_bytes:
            self.refuse(least, cache_bytes if cache_bytes < 0.99 * self.cache_bytes else None, what)
        return self.num_bytes - least - cache_bytes

    def refuse(self, least: int, cache_bytes: int | None = None, what: str = _ALL) -> NoReturn:
        """Says what would do.

        Args:
            least: Bytes of all but the caches.
            cache_bytes: None: their usual share, which they would have of a larger budget, too.

        Raises:
            ValueError: Always.
        """
        enough = least / (1 - _CACHE_SHARE) if cache_bytes is None else least + cache_bytes
        raise ValueError(
            f"memory_budget: {self.num_bytes / 2**20:.0f} MiB are too few for {what}; "
            f"give at least {enough // 2**20 + 1:.0f}MiB"
        )


@dataclass(frozen=True, slots=True)
class PassRoom:
    """What memory is counted for in a pass.

    Attributes:
        num_rows: Tokens in all.
        num_guesses: Nodes of all trees together, and tokens of prompts whose log-probabilities are asked for.
        num_bytes: That it takes.
    """

    num_rows: int
    num_guesses: int
    num_bytes: int

    @classmethod
    def of(cls, budget: int, num_known: int, num_requests: int, row: int, vocab_size: int) -> "PassRoom":
        """A small part of the budget is for guesses, but where prompts are read they have what these leave.

        Args:
            num_known: Tokens of a step that are no guesses, at most.
            num_requests: At once.
            row: Floats that a pass holds for each token.
        """
        guesses = max(int(_GUESS_SHARE * budget / (4 * (row + vocab_size))), _LEAST_GUESSES)
        guesses = min(guesses, num_requests * _MOST_NODES)
        rows = max(num_known, num_requests + guesses)
        return cls(rows, guesses, 4 * (rows * row + (num_requests + guesses) * vocab_size) + _KEPT_BYTES)

    def guesses_beside(self, num_known: int, num_prompt_logprobs: int = 0) -> int:
        """How many there may be in a pass over so many known tokens, of so many of which logits are made."""
        return max(min(self.num_rows - num_known, self.num_guesses - num_prompt_logprobs), 0)


def settle(
    budget: Budget,
    stream: LayerStream,
    cache_bytes: int,
    num_known: int,
    num_requests: int,
    vocab_size: int,
    row: int | None = None,
) -> PassRoom:
    """Lets as many layers stay as there is room for, beside what is held now and what a pass takes.

    Args:
        cache_bytes: Of keys and values of all models, none of them written yet.
        num_known: Tokens of a step that are no guesses, at most.
        num_requests: At once.
        row: Floats that a pass holds for each token, if that is known.

    Raises:
        ValueError: The budget is too small even if none stays.
    """
    room = PassRoom.of(budget.num_bytes, num_known, num_requests, row or WIDTHS * stream.widest, vocab_size)
    keep_little()
    give_back()
    stream.settle(budget.spare(room.num_bytes, cache_bytes))
    return room


def give_back() -> None:
    """Has the C library return what was freed: after loading it keeps hundreds of MiB for what may come."""
    with contextlib.suppress(AttributeError, OSError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def keep_little() -> None:
    """Has it return what is freed from now on, too."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)


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
            taken = int(used.read_text()) - _cached_bytes(used.with_name("memory.stat"))
            free = min(free, max(int(limit.read_text()) - taken, 0))
        except (OSError, ValueError):  # no such group, or no limit
            continue
    return free


def _cached_bytes(path: Path) -> int:
    """Of a group's files in the page cache, what the system gives up before anything else."""
    try:
        fields = dict(line.split() for line in path.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(fields.get("total_inactive_file") or fields.get("inactive_file") or 0)


def _field(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)

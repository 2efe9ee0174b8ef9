"""Memory budgets, and the memory that the process uses as the operating system counts it."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

from specinfer.core.systems import call_c, control_groups, installed_memory
from specinfer.model.offload.checkpoint import Checkpoint, layer_number
from specinfer.model.offload.streamed_layer import LayerStream

_ALL = "two layers, the cache, embeddings and head"
_SHARE = 0.8  # of the available memory
CACHE_SHARE = 0.15  # of the budget, for keys and values
WIDTHS = 6  # default for the numbers per token of a pass, in multiples of the widest matrix
GUESS_SHARE, _LEAST_GUESSES, _MOST_NODES = 0.05, 512, 256  # for guesses: share of budget; minimum; per request
_KEPT_BYTES = 16 * 2**20  # freed memory that the C library may keep
_TRIM_THRESHOLD = -1  # of mallopt(3)
_UNKNOWN = 4 * 2**30  # bytes that a machine is taken to have if the system does not report it
_PROC = Path("/proc")
_LIMITS = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))  # and what is used


_CPU = torch.device("cpu")


def usual_budget(device: torch.device = _CPU, num_sharing: int = 1) -> int:
    """Return the bytes already used plus a share of the available ones, divided among the processes."""
    return used_bytes(device) + int(_SHARE * available_bytes(device)) // num_sharing


class Budget:
    """Bytes for all models, caches and other uses of the device's memory.

    On a CPU it covers the whole process, with Python and libraries. On a GPU it covers all that the driver counts, also
    what other processes use.

    Args:
        num_bytes: The budget, or None for `usual_budget`.

    Attributes:
        other_bytes: Bytes of it that are not PyTorch's in this process, and not shared out.

    Raises:
        ValueError: The GPU has less memory.
    """

    def __init__(self, num_bytes: int | None, device: torch.device = _CPU) -> None:
        self.num_bytes = usual_budget(device) if num_bytes is None else num_bytes
        self.device = device
        if device.type == "cuda" and self.num_bytes > (whole := torch.cuda.mem_get_info(device)[1]):
            raise ValueError(
                f"memory_budget: {self.num_bytes / 2**20:.0f} MiB are more than the device's {whole / 2**20:.0f}; give "
                "at most that"
            )
        self.other_bytes = 0
        if device.type == "cuda":
            self.other_bytes = max(used_bytes(device) - torch.cuda.memory_reserved(device), 0)

    @property
    def own_bytes(self) -> int:
        """Bytes of which caches and guesses have their shares."""
        return max(self.num_bytes - self.other_bytes, 0)

    @property
    def cache_bytes(self) -> int:
        """Bytes for keys and values, unless the caller sets another number."""
        return int(CACHE_SHARE * self.own_bytes)

    def spare(self, planned: int, cache_bytes: int | None = None, what: str = _ALL) -> int:
        """Return the bytes that are left after those in use, `planned` more, and the caches.

        Args:
            cache_bytes: Bytes of the caches, or None if they are not known yet: few requests may need little.

        Raises:
            ValueError: The budget is too small; the message names one that suffices.
        """
        least, caches = used_bytes(self.device) + planned, cache_bytes or 0
        if least + caches > self.num_bytes:
            self.refuse(least, None if caches >= 0.99 * self.cache_bytes else cache_bytes, what)
        return self.num_bytes - least - caches

    def refuse(self, least: int, cache_bytes: int | None = None, what: str = _ALL) -> NoReturn:
        """Raise an error that names a sufficient budget.

        Args:
            least: Bytes of all but the caches.
            cache_bytes: Bytes of the caches, or None for their usual share, which grows with the budget.

        Raises:
            ValueError: Always.
        """
        shared = (least - CACHE_SHARE * self.other_bytes) / (1 - CACHE_SHARE)
        enough = shared if cache_bytes is None else least + cache_bytes
        raise ValueError(
            f"memory_budget: {self.num_bytes / 2**20:.0f} MiB are too few for {what}; "
            f"give at least {enough // 2**20 + 1:.0f}MiB"
        )


@dataclass(frozen=True, slots=True)
class PassCapacity:
    """The limits of a pass for which memory is reserved.

    Attributes:
        num_rows: Largest number of tokens.
        num_guesses: Largest number of nodes of all trees, and prompt tokens with requested log-probabilities.
        num_bytes: Bytes that such a pass takes.
    """

    num_rows: int
    num_guesses: int
    num_bytes: int

    @classmethod
    def from_budget(cls, budget: int, num_known: int, num_requests: int, row: int, vocab_size: int) -> "PassCapacity":
        """Return the limits, in which guesses have a small part of the budget.

        In a step that reads prompts, guesses have only the rows that the known tokens leave.

        Args:
            num_known: Largest number of tokens of a step that are not guesses.
            num_requests: Largest number of requests at a time.
            row: Floats that a pass keeps in memory for each token.
        """
        guesses = max(int(GUESS_SHARE * budget / (4 * (row + vocab_size))), _LEAST_GUESSES)
        guesses = min(guesses, num_requests * _MOST_NODES)
        rows = max(num_known, num_requests + guesses)
        return cls(rows, guesses, 4 * (rows * row + (num_requests + guesses) * vocab_size) + _KEPT_BYTES)

    def max_guesses(self, num_known: int, num_prompt_logprobs: int = 0) -> int:
        """Return how many guesses fit into a pass with these known tokens and prompt log-probabilities."""
        return max(min(self.num_rows - num_known, self.num_guesses - num_prompt_logprobs), 0)


def settle(
    budget: Budget,
    stream: LayerStream,
    cache_bytes: int,
    num_known: int,
    num_requests: int,
    vocab_size: int,
    row: int | None = None,
) -> PassCapacity:
    """Keep as many layers in memory as fit, given what is in use now and what a pass takes.

    Args:
        cache_bytes: Bytes of keys and values of all models, none of them written yet.
        num_known: Largest number of tokens of a step that are not guesses.
        num_requests: Largest number of requests at a time.
        row: Floats that a pass keeps in memory for each token, or None if it is unknown.

    Raises:
        ValueError: The budget is too small even if no layer stays.
    """
    capacity = PassCapacity.from_budget(
        budget.own_bytes, num_known, num_requests, row or WIDTHS * stream.widest, vocab_size
    )
    limit_freed_memory()
    release_freed_memory()
    stream.settle(budget.spare(capacity.num_bytes, cache_bytes))
    return capacity


def release_freed_memory() -> None:
    """Make the C library return freed memory to the system; after loading it keeps hundreds of MiB for reuse."""
    call_c("malloc_trim", 0)  # of glibc


def limit_freed_memory() -> None:
    """Make the C library return freed memory from now on."""
    call_c("mallopt", _TRIM_THRESHOLD, _KEPT_BYTES)


def used_bytes(device: torch.device = _CPU) -> int:
    """Return the resident bytes of this process, or the used bytes of a GPU; 0 where the system does not report it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # memory that PyTorch keeps for reuse counts as used
        free, whole = torch.cuda.mem_get_info(device)
        return whole - free
    return _field(_PROC / "self/status", "VmRSS")


def available_bytes(device: torch.device = _CPU) -> int:
    """Return the bytes that are still available to this process (machine and cgroup limits), or on a GPU."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = _field(_PROC / "meminfo", "MemAvailable") or (installed_memory() or _UNKNOWN) // 2
    for folder, (limit, used) in itertools.product(control_groups("memory"), _LIMITS):
        try:
            taken = int((folder / used).read_text(encoding="utf-8")) - _cached_bytes(folder / "memory.stat")
            free = min(free, max(int((folder / limit).read_text(encoding="utf-8")) - taken, 0))
        except (OSError, ValueError):  # no such group, or no limit
            continue
    return free


def _cached_bytes(path: Path) -> int:
    """Return the bytes of a cgroup's files in the page cache, which the system evicts first."""
    try:
        fields = dict(line.split() for line in path.read_text(encoding="utf-8").splitlines())
        return int(fields.get("total_inactive_file") or fields.get("inactive_file") or 0)
    except (OSError, ValueError):
        return 0


def _field(path: Path, name: str) -> int:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)


def check_budget(
    budget: Budget,
    checkpoint: Checkpoint,
    drafters: Iterable[str],
    num_known: int,
    num_requests: int,
    cache_bytes: int | None = None,
) -> None:
    """Refuse a budget that is too small to load the target, and name one that suffices for everything after it too.

    A larger budget is checked again when all is loaded and the exact sizes are known.

    Args:
        drafters: Folders of models; other names are ignored, because those drafters take little memory.
        num_known: Largest number of tokens of a step that are not guesses.
        num_requests: Largest number of requests at a time.
        cache_bytes: Bytes that the caller gives to the caches, or None for their usual share.

    Raises:
        ValueError: The budget is too small.
    """
    loading = checkpoint.least_bytes()
    sources = checkpoint.shards.sources
    outside = [one for name, one in sources.items() if layer_number(name) is None]
    inside = [one for name, one in sources.items() if layer_number(name) is not None]
    widest = max((size for one in inside for size in one.shape), default=1)
    vocab = max((one.shape[0] for one in outside if len(one.shape) > 1), default=1)
    used = used_bytes(budget.device)
    if used + loading + (cache_bytes or 0) <= budget.num_bytes:
        return
    # A share of it is for guesses.
    larger = used + 2 * loading + (cache_bytes or budget.cache_bytes) - budget.other_bytes
    in_pass = PassCapacity.from_budget(larger, num_known, num_requests, WIDTHS * widest, vocab).num_bytes
    of_drafters = sum(
        file.stat().st_size for name in drafters for file in Path(name).expanduser().glob("*.safetensors")
    )
    budget.refuse(used + loading + of_drafters + in_pass, cache_bytes)

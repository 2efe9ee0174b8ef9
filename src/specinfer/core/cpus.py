"""CPUs of this process: how many it may use, and PyTorch threads that free their cores while they wait."""

import contextlib
import ctypes
import importlib.util
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path

_GROUPS, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def usable_cpus() -> int:
    """Return the number of CPUs that this process may run on, within the CPU time that its control groups grant."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(min([cpus, *(math.ceil(granted) for granted in _granted())]), 1)


def _granted() -> Iterator[float]:
    """Yield the CPU limit of each control group of this process, version 1 or 2; containers may hide outer groups."""
    try:
        lines = _OWN.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        _, controllers, path = f"{line}::".split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = _GROUPS / "cpu" if controllers else _GROUPS
        own = root / path.rstrip(":").lstrip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(root):
                with contextlib.suppress(OSError, ValueError, ZeroDivisionError):  # unreadable, or no limit
                    yield _limit(folder)


def _limit(folder: Path) -> float:
    """Return the limit that one group sets.

    Raises:
        ValueError: It sets none, or one in another form.
    """
    if (file := folder / "cpu.max").exists():
        quota, period = file.read_text(encoding="utf-8").split()
    else:
        quota, period = (
            (folder / f"cpu.cfs_{name}_us").read_text(encoding="utf-8").strip() for name in ("quota", "period")
        )
    granted = int(quota) / int(period)
    if granted <= 0:  # -1: none
        raise ValueError(quota)
    return granted


def load_openmp() -> None:
    """Load PyTorch's OpenMP so that its threads spin for some 0.1 ms after work, then sleep.

    By default they spin for 3 ms, and keep native threads from their cores meanwhile. Nothing happens if PyTorch is
    loaded already, or the environment sets how long they spin.
    """
    found = importlib.util.find_spec("torch")
    if "torch" in sys.modules or found is None or {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        return
    os.environ["GOMP_SPINCOUNT"] = "10000"  # read once, when the library is loaded
    try:
        for folder in map(Path, found.submodule_search_locations or ()):
            for library in (*folder.glob("lib/libgomp*"), *folder.parent.glob("torch.libs/libgomp*")):
                with contextlib.suppress(OSError):
                    ctypes.CDLL(str(library))
    finally:
        del os.environ["GOMP_SPINCOUNT"]

"""How many CPUs this process may use."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

_GROUPS, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def usable_cpus() -> int:
    """CPUs of this process: those it may run on, and no more than its control groups grant the time of."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(min([cpus, *(math.ceil(granted) for granted in _granted())]), 1)


def _granted() -> Iterator[float]:
    """CPUs that each control group limits this process to, of either version; containers may hide outer groups."""
    try:
        lines = _OWN.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = _GROUPS / "cpu" if controllers else _GROUPS
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(root):
                yield from _limit(folder)


def _limit(folder: Path) -> Iterator[float]:
    """The limit that one group sets, if it sets any."""
    try:
        if (file := folder / "cpu.max").exists():
            quota, period = file.read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
    except OSError:
        return
    if quota not in ("max", "-1"):
        yield int(quota) / int(period)

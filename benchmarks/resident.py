"""Resident memory of a process, including the pages of mapped files, as counted by the operating system."""

from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")
_RESET_PEAK = "5"  # sets the peak to the current resident size, see proc(5)


def reset_peak(pid: int) -> bool:
    """Reset the peak to the current size, and return whether the system allows this."""
    try:
        (PROC / str(pid) / "clear_refs").write_text(_RESET_PEAK)
    except OSError:
        return False
    return True


def peak_resident(pid: int) -> int:
    """Return the peak resident bytes since the last reset or the start of the process, or 0 if unknown."""
    return _status(pid, "VmHWM")


def resident(pid: int) -> int:
    """Return the current resident bytes, or 0 if unknown."""
    return _status(pid, "VmRSS")


def children_of(pid: int) -> list[int]:
    """Return the ids of the child processes, sorted, or an empty list if unknown."""
    with suppress(OSError):
        tasks = (PROC / str(pid) / "task").glob("*/children")
        return sorted(int(child) for task in tasks for child in task.read_text().split())
    return []


def _status(pid: int, name: str) -> int:
    with suppress(OSError):
        for line in (PROC / str(pid) / "status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return 1024 * int(line.split()[1])
    return 0

"""What a process holds, as the operating system counts it: its pages in memory, those of mapped files included."""

from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")
_RESET_PEAK = "5"  # of proc(5): the high-water mark becomes what is held now


def reset_peak(pid: int) -> bool:
    """From now on the peak is that of what follows; False if this system does not allow it."""
    try:
        (PROC / str(pid) / "clear_refs").write_text(_RESET_PEAK)
    except OSError:
        return False
    return True


def peak_resident(pid: int) -> int:
    """Most bytes held since the peak was reset, or since the process started; 0 if this system does not tell."""
    return _status(pid, "VmHWM")


def resident(pid: int) -> int:
    """Bytes held now; 0 if this system does not tell."""
    return _status(pid, "VmRSS")


def children_of(pid: int) -> list[int]:
    """Processes that this one has started, by id; none if this system does not tell."""
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

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
    with suppress(OSError):
        for line in (PROC / str(pid) / "status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    return 0

"""Differences between systems: signals, locks, memory, descriptors, C functions, CPUs and their threads."""

import contextlib
import ctypes
import importlib.util
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

STOP_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
_PR_SET_PDEATHSIG = 1
_UNLIMITED = 1 << 20
_MOST = 1 << 16  # more than any server needs; some programs walk through all of them


def stop_signals() -> tuple[int, ...]:
    """Return the signals that stop a server: not those of a closed terminal if they are ignored, as under nohup."""
    hangup = getattr(signal, "SIGHUP", None)
    return tuple(each for each in STOP_SIGNALS if each != hangup or signal.getsignal(each) != signal.SIG_IGN)


def call_c(name: str, *arguments: int) -> None:
    """Call a function of the C library or of another library of this process; do nothing where there is none."""
    if (function := _c_function(name)) is not None:
        function(*map(ctypes.c_ssize_t, arguments))  # addresses do not fit into an int


@cache
def _c_function(name: str) -> Callable[..., object] | None:
    try:
        function: Callable[..., object] = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):  # TypeError: Windows
        return None
    return function


def child_environment() -> dict[str, str]:
    """Return this process's environment for a Python process that uses the package that runs here, wherever it is."""
    home = str(Path(__file__).parents[2])
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH", ""))))}


def die_with_parent() -> None:
    """Let the system kill this process, even a suspended one, when the thread that started it ends. Linux only."""
    if sys.platform == "linux":
        call_c("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL)


def lock_file(handle: int) -> None:
    """Lock an open file, where the system has such locks; raise OSError if another process has locked it."""
    try:
        import fcntl
    except ImportError:
        return
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


class ReturnsMemory:
    """An object whose end returns freed memory to the system. The C library keeps it otherwise.

    The last attribute of an owner ends after its other ones.
    """

    def __del__(self) -> None:
        call_c("malloc_trim", 0)


def installed_memory() -> int | None:
    """Return the bytes of the machine's memory, or None where the system does not report it."""
    if sys.platform == "win32":
        status = (ctypes.c_ulonglong * 8)(64)  # MEMORYSTATUSEX: its size and the load are one number here
        return status[1] if ctypes.windll.kernel32.GlobalMemoryStatusEx(status) else None
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError):
        return None


def peak_memory() -> int:
    """Return the peak resident bytes of this process; 0 where the system does not report it."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def max_descriptors() -> int:
    """Return the largest number of files and sockets that may be open at once."""
    try:
        import resource
    except ImportError:
        return _UNLIMITED
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _UNLIMITED if soft == resource.RLIM_INFINITY else soft


def raise_max_descriptors() -> None:
    """Raise that number as far as the system allows without privileges."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
        if soft != resource.RLIM_INFINITY and soft < most:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


_GROUPS, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def usable_cpus() -> int:
    """Return the number of CPUs that this process may run on, within the CPU time that its control groups grant."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(min([cpus, *(math.ceil(granted) for granted in _granted())]), 1)


def control_groups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control groups, version 1 or 2, that may limit it by a controller.

    The outer groups limit it, too; a container may hide them, and shows its own as the outermost.
    """
    try:
        lines = _OWN.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        _, controllers, path = f"{line}::".split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _GROUPS / controller if controllers else _GROUPS
        group = root / path.rstrip(":").lstrip("/")
        yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(root))


def _granted() -> Iterator[float]:
    """Yield the CPU limit of each control group that has one."""
    for folder in control_groups("cpu"):
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
    torch = importlib.util.find_spec("torch")
    if "torch" in sys.modules or torch is None or {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        return
    os.environ["GOMP_SPINCOUNT"] = "10000"  # read once, when the library is loaded
    try:
        for folder in map(Path, torch.submodule_search_locations or ()):
            for library in (*folder.glob("lib/libgomp*"), *folder.parent.glob("torch.libs/libgomp*")):
                with contextlib.suppress(OSError):
                    ctypes.CDLL(str(library))
    finally:
        del os.environ["GOMP_SPINCOUNT"]

"""Cap on the memory of a process, page cache included, to simulate a machine with less memory.

A cap is a command that goes before the process's own. Control groups count the file pages that their processes read,
so a mapped model counts even though it is page cache. A limit on address space is no substitute: an engine that maps a
file needs address space for all of it, whether or not its pages are in memory.
"""

import os
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
SYSTEMD_MARK = Path("/run/systemd/system")  # exists where systemd runs
_ENTER = ("sh", "-c", 'echo $$ > "$0" && exec "$@"')  # followed by the group's file and the command
_NAME = "specinfer-bench-"


@dataclass(frozen=True, slots=True)
class MemoryCap:
    """Memory cap for one process and its children.

    Attributes:
        method: "cgroup v1", "cgroup v2", "systemd scope", or "none" if this machine offers no way.
        limit: Limit in bytes, or 0 for no limit.
        command: Words that go before the process's own command.
        folder: The control group made for the process, which `close` removes.
    """

    method: str = "none"
    limit: int = 0
    command: tuple[str, ...] = ()
    folder: Path | None = None

    def close(self) -> None:
        """Remove the group once the process has ended."""
        if self.folder is not None:
            with suppress(OSError):  # already removed, or a child of the process is still alive
                self.folder.rmdir()


def cap_memory(limit: int) -> MemoryCap:
    """Return a new cap of `limit` bytes, made in the first way that this machine allows.

    Groups are made below the group of this process, so that its limits apply to them too.
    """
    for path, version in _own_groups():
        if (made := _make_group(path, version, limit)) is not None:
            return made
    if SYSTEMD_MARK.is_dir() and shutil.which("systemd-run"):
        user = () if os.geteuid() == 0 else ("--user",)
        limits = ("-p", f"MemoryMax={limit}", "-p", "MemorySwapMax=0")
        return MemoryCap("systemd scope", limit, ("systemd-run", *user, "--scope", "--quiet", *limits, "--"))
    return MemoryCap()


def _own_groups() -> list[tuple[Path, int]]:
    """Return the folders of this process's groups that may count memory, each with its cgroup version."""
    try:
        lines = OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if "memory" in controllers.split(","):
            found.append((CGROUP_ROOT / "memory" / name.lstrip("/"), 1))
        elif not controllers:
            found.append((CGROUP_ROOT / name.lstrip("/"), 2))
    return found


def _make_group(parent: Path, version: int, limit: int) -> MemoryCap | None:
    """Make a group with a limit, or return None if groups cannot be made there or do not count memory."""
    limits, swap = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
    if version == 2:
        limits, swap = ("memory.max", "memory.swap.max")
    try:
        folder = Path(tempfile.mkdtemp(prefix=_NAME, dir=parent))
    except OSError:
        return None
    try:
        _set(folder / limits, limit)
    except OSError:
        folder.rmdir()
        return None
    with suppress(OSError):  # kernels that do not count swap have no such file
        _set(folder / swap, 0 if version == 2 else limit)
    return MemoryCap(f"cgroup v{version}", limit, (*_ENTER, str(folder / "cgroup.procs")), folder)


def _set(file: Path, value: int) -> None:
    """Write a value to an existing file. It must not be created: it is missing if the controller is not active."""
    with open(os.open(file, os.O_WRONLY), "w") as opened:
        opened.write(str(value))

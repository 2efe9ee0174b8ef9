"""A cap on what a process may hold, page cache included: what a machine with less memory would give it.

A cap is a command that goes before the process's own. Control groups count the pages of files that their processes
read, so a model that is mapped does not fit by being called cache. A limit on address space is no substitute: engines
that map a file need as much address space as it has bytes, and hold none of it for sure.
"""

import os
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
SYSTEMD_MARK = Path("/run/systemd/system")  # is there where systemd runs
_ENTER = ("sh", "-c", 'echo $$ > "$0" && exec "$@"')  # then the group's file and the command
_NAME = "specinfer-bench-"


@dataclass(frozen=True, slots=True)
class MemoryCap:
    """A cap for one process and its children.

    Attributes:
        method: "cgroup v1", "cgroup v2", "systemd scope", or "none" if there is no way to it here.
        limit: Bytes; 0 if there is none.
        command: What the process is started with, before its own command.
        folder: The group made for it, which `close` removes.
    """

    method: str = "none"
    limit: int = 0
    command: tuple[str, ...] = ()
    folder: Path | None = None

    def close(self) -> None:
        """Gives the group back, once the process has ended."""
        if self.folder is not None:
            with suppress(OSError):  # gone already, or a child of the process lives on
                self.folder.rmdir()


def cap_memory(limit: int) -> MemoryCap:
    """A fresh cap of `limit` bytes, by the first way that this machine allows.

    Groups are made below the one this process is in, so that what limits it limits them too.
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
    """Folders of the groups that this process is in and that may count memory, with the version of their kind."""
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
    """None if groups cannot be made there, or do not count memory."""
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
    """Never makes the file: where a controller is not at work it is not there."""
    with open(os.open(file, os.O_WRONLY), "w") as opened:
        opened.write(str(value))

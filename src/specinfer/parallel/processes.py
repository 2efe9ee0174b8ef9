"""Ranks that this process starts on its machine: plain processes that read their job from standard input.

They import nothing of the user's, so a script needs no `if __name__ == "__main__"`.
"""

import os
import subprocess
import sys
from collections.abc import Sequence

import torch

from specinfer.core.systems import child_environment, usable_cpus

_THREADS = "OMP_NUM_THREADS"


def threads_each(num_processes: int) -> int:
    """Return the number of threads for each of this many processes on this machine."""
    return max(usable_cpus() // num_processes, 1)


def share_cores(num_processes: int) -> int | None:
    """Limit this process, too, to its share of the machine's cores, unless the user has set the number of threads.

    Returns:
        The previous number of threads, or None if it was not changed.
    """
    before = torch.get_num_threads()
    if _THREADS in os.environ or before <= threads_each(num_processes):
        return None
    torch.set_num_threads(threads_each(num_processes))
    return before


class Processes:
    """Child processes of the thread that makes them, which has to outlive them.

    Args:
        module: Module to run as `python -m`.
        jobs: Jobs of the processes, each one line on its process's standard input.
        num_local: Total number of processes on this machine, which share its cores.
    """

    def __init__(self, module: str, jobs: Sequence[str], num_local: int) -> None:
        environment = {_THREADS: str(threads_each(num_local))} | child_environment()
        self._children: list[subprocess.Popen[bytes]] = []
        try:
            for job in jobs:
                command = [sys.executable, "-P", "-m", module]  # nothing from the current folder
                child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment)
                self._children.append(child)
                assert child.stdin is not None
                with child.stdin:
                    child.stdin.write(job.encode() + b"\n")
        except BaseException:
            self.kill()
            raise

    @property
    def ids(self) -> list[int]:
        return [child.pid for child in self._children]

    def ended(self) -> int | None:
        """Return the index of a process that has ended, or None. A killed one comes first: others end after it."""
        codes = [(code, i) for i, child in enumerate(self._children) if (code := child.poll()) is not None]
        return min(codes)[1] if codes else None

    def code(self, number: int) -> int | None:
        return self._children[number].poll()

    def wait(self, seconds: float) -> bool:
        """Return whether each process ends within this many seconds of waiting for it."""
        try:
            for child in self._children:
                child.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        for child in self._children:
            if child.poll() is None:
                child.kill()
        for child in self._children:
            child.wait()

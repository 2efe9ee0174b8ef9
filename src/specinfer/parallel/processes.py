"""Ranks of this machine that this process starts: plain processes that read what they are to do from their input.

They import nothing of the user's: a script needs no `if __name__ == "__main__"`.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from specinfer.cpus import usable_cpus

_THREADS = "OMP_NUM_THREADS"


def threads_each(num_processes: int) -> int:
    """Threads that each of so many processes of this machine computes with."""
    return max(usable_cpus() // num_processes, 1)


def share_cores(num_processes: int) -> int | None:
    """Lets this process, too, compute with its part of the machine's cores, unless the user has said how many.

    Returns:
        With how many threads it computed before; None: it computes with as many now.
    """
    before = torch.get_num_threads()
    if _THREADS in os.environ or before <= threads_each(num_processes):
        return None
    torch.set_num_threads(threads_each(num_processes))
    return before


class Processes:
    """Children of the thread that makes them, which has to outlive them.

    Args:
        module: Run as `python -m`; it gets one line, a job, on its standard input.
        num_local: Processes of this machine in all, which share its cores.
    """

    def __init__(self, module: str, jobs: Sequence[str], num_local: int) -> None:
        environment = dict(os.environ)
        environment.setdefault(_THREADS, str(threads_each(num_local)))
        # The package that runs here, wherever it was found; and nothing from the current folder.
        home = str(Path(__file__).parents[2])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (home, environment.get("PYTHONPATH", ""))))
        self._children: list[subprocess.Popen[bytes]] = []
        try:
            for job in jobs:
                command = [sys.executable, "-P", "-m", module]
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
        """Which of them, by number, has ended; None: none. One that was killed goes first: others end because of it."""
        codes = [(code, i) for i, child in enumerate(self._children) if (code := child.poll()) is not None]
        return min(codes)[1] if codes else None

    def code(self, number: int) -> int | None:
        return self._children[number].poll()

    def wait(self, seconds: float) -> bool:
        """Whether all end in this time."""
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

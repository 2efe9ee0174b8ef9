"""Other processes that keep cores busy during a measurement."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# The program checks from time to time that its parent is alive: a parent that was killed cannot end it.
_PROGRAM = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""


@contextmanager
def busy_neighbours(number: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run `number` processes that only compute, each on one core as far as there are cores."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(number):
            processes.append(subprocess.Popen([sys.executable, "-S", "-c", _PROGRAM]))
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()

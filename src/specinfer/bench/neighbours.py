"""Other processes that keep cores busy while something is measured."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Looks now and then whether who started it is still there: killed, that one cannot end it.
_PROGRAM = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""


@contextmanager
def busy_neighbours(number: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """So many processes that do nothing but compute, on one core each as far as there are cores."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(number):
            processes.append(subprocess.Popen([sys.executable, "-S", "-c", _PROGRAM]))
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()

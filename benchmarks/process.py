"""Processes of a measurement: workers that answer messages, busy neighbours, and memory as the system counts it.

A worker is sent JSON lines, and killed if it does not reply in time. `benchmarks.worker` is its program.
"""

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from specinfer.bench.serve_process import last_line

CHECKOUT = Path(__file__).resolve().parent.parent
_GOODBYE = 5.0  # seconds that the process has to exit after its input is closed
_PROC = Path("/proc")
_RESET_PEAK = "5"  # sets the peak to the current resident size, see proc(5)
# A busy process checks from time to time that its parent is alive: a parent that was killed cannot end it.
_BUSY = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""


class WorkerError(Exception):
    """The reason that a worker cannot go on. What it measures is left out, or the whole run fails."""


def environment(num_threads: int) -> dict[str, str]:
    """Return the environment of a process that imports this folder."""
    path = os.pathsep.join(filter(None, (str(CHECKOUT), os.environ.get("PYTHONPATH"))))
    return os.environ | {"OMP_NUM_THREADS": str(num_threads), "PYTHONPATH": path}


class Worker:
    """A worker process, started by the constructor.

    Args:
        module: Module that the worker runs, with `create`.
    """

    def __init__(self, module: str, num_threads: int) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed when the process ends)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker", module, str(num_threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment(num_threads),
            bufsize=0,
        )
        self._unread = b""

    def ask(self, message: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Send a message and return the reply.

        Raises:
            WorkerError: The process replied with an error, ended, or did not reply in time and was killed.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise WorkerError(self._end()) from error
        line = self._line(timeout)
        try:
            reply: dict[str, Any] = json.loads(line)
        except ValueError as error:
            raise WorkerError(f"its answer is no message: {line[:80]!r}") from error
        if "error" in reply:
            raise WorkerError(reply["error"])
        return reply

    def close(self) -> None:
        """Close the process's input, and kill the process if it does not exit in time."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(_GOODBYE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def _line(self, timeout: float) -> bytes:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout
        while b"\n" not in self._unread:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self._process.stdout], [], [], left)[0]:
                self._process.kill()
                raise WorkerError(f"no answer within {timeout:g} s")
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            if not piece:
                raise WorkerError(self._end())
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _end(self) -> str:
        """Wait for the process to end, and return a message with its status and its last line on standard error."""
        status = self._process.wait()
        last = last_line(self._errors)
        return f"its process ended with status {status}" + (f": {last}" if last else "")


@contextmanager
def busy_neighbours(number: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run `number` processes that only compute, each on one core as far as there are cores."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(number):
            processes.append(subprocess.Popen([sys.executable, "-S", "-c", _BUSY]))
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def reset_peak(pid: int) -> bool:
    """Reset the peak of a process's memory to the current size, and return whether the system allows this."""
    try:
        (_PROC / str(pid) / "clear_refs").write_text(_RESET_PEAK)
    except OSError:
        return False
    return True


def peak_resident(pid: int) -> int:
    """Return the peak resident bytes, mapped files included, since the last reset or the start; 0 if unknown."""
    with suppress(OSError):
        for line in (_PROC / str(pid) / "status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    return 0

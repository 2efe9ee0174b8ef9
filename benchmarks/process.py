"""Our side of a worker process: it sends messages, waits for replies, and kills the process after a timeout."""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.memory_cap import MemoryCap

CHECKOUT = Path(__file__).resolve().parent.parent
_GOODBYE = 5.0  # seconds that the process has to exit after its input is closed


class WorkerError(Exception):
    """The reason that a worker cannot go on. What it measures is left out, or the whole run fails."""


def environment(num_threads: int) -> dict[str, str]:
    """Return the environment of a process that imports this folder."""
    path = os.pathsep.join(filter(None, (str(CHECKOUT), os.environ.get("PYTHONPATH"))))
    return os.environ | {"OMP_NUM_THREADS": str(num_threads), "PYTHONPATH": path}


class Worker:
    """A worker process, started by the constructor.

    Args:
        module: Module that the worker runs, with `create` and `answer`.
        cap: Limit of its memory, released when the process has ended, or None for no limit.
        command: Command that precedes the worker's own, for instance to enter a network namespace.
    """

    def __init__(
        self, module: str, num_threads: int, cap: MemoryCap | None = None, command: tuple[str, ...] = ()
    ) -> None:
        self.cap = cap or MemoryCap()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed when the process ends)
        self._process = subprocess.Popen(
            [*self.cap.command, *command, sys.executable, "-m", "benchmarks.worker", module, str(num_threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment(num_threads),
            bufsize=0,
        )
        self._unread = b""

    @property
    def pid(self) -> int:
        """Process id of the worker. A command of the cap replaces itself with the worker and keeps the id."""
        return self._process.pid

    @property
    def met_its_cap(self) -> bool:
        """True if the operating system killed the process for exceeding its memory cap."""
        return bool(self.cap.limit) and self._process.returncode == -signal.SIGKILL

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
        self.cap.close()

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
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        killed = f", limited to {self.cap.limit / 2**20:,.0f} MiB" if self.met_its_cap else ""
        return f"its process ended with status {status}{killed}" + (f": {last}" if last else "")

"""A peer's process as seen from ours: it is asked, and killed if it does not answer."""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

from specinfer.bench.memory_cap import MemoryCap
from specinfer.bench.peers.names import PeerError

_GOODBYE = 5.0  # seconds to end in when its input ends


class PeerProcess:
    """One worker, started at once.

    Args:
        module: Where its adapter is.
        cap: Of its memory; given back when the process has ended. None: no cap.
        command: What it is started with, before its own command, such as where it is to run.
    """

    def __init__(
        self, module: str, num_threads: int, cap: MemoryCap | None = None, command: tuple[str, ...] = ()
    ) -> None:
        self.cap = cap or MemoryCap()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed when the process ends)
        self._process = subprocess.Popen(
            [
                *self.cap.command,
                *command,
                sys.executable,
                "-m",
                "specinfer.bench.peers.worker",
                module,
                str(num_threads),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=os.environ | {"OMP_NUM_THREADS": str(num_threads)},
            bufsize=0,
        )
        self._unread = b""

    @property
    def pid(self) -> int:
        """The worker's own: what a cap puts before it becomes it."""
        return self._process.pid

    @property
    def met_its_cap(self) -> bool:
        """Whether the system ended it, as it does with what needs more than its cap allows."""
        return bool(self.cap.limit) and self._process.returncode == -signal.SIGKILL

    def ask(self, message: dict[str, Any], timeout: float) -> dict[str, Any]:
        """The answer to a message.

        Raises:
            PeerError: It answered with an error, ended, or did not answer in time and was killed.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise PeerError(self._end()) from error
        line = self._line(timeout)
        try:
            reply: dict[str, Any] = json.loads(line)
        except ValueError as error:
            raise PeerError(f"it answered what is no message: {line[:80]!r}") from error
        if "error" in reply:
            raise PeerError(reply["error"])
        return reply

    def close(self) -> None:
        """Lets it end, or kills it."""
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
                raise PeerError(f"no answer within {timeout:g} s")
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            if not piece:
                raise PeerError(self._end())
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _end(self) -> str:
        """How it ended, and the last thing it said."""
        status = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        killed = f", held to {self.cap.limit / 2**20:,.0f} MiB" if self.met_its_cap else ""
        return f"its process ended with status {status}{killed}" + (f": {last}" if last else "")

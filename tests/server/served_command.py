"""The command `specinfer serve` in a process of its own, as operators start it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from worlds import await_that, children_of, free_port

HOME = str(Path(__file__).parents[2] / "src")
PATIENCE = 300.0  # seconds for what takes a few where nothing else runs
_ONE_REQUEST = httpx.Limits(max_keepalive_connections=0)  # per connection: those to a dead engine are of no use


def group_of(leader: int) -> list[int]:
    """The living processes of a group."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, group = path.read_text().rpartition(")")[2].split()[:3]
            if int(group) == leader and state != "Z":
                found.append(int(path.parent.name))
    return found


def status_of(client: httpx.Client, path: str = "/health/ready") -> int:
    """The status of an answer; 0 if there is none."""
    with suppress(httpx.TransportError):
        return client.get(path).status_code
    return 0


class ServedCommand:
    """A server that was started, and a client of it; its process leads a group.

    Args:
        words: The model and further words of the command.
        log: A file for what it writes to standard error.
        environment: Changes of the environment.
        given: Further arguments of `Popen`.
    """

    def __init__(
        self, *words: str, port: int = 0, scheme: str = "http", log: Path | None = None,
        environment: Mapping[str, str] | None = None, **given: Any,
    ) -> None:  # fmt: skip
        self.port, self.log = port or free_port(), log
        self.url = f"{scheme}://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "specinfer", "serve", *words, "--port", str(self.port)]
        given = {"env": os.environ | {"PYTHONPATH": HOME} | dict(environment or {}), "start_new_session": True} | given
        if log is None:
            self.process = subprocess.Popen(command, **given)
        else:
            with log.open("w") as file:
                self.process = subprocess.Popen(command, stderr=file, **given)
        self.client = httpx.Client(base_url=self.url, timeout=PATIENCE, verify=False, limits=_ONE_REQUEST)

    @property
    def engine(self) -> int:
        """The process of the engine, behind its parent."""
        (child,) = children_of(self.process.pid)
        return child

    def is_up(self) -> bool:
        return status_of(self.client) == 200

    def wait(self, holds: Callable[[], bool], seconds: float = PATIENCE) -> float:
        """The seconds until something is so."""
        begun = time.monotonic()
        while not holds():
            is_late = time.monotonic() - begun > seconds
            if is_late or self.process.poll() is not None:
                raise AssertionError(self.log.read_text()[-3000:] if self.log else "the server ended, or is late")
            time.sleep(0.02)
        return time.monotonic() - begun

    def stop(self) -> None:
        """End it, which must work and leave nothing behind."""
        self.process.terminate()
        assert self.process.wait(60) == 0
        await_that(lambda: not group_of(self.process.pid), 5)

    def close(self) -> None:
        """Kill what is left of it."""
        self.client.close()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def serving(*words: str, is_ready: bool = True, **given: Any) -> Iterator[ServedCommand]:
    """A server that is ready, or at least answers; it is ended by SIGTERM."""
    server = ServedCommand(*words, **given)
    try:
        server.wait(server.is_up if is_ready else lambda: status_of(server.client) != 0)
        yield server
        server.stop()
    finally:
        server.close()

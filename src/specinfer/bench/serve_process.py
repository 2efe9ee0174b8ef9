"""A SpecInfer server in its own process for the duration of a measurement."""

import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

from specinfer.client import KEY_VARIABLE

_START_SECONDS = 600.0  # models may be large
_STOP_SECONDS = 30.0
_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """URL of a server, and the API key that it requires."""

    url: str
    api_key: str | None


@contextmanager
def running_server(model: str, flags: Sequence[str]) -> Iterator[ServerAddress]:
    """Run `specinfer serve` with this model, and yield its address when it is ready. It stops at the end of the block.

    Raises:
        RuntimeError: The server ended, or was not ready in time. The message has the last line of its log.
    """
    port, key = free_port(), secrets.token_hex(16)
    address = ServerAddress(f"http://127.0.0.1:{port}", key)
    command = [sys.executable, "-m", "specinfer", "serve", model, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--no-page", *flags]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=_environment(key)
        )
        try:
            wait_until(lambda: _is_ready(address), process, log)
            yield address
        finally:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _environment(key: str) -> dict[str, str]:
    """Return this process's environment with the key, which other users could read on a command line."""
    return os.environ | {KEY_VARIABLE: key}


def _is_ready(address: ServerAddress) -> bool:
    import httpx

    try:
        return httpx.get(f"{address.url}/health/ready", timeout=5.0, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def wait_until(is_ready: Callable[[], bool], process: "subprocess.Popen[bytes]", log: IO[bytes]) -> None:
    """Wait until a server is ready.

    Raises:
        RuntimeError: The server ended, or was not ready in time. The message has the last line of its log.
    """
    deadline = time.monotonic() + _START_SECONDS
    while not is_ready():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the server did not start: {last_line(log)[:300] or 'its log is empty'}")
        time.sleep(_POLL_SECONDS)


def last_line(log: IO[bytes]) -> str:
    """Return the last line of a log that is not blank."""
    log.seek(0)
    lines = log.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port

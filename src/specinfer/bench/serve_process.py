"""A server of this package for the length of a measurement, in a process of its own."""

import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

from specinfer.client import KEY_VARIABLE

_START_SECONDS = 600.0  # models may be large
_STOP_SECONDS = 30.0
_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a server listens, and the key it wants."""

    url: str
    api_key: str | None


@contextmanager
def running_server(model: str, flags: Sequence[str]) -> Iterator[ServerAddress]:
    """`specinfer serve` with this model, ready for requests; it ends with the block.

    Raises:
        RuntimeError: It ended, or was not ready in time; the message has its last words.
    """
    port, key = _free_port(), secrets.token_hex(16)
    address = ServerAddress(f"http://127.0.0.1:{port}", key)
    command = [sys.executable, "-m", "specinfer", "serve", model, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--no-page", *flags]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=_environment(key)
        )
        try:
            deadline = time.monotonic() + _START_SECONDS
            while not _is_ready(address):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the server did not start: {_last_words(log)}")
                time.sleep(_POLL_SECONDS)
            yield address
        finally:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _environment(key: str) -> dict[str, str]:
    """This one's, with the key: on the command line others could read it."""
    return os.environ | {KEY_VARIABLE: key}


def _is_ready(address: ServerAddress) -> bool:
    import httpx

    try:
        return httpx.get(f"{address.url}/health/ready", timeout=5.0, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def _last_words(log: IO[bytes]) -> str:
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "it said nothing"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port

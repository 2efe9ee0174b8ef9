"""The command `specinfer serve demo` in a process of its own, and what its clients share."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

Body = dict[str, Any]
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


@contextmanager
def serving(*options: str, port: int, scheme: str = "http", **given: Any) -> Iterator[subprocess.Popen[bytes]]:
    """`specinfer serve demo` in a process of its own, ready; ended by SIGTERM, which must work."""
    command = [sys.executable, "-m", "specinfer", "serve", "demo", "--port", str(port), *options]
    process = subprocess.Popen(command, **given)
    try:
        for _ in range(600):
            with suppress(httpx.TransportError):
                if httpx.get(f"{scheme}://127.0.0.1:{port}/health/ready", verify=False).status_code == 200:
                    break
            assert process.poll() is None, "the server ended"
            time.sleep(0.1)
        yield process
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


def engine_of(process: subprocess.Popen[bytes]) -> int:
    """The process of the engine, behind its parent."""
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())


async def events_of(response: httpx.Response) -> AsyncIterator[Body]:
    """The events of a stream that must end with [DONE] and without an error."""
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            yield event
    raise AssertionError("a stream ended without [DONE]")

"""A crowd of clients that keep a server waiting in every way, more of them than it has descriptors.

    PYTHONPATH=tests/support python -m tests.server.pressure crowd --minutes 2 --tls

starts `specinfer serve demo` with 256 descriptors and reports how long /health took, what the log got, and what is left
afterwards.
"""

import asyncio
import os
import random
import resource
import ssl
import subprocess
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from hostile import TEXT
from tests.server.served_command import serving

DESCRIPTORS = 256
_EACH = 60  # connections of each kind
_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
_LARGE = b"GET /openapi.json HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 4
Arm = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass(slots=True)
class Report:
    """What came of it."""

    quiet_seconds: list[float] = field(default_factory=list)  # of /health, before the crowd
    health_seconds: list[float] = field(default_factory=list)
    num_connections: int = 0  # that the crowd opened
    num_lines: int = 0  # of the log
    num_files: tuple[int, int] = (0, 0)  # of the server, before and after
    answer_seconds: float = 0.0  # to a request afterwards

    @property
    def is_sound(self) -> bool:
        return max(self.health_seconds) < 1

    def lines(self) -> list[str]:
        """The report in words."""
        times = sorted(self.health_seconds)
        return [
            f"{self.num_connections} connections; /health {len(times)} times: median {times[len(times) // 2]:.3f} s, ",
            f"longest {times[-1]:.3f} s; {self.num_lines} lines in the log; files before and after {self.num_files};",
            f"a request afterwards took {self.answer_seconds:.3f} s",
        ]


async def _idle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


async def _slow_head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await _drip(reader, writer, b"GET /health HTTP/1.1\r\nX-A: ")


async def _slow_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await _drip(reader, writer, _HEAD + b"Content-Length: 5000\r\n\r\n")


async def _drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, first: bytes) -> None:
    writer.write(first)
    while not reader.at_eof():
        await writer.drain()
        await asyncio.sleep(0.2)
        writer.write(b"a")


async def _slow_reader(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(_LARGE)
    while not reader.at_eof():
        await writer.drain()
        await reader.read(1)
        await asyncio.sleep(0.2)


async def _press(port: int, arm: Arm, context: ssl.SSLContext | None, own: str, report: Report) -> None:
    """One client, at an address of its own, that connects again whenever it is disconnected."""
    await asyncio.sleep(random.random())
    while True:
        with suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, ssl=context, limit=2**12, local_addr=(own, 0)
            )
            report.num_connections += 1
            try:
                await arm(reader, writer)
            finally:
                writer.transport.abort()
        await asyncio.sleep(1.0)


async def _crowd(port: int, seconds: float, report: Report, *, tls: bool) -> None:
    context = _untrusting() if tls else None
    arms: list[tuple[Arm, ssl.SSLContext | None]] = [
        (arm, context) for arm in (_idle, _slow_head, _slow_body, _slow_reader)
    ]
    arms.append((_idle, None))  # with TLS, a handshake that never begins
    tasks = [
        asyncio.create_task(_press(port, *arm, f"127.0.{i}.{j + 1}", report))
        for i, arm in enumerate(arms, 1)
        for j in range(_EACH)
    ]
    await asyncio.sleep(1.0)
    await asyncio.to_thread(_probe, port, seconds, report.health_seconds, tls=tls)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0.1)  # transports close


def _untrusting() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _probe(port: int, seconds: float, times: list[float], *, tls: bool) -> None:
    """A new connection ten times a second that asks for /health."""
    verify, url, end = _untrusting(), f"http{'s' * tls}://127.0.0.1:{port}/health", time.monotonic() + seconds
    while time.monotonic() < end:
        start = time.monotonic()
        assert httpx.get(url, verify=verify, timeout=10).status_code == 200
        times.append(time.monotonic() - start)
        time.sleep(0.1)


def _limit_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))


def press(seconds: float, port: int, *, tls: bool) -> Report:
    """All of it: the certificate, the server, the crowd, and a request afterwards."""
    report = Report()
    options = ["--no-access-log", "--no-log-stats", "--body-timeout", "5", "--keep-alive-timeout", "5"]
    with TemporaryDirectory() as name:
        folder = Path(name)
        if tls:
            key, certificate = str(folder / "key.pem"), str(folder / "certificate.pem")
            words = ("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")
            words = (*words, "-nodes", "-days", "1", "-subj", "/CN=localhost")
            subprocess.run([*words, "-keyout", key, "-out", certificate], check=True, capture_output=True)
            options += ["--ssl-certfile", certificate, "--ssl-keyfile", key]
        log, scheme = folder / "log", f"http{'s' * tls}"
        with (
            serving("demo", *options, port=port, scheme=scheme, log=log, preexec_fn=_limit_descriptors) as server,
        ):
            files, num_lines = f"/proc/{server.engine}/fd", len(log.read_text().splitlines())
            before = len(os.listdir(files))
            httpx.get(f"{server.url}/openapi.json", verify=_untrusting())  # made at the first request
            _probe(port, 1.0, report.quiet_seconds, tls=tls)
            asyncio.run(_crowd(port, seconds, report, tls=tls))
            start = time.monotonic()
            asked = {"prompt": "def f", "max_tokens": 4}
            answer = httpx.post(f"{server.url}{TEXT}", json=asked, verify=_untrusting())
            assert answer.status_code == 200, answer.text
            report.answer_seconds = time.monotonic() - start
            end = time.monotonic() + 10
            while len(os.listdir(files)) > before + 4 and time.monotonic() < end:
                time.sleep(0.05)
            report.num_files = before, len(os.listdir(files))
            report.num_lines = len(log.read_text().splitlines()) - num_lines
    return report

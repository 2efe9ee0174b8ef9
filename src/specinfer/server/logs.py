"""The server's log: lines with the id of their request, and statistics of speed every few seconds.

The wording of the statistics is vLLM's, so that tools that parse its log can parse this one.
"""

import asyncio
import contextlib
import logging
import os
import re
import sys
import time
from functools import partial
from typing import TextIO

from specinfer.async_llm import AsyncLLM
from specinfer.core.progress import gigabytes
from specinfer.engine.tally import Tally, Totals
from specinfer.server.background import BackgroundWriter
from specinfer.server.json_lines import JSONLine
from specinfer.server.middleware import REQUEST_ID

logger = logging.getLogger(__name__)
_MAX_LINES = 10_000  # that wait to be written
_FLUSH_SECONDS = 1.0
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def configure(level: str, log_format: str = "text") -> None:
    """Send all log lines to standard error; from other libraries only warnings and above.

    Args:
        log_format: "text", or "json" for an object a line.
    """
    handler = BackgroundHandler(sys.stderr)
    line = _OneLine("%(levelname)s %(asctime)s %(name)s%(request)s: %(message)s")
    handler.setFormatter(JSONLine() if log_format == "json" else line)
    handler.addFilter(_add_request)
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(level=max(number, logging.WARNING), handlers=[handler], force=True)
    logging.getLogger("specinfer").setLevel(number)
    logging.captureWarnings(True)


def flush() -> None:
    """Wait until all lines are written, as far as somebody reads them."""
    for handler in logging.getLogger().handlers:
        handler.flush()


class BackgroundHandler(logging.Handler):
    """A log handler with a thread of its own, so that nobody waits for a terminal or a pipe that is not read.

    Lines are dropped while too many wait, and counted; the number is written as soon as lines can be written again.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream, self._writer = stream, BackgroundWriter("specinfer-log", _MAX_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record) + "\n"
        except Exception:
            self.handleError(record)
        else:
            self._writer.put(partial(self._write_line, line))

    def flush(self) -> None:
        """Wait until all lines are written, but only as long as the stream takes some."""
        self._writer.flush(_FLUSH_SECONDS)

    def _write_line(self, line: str) -> None:
        if self._writer.num_dropped:
            num_dropped, self._writer.num_dropped = self._writer.num_dropped, 0
            about = "%d lines were dropped: the log was not read"
            record = logger.makeRecord(logger.name, logging.WARNING, __file__, 0, about, (num_dropped,), None)
            self.filter(record)  # which adds what the format needs
            line += self.format(record) + "\n"
        with contextlib.suppress(OSError, ValueError):  # the stream was closed
            self._write(line)

    def _write(self, text: str) -> None:
        try:
            number = self._stream.fileno()
        except OSError:  # not a file, as in tests
            self._stream.write(text)
            return
        # Past Python's buffer, whose lock a blocked write would hold while the process wants to end.
        data = text.encode(errors="backslashreplace")
        while data:
            data = data[os.write(number, data) :]


class _OneLine(logging.Formatter):
    """A format with escaped control characters: text of a client cannot look like a log line of the server."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # overrides logging's name
        return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", super().formatMessage(record))


def _add_request(record: logging.LogRecord) -> bool:
    request_id = REQUEST_ID.get()
    record.request_id, record.request = request_id, f" [{request_id}]" if request_id else ""
    return True


class StatsLog:
    """A log of statistics for every interval in which there were tokens or requests."""

    def __init__(self, engine: AsyncLLM, tally: Tally, seconds: float) -> None:
        self._engine, self._tally, self._seconds = engine, tally, seconds
        self._before, self._since = tally.copy(), time.monotonic()
        self._stream = engine.llm.target.loaded.stream
        self._read = (0, 0.0) if self._stream is None else (self._stream.bytes_read, self._stream.seconds_waiting)

    async def run(self) -> None:
        """Log until cancelled."""
        while True:
            await asyncio.sleep(self._seconds)
            for line in self.lines():
                logger.info("%s", line)

    def lines(self) -> list[str]:
        """Return lines about the time since the last call; none if nothing happened."""
        now, totals = time.monotonic(), self._tally.copy()
        spent, seconds = totals.since(self._before), max(now - self._since, 1e-9)
        self._before, self._since = totals, now
        num_running, num_waiting = self._engine.num_running, self._engine.num_waiting
        if not (spent.num_generated_tokens or spent.num_prompt_tokens or num_running or num_waiting):
            return []
        used = self._engine.llm.target.cache.usage
        lines = [
            f"Avg prompt throughput: {(spent.num_prompt_tokens - spent.num_cached_tokens) / seconds:.1f} tokens/s, "
            f"Avg generation throughput: {spent.num_generated_tokens / seconds:.1f} tokens/s, "
            f"Running: {num_running} reqs, Waiting: {num_waiting} reqs, KV cache usage: {used:.1%}, "
            f"Prefix cache hit rate: {spent.num_cached_tokens / max(spent.num_begun_tokens, 1):.1%}"
        ]
        reading = self._engine.reading()
        if reading:
            done = sum(request.num_prompt_computed for request in reading)
            total = sum(len(request.prompt_ids) for request in reading)
            progress = f"{done}/{total} tokens ({done / total:.1%})"
            lines.append(f"Prompt processing progress: {progress}, {len(reading)} reqs")
        if spent.num_drafts:
            lines.append(_speculation_line(spent, seconds))
        if self._stream is not None:
            num_bytes, waited = self._stream.bytes_read - self._read[0], self._stream.seconds_waiting - self._read[1]
            self._read = self._stream.bytes_read, self._stream.seconds_waiting
            read = gigabytes(num_bytes, seconds)
            lines.append(f"Streamed weights: read {read}, passes waited {waited / seconds:.0%} of the time")
        return lines


def _speculation_line(spent: Totals, seconds: float) -> str:
    deepest = max((place for place, count in enumerate(spent.accepted_at) if count), default=-1)
    rates = ", ".join(f"{count / spent.num_drafts:.3f}" for count in spent.accepted_at[: deepest + 1])
    return (
        f"SpecDecoding metrics: Mean acceptance length: {1 + spent.num_accepted_tokens / spent.num_drafts:.2f}, "
        f"Accepted throughput: {spent.num_accepted_tokens / seconds:.2f} tokens/s, "
        f"Drafted throughput: {spent.num_draft_tokens / seconds:.2f} tokens/s, "
        f"Accepted: {spent.num_accepted_tokens} tokens, Drafted: {spent.num_draft_tokens} tokens, "
        f"Per-position acceptance rate: {rates}, "
        f"Avg Draft acceptance rate: {spent.num_accepted_tokens / spent.num_draft_tokens:.1%}"
    )

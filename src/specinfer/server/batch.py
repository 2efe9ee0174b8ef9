"""A file of requests, served in OpenAI's batch format: one JSON object per line, for input and output.

A wrong line becomes an output line with an error; it never ends the run. Requests run concurrently. Output lines are
written in the order of the input, each as a whole, so that an interrupted run can be resumed.
"""

import asyncio
import json
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, TypeAlias

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_LOOKAHEAD = 4  # times the concurrency: lines that are started or done and wait for an earlier one to be written

Body: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request, or the error of its line."""

    custom_id: str | None
    url: str = ""
    body: Body | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class BatchResponse:
    """The server's answer to one request."""

    status: int
    request_id: str
    body: Any


@dataclass(slots=True)
class BatchCounts:
    """The numbers of requests that a run served, failed and skipped."""

    num_served: int = 0
    num_failed: int = 0
    num_skipped: int = 0


class ServerGoneError(Exception):
    """The server can no longer answer; lines that were not written can be run later."""


def read_line(data: bytes) -> BatchLine:
    """Parse a line of the input; a line that cannot be used gets an error."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        return BatchLine(None, error=f"the line is not valid JSON: {reason}")
    if not isinstance(value, dict):
        return BatchLine(None, error="the line is not a JSON object")
    name, method, url, body = (value.get(key) for key in ("custom_id", "method", "url", "body"))
    if not isinstance(name, str) or not name:
        return BatchLine(None, error="custom_id: give text that is not empty, another for each line")
    if method != "POST":
        return BatchLine(name, error=f"method: must be POST, not {method!r:.60}")
    if url not in URLS:
        return BatchLine(name, error=f"url: must be one of {', '.join(URLS)}, not {url!r:.60}")
    if not isinstance(body, dict):
        return BatchLine(name, error="body: must be an object, the request's own")
    if body.get("stream"):
        return BatchLine(name, error="stream: a batch has whole responses; leave it out")
    return BatchLine(name, url, body)


def written_ids(path: Path) -> set[str]:
    """Return the custom_ids in an output file, and remove an incomplete last line.

    Raises:
        ValueError: The file is not the output of a batch.
    """
    ids: set[str] = set()
    if not path.exists():
        return ids
    end = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                name = json.loads(line)["custom_id"]
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise ValueError(f"output_file: {path}, line {number} is not a line of a batch's output") from error
            if name is not None:
                ids.add(name)
            end += len(line)
    with path.open("r+b") as file:
        file.truncate(end)
    return ids


async def run_lines(
    lines: Iterator[bytes],
    output: IO[bytes],
    post: Callable[[str, Body], Awaitable[BatchResponse]],
    *,
    concurrency: int,
    skipped_ids: set[str],
    advance: Callable[[], None],
) -> BatchCounts:
    """Serve all lines; an interrupted run leaves only whole lines.

    Args:
        lines: The lines of the input; blank ones are skipped.
        skipped_ids: The custom_ids of lines that were served before.
        advance: Called after each line.

    Raises:
        ServerGoneError: The server can no longer answer; the remaining lines were not written.
    """
    counts, seats = BatchCounts(), asyncio.Semaphore(concurrency)
    seen: set[str] = set()
    waiting: deque[asyncio.Task[tuple[BatchLine, BatchResponse | None]]] = deque()

    async def serve(line: BatchLine) -> tuple[BatchLine, BatchResponse | None]:
        if line.body is None:
            return line, None
        async with seats:
            return line, await post(line.url, line.body)

    async def write_first() -> None:
        line, response = await waiting[0]
        waiting.popleft()
        record, is_served = output_record(line, response)
        output.write(json.dumps(record).encode() + b"\n")
        output.flush()
        counts.num_served += is_served
        counts.num_failed += not is_served
        advance()

    try:
        for number, data in enumerate(lines, 1):
            if not data.strip():
                continue
            line = read_line(data)
            if line.custom_id in skipped_ids:
                counts.num_skipped += 1
                advance()
                continue
            if line.custom_id is not None and line.custom_id in seen:
                line = BatchLine(line.custom_id, error=f"custom_id: {line.custom_id!r:.60} stands in two lines")
            if line.error:
                line = replace(line, error=f"line {number}: {line.error}")
            seen |= {line.custom_id} if line.custom_id is not None else set()
            waiting.append(asyncio.create_task(serve(line)))
            while waiting and (waiting[0].done() or len(waiting) >= _LOOKAHEAD * concurrency):
                await write_first()
            await asyncio.sleep(0)
        while waiting:
            await write_first()
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    return counts


def output_record(line: BatchLine, response: BatchResponse | None) -> tuple[Body, bool]:
    """Return a line of the output, and whether its request was served."""
    record: Body = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": line.custom_id, "response": None, "error": None}
    if response is None:
        return record | {"error": {"code": "invalid_line", "message": line.error}}, False
    record["response"] = {"status_code": response.status, "request_id": response.request_id, "body": response.body}
    if response.status == 200:
        return record, True
    details = response.body.get("error") if isinstance(response.body, dict) else None
    details = details if isinstance(details, dict) else {"message": str(response.body)[:300]}
    error = {"code": str(details.get("code") or response.status), "message": str(details.get("message"))}
    return record | {"error": error}, False


def count_lines(file: IO[bytes]) -> int:
    """Count the lines that are not blank, and return to the start of the file."""
    count = sum(1 for line in file if line.strip())
    file.seek(0)
    return count

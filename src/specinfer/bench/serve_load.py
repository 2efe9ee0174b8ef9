"""Sending of requests to a server at given times, and measurement of the responses on the client side.

The load is open-loop: a request is sent at its time even if earlier ones have not finished. With a limit on concurrent
requests, the wait for a free place is not part of a request's times, as in vLLM's benchmark.
"""

import asyncio
import http.client
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from specinfer.bench.options import rotated
from specinfer.bench.serve_options import ServeConfig
from specinfer.bench.serve_runs import RequestRun, Round
from specinfer.client import EventDecoder, error_text

if TYPE_CHECKING:
    import httpx

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


async def send_all(
    client: "httpx.AsyncClient",
    path: str,
    bodies: Sequence[Mapping[str, Any]],
    times: Sequence[float],
    max_concurrency: int | None,
    advance: Callable[[], None],
) -> Round:
    """Send each body at its time, in seconds from now, and wait for all responses.

    Args:
        advance: Called after each response.
    """
    seats = nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    start = time.perf_counter()

    async def send(place: int) -> RequestRun:
        await asyncio.sleep(max(start + times[place] - time.perf_counter(), 0.0))
        async with seats:
            run = await send_one(client, path, bodies[place], place, start)
        advance()
        return run

    runs = await asyncio.gather(*(send(place) for place in range(len(bodies))))
    return Round(tuple(runs), time.perf_counter() - start)


async def send_one(
    client: "httpx.AsyncClient", path: str, body: Mapping[str, Any], place: int, start: float
) -> RequestRun:
    """Send one request and wait for its end. Errors are part of the result."""
    import httpx

    watch = _Watch(time.perf_counter())
    status, error = 0, None
    try:
        async with client.stream("POST", path, json=body) as response:
            status = response.status_code
            if status != 200:
                error = error_text(status, await response.aread())
            else:
                async for data in response.aiter_bytes():
                    watch.take(data)
                error = watch.failure
    except (httpx.HTTPError, ValueError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    return watch.run(place, start, status, error)


def send_alone(
    connection: http.client.HTTPConnection, path: str, body: Mapping[str, Any], api_key: str | None
) -> RequestRun:
    """Send one request and wait for its end, by a client that itself takes little time for an event.

    httpx takes a quarter of a millisecond, which the server's threads do not have where there are few cores.
    """
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    start = time.perf_counter()
    watch = _Watch(start)
    status, error = 0, None
    try:
        connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        status = response.status
        if status != 200:
            error = error_text(status, response.read())
        else:
            while data := response.read1(65536):
                watch.take(data)
            error = watch.failure
    except (OSError, http.client.HTTPException, ValueError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    return watch.run(0, start, status, error)


class _Watch:
    """A reader of one event stream, which notes the arrival times of its events."""

    def __init__(self, start: float) -> None:
        self._start = start
        self._times: list[float] = []  # arrival times of events with text
        self._texts: list[str] = []
        self._decoder = EventDecoder()
        self._usage: Mapping[str, Any] = {}
        self._stats: Any = None
        self._error: str | None = None

    def take(self, data: bytes) -> None:
        now = time.perf_counter()
        for event in self._decoder.push(data):
            if event.get("error"):
                self._error = str(event["error"])[:300]
            self._usage = event.get("usage") or self._usage
            self._stats = (event.get("metrics") or {}).get("speculative_decoding") or self._stats
            for choice in event.get("choices") or ():
                text = choice.get("text") if "text" in choice else (choice.get("delta") or {}).get("content")
                if text:
                    self._times.append(now)
                    self._texts.append(text)

    @property
    def failure(self) -> str | None:
        if self._error is None and not self._decoder.is_done:
            return "the stream ended before it was whole"
        return self._error

    def run(self, place: int, start: float, status: int, error: str | None) -> RequestRun:
        end = time.perf_counter()
        first = self._times[0] if self._times else end
        gaps = zip(self._times, self._times[1:], strict=False)
        return RequestRun(
            prompt=place,
            start=self._start - start,
            ttft=first - self._start,
            gaps=tuple(later - before for before, later in gaps),
            latency=end - self._start,
            num_prompt=int(self._usage.get("prompt_tokens") or 0),
            # If the server reports no usage, each event counts as one token.
            num_output=int(self._usage.get("completion_tokens") or len(self._texts)),
            text="".join(self._texts),
            status=status,
            error=error,
            stats=self._stats,
        )


class Turn(NamedTuple):
    """One round at one rate: all arms, in this order."""

    rate: float
    repeat: int
    arms: tuple[str, ...]


def schedule(config: ServeConfig, rates: Sequence[float]) -> Iterator[Turn]:
    """Yield all rates in each repeat, so that a slower machine affects all of them alike."""
    for repeat in range(config.repeats):
        for place, rate in enumerate(rates):
            yield Turn(rate, repeat, rotated(config.trees, repeat + place))


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Return the send times in seconds from the start. At a finite rate the last is count / rate."""
    if math.isinf(rate):
        return [0.0] * count
    if math.isinf(burstiness):
        gaps = np.full(count, 1 / rate)
    else:
        gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), count)
    return at_rate(np.cumsum(gaps).tolist(), rate)


def at_rate(times: Sequence[float], rate: float) -> list[float]:
    """Return ascending times scaled so that their mean rate is this one; as they are if it is infinite.

    vLLM's benchmark does so with random times, since the actual rate would otherwise be random.
    """
    if math.isinf(rate) or not times[-1]:
        return list(times)
    return [time * (len(times) / rate / times[-1]) for time in times]

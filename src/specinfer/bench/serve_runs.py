"""Requests of a serving run as the client measured them."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

_REFUSED = (429, 503)


@dataclass(frozen=True, slots=True)
class RequestRun:
    """One request as measured by the client, with times in seconds.

    Attributes:
        start: Send time from the start of the round.
        ttft: Time from sending to the first text.
        gaps: Times between consecutive events with text. An event may contain several tokens.
        latency: Time from sending to the end.
        status: HTTP status, or 0 without a response.
        stats: Speculation counters, or None if the server sends none.
        kind: Class of the request; empty for none.
        limits: Latency targets of the request itself, in milliseconds by metric.
    """

    prompt: int
    start: float
    ttft: float
    gaps: tuple[float, ...]
    latency: float
    num_prompt: int
    num_output: int
    text: str
    status: int
    error: str | None = None
    stats: Mapping[str, float] | None = None
    kind: str = ""
    limits: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_served(self) -> bool:
        return self.error is None

    @property
    def is_refused(self) -> bool:
        """True if the server refused the request because of overload."""
        return self.status in _REFUSED

    @property
    def tpot(self) -> float:
        """Mean seconds of a token after the first, or 0 if there is only one token."""
        return (self.latency - self.ttft) / (self.num_output - 1) if self.num_output > 1 else 0.0

    def is_good(self, limits: Mapping[str, float]) -> bool:
        """Return whether the request is within these limits in milliseconds; its own ones come first."""
        wanted = {**limits, **self.limits}
        return all(1000 * max(self.seconds_of(metric), default=0.0) <= limit for metric, limit in wanted.items())

    def seconds_of(self, metric: str) -> tuple[float, ...]:
        if metric == "itl":
            return self.gaps
        if metric == "tpot":
            return (self.tpot,) if self.num_output > 1 else ()
        return (self.ttft,) if metric == "ttft" else (self.latency,)


@dataclass(frozen=True, slots=True)
class Round:
    """All requests of one arm in one round, with their total duration in seconds."""

    runs: tuple[RequestRun, ...]
    duration: float

    @property
    def served(self) -> list[RequestRun]:
        return [run for run in self.runs if run.is_served]

    @property
    def output_throughput(self) -> float:
        return sum(run.num_output for run in self.served) / self.duration

    @property
    def most_at_once(self) -> int:
        """Largest number of concurrent requests."""
        changes = [(run.start, 1) for run in self.runs] + [(run.start + run.latency, -1) for run in self.runs]
        return max(itertools.accumulate(change for _, change in sorted(changes)), default=0)

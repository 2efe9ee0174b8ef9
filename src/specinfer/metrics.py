"""The counters of an engine in this process, as `LLM.get_metrics` returns them: vLLM's classes and names."""

from collections import Counter as Counts
from dataclasses import dataclass, field, replace

from torch import Tensor

from specinfer.core.clock import epoch_seconds
from specinfer.core.request import Request
from specinfer.core.tree import TokenTree
from specinfer.engine.tally import Tally
from specinfer.verify import Acceptance

_PREFIX = "vllm:"  # the programs that read these metrics look for vLLM's names
_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


@dataclass(kw_only=True)
class Metric:
    """A metric with its name and labels."""

    name: str
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(kw_only=True)
class Counter(Metric):
    """A number that only grows."""

    value: int


@dataclass(kw_only=True)
class Vector(Metric):
    """Counters by position, such as accepted draft tokens by depth."""

    values: list[int]


@dataclass(kw_only=True)
class Gauge(Metric):
    """A number that rises and falls."""

    value: float


@dataclass(kw_only=True)
class Histogram(Metric):
    """Observations in buckets: for each upper limit the number of observations up to it; "+Inf" has all."""

    count: int = 0
    sum: float = 0.0
    buckets: dict[str, int] = field(default_factory=lambda: dict.fromkeys([*map(str, _BUCKETS), "+Inf"], 0))

    def observe(self, value: float) -> None:
        self.count += 1
        self.sum += value
        for limit in self.buckets:
            self.buckets[limit] += value <= float(limit)


class EngineCounters(Tally):
    """Counts of tokens, and the times of requests that have ended."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: Counts[str] = Counts()
        self._times = {
            phase: Histogram(name=f"{_PREFIX}{name}_seconds")
            for phase, name in (
                ("e2e", "e2e_request_latency"),
                ("first_token", "time_to_first_token"),
                ("prefill", "request_prefill_time"),
                ("decode", "request_decode_time"),
            )
        }

    def on_tokens(
        self, request: Request, tree: TokenTree, acceptance: Acceptance, logits: Tensor, num_generated: int
    ) -> None:
        super().on_tokens(request, tree, acceptance, logits, num_generated)
        if request.is_finished:
            self._end(request)

    def _end(self, request: Request) -> None:
        self.ended[str(request.finish_reason)] += 1
        durations = request.times.durations(epoch_seconds())
        if "decode" in durations:
            for phase in durations.keys() & self._times.keys():
                self._times[phase].observe(durations[phase])

    def metrics(self, num_running: int, num_waiting: int, cache_usage: float) -> list[Metric]:
        """Return all metrics; the arguments are the gauges."""
        totals = self.copy()
        all_metrics: list[Metric] = [
            Gauge(name=_PREFIX + name, value=value)
            for name, value in (
                ("num_requests_running", num_running),
                ("num_requests_waiting", num_waiting),
                ("kv_cache_usage_perc", cache_usage),
            )
        ]
        all_metrics += [
            Counter(name=_PREFIX + name, value=value)
            for name, value in (
                ("prompt_tokens", totals.num_prompt_tokens),
                ("prompt_tokens_cached", totals.num_cached_tokens),
                ("generation_tokens", totals.num_generated_tokens),
                ("prefix_cache_queries", totals.num_begun_tokens),
                ("prefix_cache_hits", totals.num_cached_tokens),
                ("spec_decode_num_drafts", totals.num_drafts),
                ("spec_decode_num_draft_tokens", totals.num_draft_tokens),
                ("spec_decode_num_accepted_tokens", totals.num_accepted_tokens),
            )
        ]
        deepest = max((depth for depth, count in enumerate(totals.accepted_at, start=1) if count), default=0)
        all_metrics.append(
            Vector(name=f"{_PREFIX}spec_decode_num_accepted_tokens_per_pos", values=totals.accepted_at[:deepest])
        )
        all_metrics += [
            Counter(name=f"{_PREFIX}request_success", labels={"finished_reason": reason}, value=count)
            for reason, count in sorted(self.ended.items())
        ]
        return all_metrics + [replace(histogram, buckets=dict(histogram.buckets)) for histogram in self._times.values()]

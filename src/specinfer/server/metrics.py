"""The metrics in Prometheus format. Names are vLLM's with the prefix "specinfer:", plus metrics of the trees.

Counters and gauges are read from the engine when they are scraped. The engine's thread fills histograms, a few for each
step of a request and when a request ends.
"""

import asyncio
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from torch import Tensor

from specinfer.async_llm import AsyncLLM
from specinfer.core.clock import epoch_seconds
from specinfer.core.request import FinishReason, Request
from specinfer.core.step_record import StepRecord
from specinfer.core.tree import TokenTree
from specinfer.engine.tally import Tally
from specinfer.generation import Generation
from specinfer.learning.adapt.settings import AdaptationStats
from specinfer.server.errors import STATUS_OF
from specinfer.verify import Acceptance

PREFIX = "specinfer:"
Values: TypeAlias = float | Mapping[Any, float]  # by the value of a label, or a tuple of values


class MetricFamilies:
    """A maker of the families of one model."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name

    def gauge(self, name: str, help: str, values: Values, *labels: str) -> Metric:
        return self._filled(GaugeMetricFamily, name, help, values, labels)

    def total(self, name: str, help: str, values: Values, *labels: str) -> Metric:
        """Return a counter."""
        return self._filled(CounterMetricFamily, name, help, values, labels)

    def _filled(
        self,
        kind: type[GaugeMetricFamily | CounterMetricFamily],
        name: str,
        help: str,
        values: Values,
        labels: Sequence[str],
    ) -> Metric:
        family = kind(PREFIX + name, help, labels=["model_name", *labels])
        for key, value in values.items() if isinstance(values, Mapping) else [((), values)]:
            family.add_metric([self._model_name, *((key,) if isinstance(key, str) else key)], value)
        return family


# From a millisecond, as small models answer fast, to ten minutes.
SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 600.0),
)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
NODES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 1024)
FEW = (1, 2, 5, 10, 20, 50, 128)


def as_vllm(text: bytes) -> bytes:
    """Return metrics in Prometheus format under vLLM's prefix, and with its label `engine`."""
    text = re.sub(rb"^((?:# \w+ )?)specinfer:", rb"\1vllm:", text, flags=re.MULTILINE)
    return re.sub(rb"([{,])model_name=\"", rb'\1engine="0",model_name="', text)


class ModelRegistry:
    """The metrics of one process, each with the name of the model, and among them the count of its refusals."""

    def __init__(self, model_name: str) -> None:
        self.registry, self._model_name = CollectorRegistry(), model_name
        self._refused = self.counter("request_refused", "Requests that were refused, by the code they got.", "reason")

    def counter(self, name: str, help: str, label: str) -> Callable[[str], Counter]:
        """Return a function that returns the counter for a value of the label."""
        family = Counter(PREFIX + name, help, ["model_name", label], registry=self.registry)
        return lambda value: family.labels(self._model_name, value)

    def gauge(self, name: str, help: str) -> Gauge:
        return Gauge(PREFIX + name, help, ["model_name"], registry=self.registry).labels(self._model_name)

    def histogram(self, name: str, help: str, buckets: Sequence[float]) -> Histogram:
        family = Histogram(PREFIX + name, help, ["model_name"], registry=self.registry, buckets=buckets)
        return family.labels(self._model_name)

    def count_refusal(self, code: str) -> None:
        self._refused(code if code in STATUS_OF else "other").inc()

    def scrape(self) -> bytes:
        """Return all metrics as text."""
        return generate_latest(self.registry)


_DURATIONS = {  # by the names of `RequestTimes.durations`
    "e2e": ("e2e_request_latency_seconds", "From arrival to the end of an output."),
    "first_token": ("time_to_first_token_seconds", "From arrival to the first token."),
    "queue": ("request_queue_time_seconds", "From arrival to the first computing."),
    "prefill": ("request_prefill_time_seconds", "From there to the first token."),
    "decode": ("request_decode_time_seconds", "From the first token to the last."),
    "inference": ("request_inference_time_seconds", "From the first computing to the end."),
}


class Metrics:
    """The metrics of one engine, in their own registry."""

    reads_logits = False

    def __init__(self, engine: AsyncLLM, tally: Tally, model_name: str) -> None:
        self._engine, self._tally, self._families = engine, tally, MetricFamilies(model_name)
        model = ModelRegistry(model_name)
        self.registry, self.scrape, self.count_refusal = model.registry, model.scrape, model.count_refusal
        self._last_token_at: dict[str, float] = {}  # by id of the running requests
        self._ended = model.counter("request_success", "Outputs that ended, by how.", "finished_reason")
        histogram = model.histogram
        self._between = histogram(
            "inter_token_latency_seconds",
            "Seconds between two steps that emitted tokens of one output; a step may emit several.",
            SECONDS,
        )
        self._per_token = histogram(
            "request_time_per_output_token_seconds", "Decoding time of an output by its tokens.", SECONDS
        )
        self._durations = {phase: histogram(name, help, SECONDS) for phase, (name, help) in _DURATIONS.items()}
        self._prompt = histogram("request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self._generated = histogram("request_generation_tokens", "Tokens of an output.", TOKENS)
        self._n = histogram("request_params_n", "Outputs asked for.", FEW)
        self._max_tokens = histogram("request_params_max_tokens", "Limits asked for.", TOKENS)
        self._iteration = histogram("iteration_tokens_total", "Tokens in a pass of the target.", TOKENS)
        self._tree = histogram("tree_nodes", "Guesses in the tree of one output in one step.", NODES)
        self._depth = histogram("tree_depth", "Depth of such a tree.", NODES)
        self._budget = histogram("step_budget_nodes", "Guesses that the policy allowed in one step.", NODES)
        self._step = histogram("step_time_seconds", "One step.", SECONDS)
        self.registry.register(self)
        engine.llm.engine.observers.append(self)
        engine.on_end.append(self.note_end)

    def close(self) -> None:
        """Stop counting; the numbers stay."""
        self._engine.llm.engine.observers.remove(self)
        self._engine.on_end.remove(self.note_end)

    # ------------------------------------------------------------------------ in the engine's thread

    def on_tokens(
        self, request: Request, tree: TokenTree, acceptance: Acceptance, logits: Tensor, num_generated: int
    ) -> None:
        now = time.monotonic()
        before = self._last_token_at.pop(request.request_id, None)
        if before is not None:
            self._between.observe(now - before)
        if not request.is_finished:
            self._last_token_at[request.request_id] = now
        if tree.num_guessed:
            self._tree.observe(tree.num_guessed)
            self._depth.observe(tree.max_depth)

    def on_step(self, record: StepRecord) -> None:
        self._iteration.observe(record.num_rows)
        self._budget.observe(record.num_budgeted)
        self._step.observe(record.time)
        if len(self._last_token_at) > 2 * record.num_requests + 64:  # drop requests that were ended from outside
            live = {request.request_id for request in self._engine.llm.engine.scheduler.requests()}
            self._last_token_at = {name: at for name, at in self._last_token_at.items() if name in live}

    # ---------------------------------------------------------------------------- in the event loop

    def note_end(self, generation: Generation) -> None:
        self._n.observe(len(generation.requests))
        self._prompt.observe(len(generation.requests[0].prompt_ids))
        for request in generation.requests:
            self._note(request)

    def _note(self, request: Request) -> None:
        # The engine ends a request whose client has gone a moment later, so its reason may be missing.
        reason = request.finish_reason or FinishReason.ABORT
        self._ended(reason.value).inc()
        if request.params.max_tokens is not None:
            self._max_tokens.observe(request.params.max_tokens)
        self._generated.observe(request.num_output)
        durations = request.times.durations(epoch_seconds())
        for phase, seconds in durations.items():
            self._durations[phase].observe(seconds)
        if "decode" in durations and request.num_output > 1:
            self._per_token.observe(durations["decode"] / (request.num_output - 1))

    # ------------------------------------------------------------------------------- when asked for

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics that are only read from the engine."""
        engine, totals = self._engine, self._tally.copy()
        cache, disk, counted = engine.llm.target.cache, engine.llm.prefixes, engine.llm.engine.metrics
        for name, help, level in (
            ("num_requests_running", "Outputs in the batch.", engine.num_running),
            ("num_requests_waiting", "Outputs that wait for a place in it.", engine.num_waiting),
            ("event_loop_tasks", "Tasks of the server's event loop.", _num_tasks()),
            ("kv_cache_usage_perc", "Share of the slots that running requests hold; 1 is all.", cache.usage),
            ("kv_cache_kept_perc", "Share of the slots kept for reuse.", cache.num_cached / cache.num_slots),
        ):
            yield self._families.gauge(name, help, level)
        size = 0 if disk is None else disk.num_bytes
        yield self._families.gauge("prefix_cache_disk_bytes", "Bytes of the prefixes kept on disk.", size)
        speedup = engine.llm.engine.policy.speedup
        known = {} if speedup is None else {"expected": speedup.expected, "measured": speedup.measured}
        ratios = {kind: ratio for kind, ratio in known.items() if ratio is not None}
        help = "Speed of decoding over that of plain decoding: expected at start, and measured since then."
        yield self._families.gauge("spec_decode_speedup", help, ratios, "kind")
        for name, help, value in (
            ("prompt_tokens", "Tokens of prompts that were read, with cached ones.", totals.num_prompt_tokens),
            ("prompt_tokens_cached", "Of those, cached ones.", totals.num_cached_tokens),
            ("generation_tokens", "Generated tokens.", totals.num_generated_tokens),
            ("prefix_cache_queries", "Tokens of prompts that were looked up in the cache.", totals.num_begun_tokens),
            ("prefix_cache_hits", "Of those, tokens found there.", totals.num_cached_tokens),
            ("prefix_cache_disk_hits", "Of those, tokens from the disk.", disk.num_read_tokens if disk else 0),
            ("num_preemptions", "Times that an output gave its slots back to others.", counted.num_preempted),
            ("draft_failures", "Steps without draft tokens as a drafter failed.", counted.num_draft_failures),
            ("spec_decode_num_drafts", "Token trees with at least one draft token.", totals.num_drafts),
            ("spec_decode_num_draft_tokens", "Draft tokens in them.", totals.num_draft_tokens),
            ("spec_decode_num_accepted_tokens", "Of those, accepted ones.", totals.num_accepted_tokens),
        ):
            yield self._families.total(name, help, value)
        on_device = counted.num_device_steps
        steps = {"device": on_device, "host": counted.num_steps - on_device}
        yield self._families.total("steps", "Steps on the device, and ordinary ones.", steps, "executor")
        stream = engine.llm.target.loaded.stream
        for name, help, count in (
            ("weights_read_bytes", "Of the target's weights, for its passes.", stream.bytes_read if stream else 0),
            ("weights_read_seconds", "In which weights were read.", stream.seconds_reading if stream else 0),
            ("weights_wait_seconds", "In which passes waited for weights.", stream.seconds_waiting if stream else 0),
        ):
            yield self._families.total(name, help, count)
        positions = {str(place): count for place, count in enumerate(totals.accepted_at) if count}
        yield self._families.total(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens by depth.", positions, "position"
        )
        for name, help, label, counts in (
            ("draft_nodes", "Draft tokens, by drafter.", "drafter", totals.read_by),
            ("accepted_nodes", "Accepted draft tokens, by drafter.", "drafter", totals.accepted_by),
            ("verification_drafts", "Token trees, by the rule that auto chose.", "verification", totals.drafts_by_rule),
            ("verification_tokens", "Tokens of their passes.", "verification", totals.generated_by_rule),
        ):
            yield self._families.total(name, help, counts, label)
        yield from self._by_key()
        drafter = engine.llm.drafter
        if drafter is not None and drafter.selection is not None:
            weights = drafter.selection.weights
            yield self._families.gauge(
                "drafter_weight", "Recent weight of each drafter in the selection.", weights, "drafter"
            )
        if engine.llm.adaptation is not None:
            yield from self._adaptation(engine.llm.adaptation.stats)

    def _by_key(self) -> Iterable[Metric]:
        """Yield what each key uses, by its name, and its limits."""
        engine, admission = self._engine, self._engine.admission
        live, running = admission.num_live_by_tenant(), engine.num_running_by_tenant()
        quotas, usage = admission.quotas, admission.quotas.usage.items()
        for name, help, values in (
            ("key_requests_running", "Outputs of a key in the batch.", {key: running[key] for key in quotas.limits}),
            (
                "key_requests_waiting",
                "Outputs of a key that are read or wait.",
                {key: max(live[key] - running[key], 0) for key in quotas.limits},
            ),
            ("key_connections", "Requests of a key being served.", {key: one.num_connections for key, one in usage}),
            (
                "key_incoming_bytes",
                "Bytes of bodies being read for a key.",
                {key: one.num_incoming_bytes for key, one in usage},
            ),
            (
                "key_outgoing_bytes",
                "Bytes of large responses that a key's clients have not read.",
                {key: one.num_outgoing_bytes for key, one in usage},
            ),
        ):
            yield self._families.gauge(name, help, values, "key")
        for name, help, values in (
            ("key_prompt_tokens", "Tokens of a key's prompts.", {key: one.num_prompt_tokens for key, one in usage}),
            ("key_generation_tokens", "Generated for a key.", {key: one.num_generated_tokens for key, one in usage}),
        ):
            yield self._families.total(name, help, values, "key")
        refused = {(key, limit): count for key, one in usage for limit, count in one.num_refused.items()}
        yield self._families.total("key_refused", "Requests over a limit of their key.", refused, "key", "limit")
        limits = {(key, name): most for key, of_key in quotas.limits.items() for name, most in asdict(of_key).items()}
        limits = {names: most for names, most in limits.items() if most is not None}
        yield self._families.gauge("key_limit", "Limits of a key.", limits, "key", "limit")

    def _adaptation(self, stats: Mapping[str, AdaptationStats]) -> Iterable[Metric]:
        """Yield the metrics of drafters that learn online."""
        for name, help, field in (
            ("adaptation_micro_steps", "Small steps in which drafters learned.", "num_micro_steps"),
            ("adaptation_swaps", "Times that a drafter was replaced by what it had learned.", "num_swaps"),
            ("adaptation_rollbacks", "Times that an earlier version came back.", "num_rollbacks"),
            ("adaptation_restarts", "Times that what was learned was thrown away.", "num_restarts"),
        ):
            counts = {drafter: getattr(one, field) for drafter, one in stats.items()}
            yield self._families.total(name, help, counts, "drafter")
        rates = {(drafter, "now"): one.hit_rate for drafter, one in stats.items()}
        rates |= {(drafter, "original"): one.original_hit_rate for drafter, one in stats.items()}
        yield self._families.gauge(
            "adaptation_hit_rate",
            "Share of a drafter's first choices that are right on held-out traffic, now and at the start.",
            {names: rate for names, rate in rates.items() if not math.isnan(rate)},
            "drafter",
            "version",
        )


def _num_tasks() -> int:
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:  # called outside the event loop
        return 0

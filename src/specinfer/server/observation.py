"""The observers of an engine that is served, created from the settings. OpenTelemetry is an optional extra."""

import asyncio
import contextlib
from types import ModuleType
from typing import Any, Self

from specinfer.async_llm import AsyncLLM
from specinfer.core.clock import epoch_seconds
from specinfer.engine.tally import Tally
from specinfer.generation import Generation
from specinfer.server.logs import StatsLog
from specinfer.server.metrics import Metrics, as_vllm
from specinfer.server.state import ServerState
from specinfer.server.trace import TraceFile

REMEDY = "otlp_endpoint: OpenTelemetry is not installed; pip install 'specinfer[otel]', or leave it out"

_SECONDS = 3  # timeout for sending; at its end the server waits for the last spans


class Telemetry:
    """A sender of a span for each generation that ends.

    Args:
        exporter: The exporter that gets the spans, instead of one for `endpoint`.

    Raises:
        ValueError: The OpenTelemetry packages are missing.
    """

    def __init__(self, engine: AsyncLLM, endpoint: str, model_name: str, exporter: Any = None) -> None:
        trace, sdk, export, resources = _packages()
        if exporter is None:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_SECONDS)
        self._kind = trace.SpanKind.SERVER
        resource = resources.Resource.create({"service.name": "specinfer"})
        self._provider = sdk.TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(export.BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("specinfer")
        self._model_name = model_name
        engine.on_end.append(self.note_end)

    def note_end(self, generation: Generation) -> None:
        first = generation.requests[0]
        end = first.times.finished or epoch_seconds()
        start = first.times.arrival or end
        span = self._tracer.start_span("llm_request", kind=self._kind, start_time=_nanoseconds(start))
        for name, value in _attributes(generation, self._model_name, end).items():
            if value is not None:
                span.set_attribute(name, value)
        span.end(end_time=_nanoseconds(end))

    def close(self) -> None:
        """Send the remaining spans."""
        self._provider.shutdown()


def check_installed() -> None:
    """Check for the OpenTelemetry packages before anything is loaded.

    Raises:
        ValueError: The packages are missing.
    """
    _packages()


def _packages() -> tuple[ModuleType, ModuleType, ModuleType, ModuleType]:
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter  # noqa: F401  # only whether it is there
        from opentelemetry import trace
        from opentelemetry.sdk import resources
        from opentelemetry.sdk import trace as sdk
        from opentelemetry.sdk.trace import export
    except ImportError as error:
        raise ValueError(REMEDY) from error
    return trace, sdk, export, resources


_LATENCIES = {  # names of attributes, and of `RequestTimes.durations`
    "e2e": "e2e",
    "time_in_queue": "queue",
    "time_in_model_inference": "inference",
    "time_to_first_token": "first_token",
    "time_in_model_prefill": "prefill",
    "time_in_model_decode": "decode",
}


def _attributes(generation: Generation, model_name: str, end: float) -> dict[str, str | int | float | None]:
    requests = generation.requests
    first, params = requests[0], requests[0].params
    durations = first.times.durations(end)
    total = first.speculation
    for request in requests[1:]:
        total = total + request.speculation
    attributes: dict[str, str | int | float | None] = {
        "gen_ai.response.model": model_name,
        "gen_ai.request.id": generation.request_id,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.n": params.n,
        "gen_ai.usage.num_sequences": len(requests),
        "gen_ai.usage.prompt_tokens": len(first.prompt_ids),
        "gen_ai.usage.completion_tokens": sum(request.num_output for request in requests),
        "gen_ai.response.finish_reason": first.finish_reason or "abort",
        "specinfer.num_draft_tokens": total.num_draft_tokens,
        "specinfer.num_accepted_tokens": total.num_accepted_draft_tokens,
        "specinfer.tokens_per_pass": total.tokens_per_pass,
    }
    return attributes | {f"gen_ai.latency.{name}": durations.get(phase) for name, phase in _LATENCIES.items()}


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


class Observation:
    """Metrics, log statistics, a trace file and spans; an async context from before the engine's start to its end."""

    def __init__(self, engine: AsyncLLM, state: ServerState) -> None:
        config, name = state.config, state.names[0]
        self._observers, tally = engine.llm.engine.observers, Tally()
        self._tally = tally
        self._observers.append(tally)
        self._metrics = Metrics(engine, tally, name) if config.metrics else None
        if self._metrics is not None:
            scrape, state.count_refusal = self._metrics.scrape, self._metrics.count_refusal
            state.scrape = scrape if config.metrics_prefix == "specinfer" else lambda: as_vllm(scrape())
        self._stats = StatsLog(engine, tally, config.log_stats_interval) if config.log_stats_interval else None
        self._trace = TraceFile(config.trace, engine, state.names) if config.trace is not None else None
        self._telemetry = Telemetry(engine, config.otlp_endpoint, name) if config.otlp_endpoint is not None else None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._stats is not None:
            self._task = asyncio.create_task(self._stats.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._observers.remove(self._tally)
        if self._metrics is not None:
            self._metrics.close()
        for closed in (self._trace, self._telemetry):
            if closed is not None:
                await asyncio.to_thread(closed.close)

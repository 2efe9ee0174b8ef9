"""The observers of an engine that is served, created from the settings."""

import asyncio
import contextlib
from typing import Self

from specinfer.async_llm import AsyncLLM
from specinfer.engine.tally import Tally
from specinfer.server.logs import StatsLog
from specinfer.server.metrics import Metrics, as_vllm
from specinfer.server.state import ServerState
from specinfer.server.telemetry import Telemetry
from specinfer.server.trace import TraceFile


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

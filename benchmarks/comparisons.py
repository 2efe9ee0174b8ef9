"""Latency, throughput and load as `specinfer bench` measures them, of grown models and in turns with other engines."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.agents.requests import AGENT_KINDS, AGENTS, agent_prompts
from benchmarks.growth.models import growing
from benchmarks.options import LabSettings
from benchmarks.peers.engines import engine_tables
from benchmarks.peers.names import parse_peer
from benchmarks.peers.race import Peers
from benchmarks.peers.report import PeerRuns, peer_lines, peer_tables
from specinfer.bench.comparisons import Compared
from specinfer.bench.latency import compare_latency, latency_page, plot_latency
from specinfer.bench.loop import Session, Turn
from specinfer.bench.options import CompareConfig, ThroughputConfig
from specinfer.bench.prompts import PromptSet
from specinfer.bench.serve import serve_under_load
from specinfer.bench.serve_options import ServeConfig
from specinfer.bench.serve_report import Served
from specinfer.bench.throughput import compare_throughput, throughput_page
from specinfer.cli.measure import LATENCY as PACKAGE_LATENCY
from specinfer.cli.measure import SERVE as PACKAGE_SERVE
from specinfer.cli.measure import THROUGHPUT as PACKAGE_THROUGHPUT
from specinfer.core.options import setting_of
from specinfer.reporting.progress_bar import StageBar
from specinfer.reporting.report import Report, reported


@dataclass(frozen=True, slots=True)
class GrownLatencyConfig(CompareConfig):
    """Options of the latency measurement of grown models, on more kinds of prompts, with other engines."""

    grow: str | None = setting_of(LabSettings, "grow")
    peers: tuple[str, ...] = setting_of(LabSettings, "peers")
    sweep: bool = setting_of(LabSettings, "sweep")
    kinds: tuple[str, ...] | None = setting_of(LabSettings, "kinds")
    markdown: str | Path | None = setting_of(LabSettings, "markdown")

    @property
    def more_kinds(self) -> tuple[str, ...]:
        return (*AGENT_KINDS, AGENTS)

    @property
    def asks_agents(self) -> bool:
        return not set(self.kinds or ()).isdisjoint(self.more_kinds)

    def __post_init__(self) -> None:
        CompareConfig.__post_init__(self)
        if self.asks_agents and not set(self.kinds or ()) <= set(self.more_kinds):
            raise ValueError(
                f"kinds: {', '.join(self.more_kinds)} are measured apart from others; leave the others out"
            )
        for peer in self.peers:
            parse_peer(peer, "float32")
        if self.sweep and not self.peers:
            raise ValueError("sweep: it is of the settings of peers; name one with peer")


def tuning_turn(prompts: PromptSet) -> Turn:
    """Return the prompts on which peers are tuned: the first of each kind of requests, or the first two."""
    kinds = prompts.kinds if prompts.requests else ("first", "second")
    return Turn(0, tuple(map(kinds.index, dict.fromkeys(kinds)))[: len(prompts.token_ids)], ())


@dataclass(frozen=True, slots=True)
class GrownThroughputConfig(ThroughputConfig):
    """Options of the throughput measurement of grown models."""

    grow: str | None = setting_of(LabSettings, "grow")


@dataclass(frozen=True, slots=True)
class GrownServeConfig(ServeConfig):
    """Options of the serving benchmark of grown models."""

    grow: str | None = setting_of(LabSettings, "grow")


@dataclass(frozen=True, slots=True)
class PeerLatency:
    """Our arms, and the peers that took turns with them, if any were asked for."""

    ours: Compared
    peers: PeerRuns | None = None


@reported
def run_grown_latency(config: GrownLatencyConfig, progress: StageBar) -> Report[PeerLatency]:
    """Measure latency; as `run_latency`. A peer that fails is left out."""
    started: list[Peers] = []

    @contextmanager
    def start(session: Session) -> Iterator[Peers]:
        loaded, prompts = session.llm.target.loaded, session.prompts
        max_len = prompts.longest + config.max_tokens
        with Peers(
            config.peers,
            session.models,
            dtype=loaded.dtype,
            device=loaded.device,
            max_len=max_len,
            sweep=config.sweep,
            num_outputs=prompts.most_outputs,
            has_requests=bool(prompts.requests),
        ) as peers:
            peers.start(session.progress.stage)
            peers.tune(session.batch(tuning_turn(prompts)), session.progress.stage)
            started.append(peers)
            yield peers

    read = partial(agent_prompts, config=config) if config.asks_agents else None
    ours = compare_latency(config, progress, start if config.peers else None, growing(config.grow), read)
    page = latency_page(ours)
    if not started:
        return replace(page, measured=PeerLatency(ours))  # type: ignore[arg-type, return-value]  # its type changes
    peers = started[0].runs()
    return Report(
        page.lines,
        [*page.tables, *peer_tables(ours, peers), *engine_tables(ours, peers)],
        PeerLatency(ours, peers),
        page.environment,
        {**page.numbers, **peers.as_dict(ours)},
        [*page.last, "", *peer_lines(ours, peers)],
        partial(plot_latency, ours, others=peers.arms),
    )


@reported
def run_grown_throughput(config: GrownThroughputConfig, progress: StageBar) -> Report[Compared]:
    """Measure throughput; as `run_throughput`."""
    return throughput_page(compare_throughput(config, progress, growing(config.grow)))


@reported
def run_grown_serve(config: GrownServeConfig, progress: StageBar) -> Report[Served]:
    """Measure a server under load; as `run_serve`."""
    if config.base_url is not None and config.grow is not None:
        raise ValueError("grow: the server has its model already; leave grow or base_url out")
    return serve_under_load(config, progress, growing(config.grow))


LATENCY = replace(
    PACKAGE_LATENCY,
    config=GrownLatencyConfig,
    run="benchmarks.comparisons:run_grown_latency",
    help="Compare the latency of token trees with that of plain decoding and of other engines.",
    moved={},
)
THROUGHPUT = replace(
    PACKAGE_THROUGHPUT,
    config=GrownThroughputConfig,
    run="benchmarks.comparisons:run_grown_throughput",
    moved={},
)
SERVE = replace(PACKAGE_SERVE, config=GrownServeConfig, run="benchmarks.comparisons:run_grown_serve", moved={})

"""Latency, throughput and load as `specinfer bench` measures them, of grown models and in turns with other engines."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.growth.models import growing
from benchmarks.options import LabSettings
from benchmarks.peers.names import parse_peer
from benchmarks.peers.race import Peers
from benchmarks.peers.report import PeerReport, print_peers
from specinfer.bench.comparisons import numbers_by_kind
from specinfer.bench.latency import run_latency
from specinfer.bench.latency_report import LatencyReport, plot_latency, print_latency
from specinfer.bench.loop import Session, write_files
from specinfer.bench.options import CompareConfig, ThroughputConfig
from specinfer.bench.serve import run_serve
from specinfer.bench.serve_options import ServeConfig
from specinfer.bench.serve_report import ServeReport
from specinfer.bench.throughput import run_throughput
from specinfer.bench.throughput_report import ThroughputReport
from specinfer.cli.measure import LATENCY as PACKAGE_LATENCY
from specinfer.cli.measure import SERVE as PACKAGE_SERVE
from specinfer.cli.measure import THROUGHPUT as PACKAGE_THROUGHPUT
from specinfer.core.options import setting_of
from specinfer.reporting.files import check_files, options_of


@dataclass(frozen=True, slots=True)
class GrownLatencyConfig(CompareConfig):
    """Options of the latency measurement of grown models, with other engines."""

    grow: str | None = setting_of(LabSettings, "grow")
    peers: tuple[str, ...] = setting_of(LabSettings, "peers")

    def __post_init__(self) -> None:
        CompareConfig.__post_init__(self)
        for peer in self.peers:
            parse_peer(peer, "float32")


@dataclass(frozen=True, slots=True)
class GrownThroughputConfig(ThroughputConfig):
    """Options of the throughput measurement of grown models."""

    grow: str | None = setting_of(LabSettings, "grow")


@dataclass(frozen=True, slots=True)
class GrownServeConfig(ServeConfig):
    """Options of the serving benchmark of grown models."""

    grow: str | None = setting_of(LabSettings, "grow")


@dataclass(frozen=True, slots=True)
class PeerLatencyReport:
    """The report on our arms, and on the peers that took turns with them, if any were asked for."""

    ours: LatencyReport
    peers: PeerReport | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the report in a form ready for JSON."""
        if self.peers is None:
            return self.ours.as_dict()
        numbers = self.ours.as_dict() | self.peers.as_dict(self.ours.result)
        kinds = numbers_by_kind(self.ours.kinds)
        for kind, part in self.ours.by_kind().items():
            numbers["by_kind"][kind]["peers"] = self.peers.of(kinds[kind]).as_ratios(part.result)
        return numbers


def run_grown_latency(config: GrownLatencyConfig, console: Console | None = None) -> PeerLatencyReport:
    """Measure latency, and write the requested files; as `run_latency`. A peer that fails is left out."""
    check_files(config.json, config.plot)
    started: list[Peers] = []

    @contextmanager
    def start(session: Session) -> Iterator[Peers]:
        loaded, prompts = session.llm.target.loaded, session.prompts
        max_len = prompts.longest + config.max_tokens
        with Peers(config.peers, session.models, dtype=loaded.dtype, device=loaded.device, max_len=max_len) as peers:
            peers.start(session.progress.stage)
            peers.tune(prompts.token_ids, config.sampling_params(0), session.progress.stage)
            started.append(peers)
            yield peers

    unwritten = replace(config, json=None, plot=None)
    ours = run_latency(unwritten, console, start if config.peers else None, growing(config.grow))
    report = PeerLatencyReport(replace(ours, options=options_of(config)), started[0].report() if started else None)
    write_files(report, config.json, config.plot, _plot)
    return report


def _plot(report: PeerLatencyReport, path: str | Path) -> None:
    plot_latency(report.ours, path, () if report.peers is None else report.peers.arms)


def print_grown_latency(report: PeerLatencyReport, console: Console) -> None:
    """Print our arms, then the peers."""
    print_latency(report.ours, console)
    if report.peers is not None:
        print_peers(report.ours, report.peers, console)


def run_grown_throughput(config: GrownThroughputConfig, console: Console | None = None) -> ThroughputReport:
    """Measure throughput; as `run_throughput`."""
    return run_throughput(config, console, growing(config.grow))


def run_grown_serve(config: GrownServeConfig, console: Console | None = None) -> ServeReport:
    """Measure a server under load; as `run_serve`."""
    if config.base_url is not None and config.grow is not None:
        raise ValueError("grow: the server has its model already; leave grow or base_url out")
    return run_serve(config, console, growing(config.grow))


LATENCY = replace(
    PACKAGE_LATENCY,
    config=GrownLatencyConfig,
    run="benchmarks.comparisons:run_grown_latency",
    show="benchmarks.comparisons:print_grown_latency",
    help="Compare the latency of token trees with that of plain decoding and of other engines.",
    extra=None,
)
THROUGHPUT = replace(
    PACKAGE_THROUGHPUT,
    config=GrownThroughputConfig,
    run="benchmarks.comparisons:run_grown_throughput",
    extra=None,
)
SERVE = replace(PACKAGE_SERVE, config=GrownServeConfig, run="benchmarks.comparisons:run_grown_serve", extra=None)

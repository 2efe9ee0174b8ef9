"""Latency as `specinfer bench latency` measures it, in turns with other engines on the same weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.peers.names import parse_peer
from benchmarks.peers.race import Peers
from benchmarks.peers.report import PeerReport
from specinfer.bench.comparisons import numbers_by_kind
from specinfer.bench.latency import run_latency
from specinfer.bench.latency_report import LatencyReport, plot_latency
from specinfer.bench.loop import Session, write_files
from specinfer.bench.options import CompareConfig, LatencyConfig
from specinfer.reporting.files import check_files


@dataclass(frozen=True, slots=True)
class PeerLatencyConfig(CompareConfig):
    """Options of the latency measurement with other engines.

    Attributes:
        peers: Other engines to measure in the same run, such as "llama.cpp-draft:q8_0".
    """

    peers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        CompareConfig.__post_init__(self)
        for peer in self.peers:
            parse_peer(peer, "float32")


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


def run_peer_latency(config: PeerLatencyConfig, console: Console | None = None) -> PeerLatencyReport:
    """Measure latency, and write the requested files. Progress is shown if the console is a terminal.

    Raises:
        ModelError: A model cannot be used.
        ValueError: An option cannot be used. The message names it, and nothing was measured.
        RuntimeError: A request of ours failed, or a tree changed a greedy output. A peer that fails is left out.
    """
    check_files(config.json, config.plot)
    started: list[Peers] = []

    @contextmanager
    def start(session: Session) -> Iterator[Peers]:
        loaded, prompts = session.llm.target.loaded, session.prompts
        max_len = prompts.longest + config.max_tokens
        names, params = config.peers, config.sampling_params(0)
        with Peers(names, session.models, dtype=loaded.dtype, device=loaded.device, max_len=max_len) as peers:
            peers.start(params, session.progress.stage)
            peers.tune(prompts.token_ids, params, session.progress.stage)
            started.append(peers)
            yield peers

    fields = {name: getattr(config, name) for name in CompareConfig.__dataclass_fields__}
    unwritten = LatencyConfig(**fields | {"json": None, "plot": None})
    ours = run_latency(unwritten, console, start if config.peers else None)
    files = {name: None if file is None else str(file) for name, file in (("json", config.json), ("plot", config.plot))}
    options = {**ours.options, "peers": config.peers, **files}
    report = PeerLatencyReport(replace(ours, options=options), started[0].report() if started else None)
    write_files(report, config.json, config.plot, _plot)
    return report


def _plot(report: PeerLatencyReport, path: str | Path) -> None:
    plot_latency(report.ours, path, () if report.peers is None else report.peers.arms)


if __name__ == "__main__":
    from benchmarks.program import run

    run("latency")

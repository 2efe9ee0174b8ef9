"""Streamed targets: trees and plain decoding as in `bench throughput`, and the bandwidth of the disk or the link.

Before and after each run, the streamed files are read directly, or copies to the device are timed, while nothing else
runs. Memory is the peak of this process as the operating system counts it.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.disk import DiskBandwidth, LinkBandwidth
from benchmarks.growth.models import growing
from benchmarks.options import LabSettings
from benchmarks.process import peak_resident, reset_peak
from specinfer.bench.comparisons import TOKENS_PER_PASS, ArmRow, tokens_per_second
from specinfer.bench.loop import Turn, open_session
from specinfer.bench.measurement import measure_batch
from specinfer.bench.options import SharedSettings, ThroughputConfig
from specinfer.bench.results import Arm, Run
from specinfer.cli.measure import Measurement, usual_settings
from specinfer.core.config import Offload
from specinfer.core.options import parse_size, setting, setting_of
from specinfer.engine_args import EngineArgs
from specinfer.model.offload.transfer import CudaTransfer
from specinfer.reporting.progress_bar import StageBar
from specinfer.reporting.report import Report, Table, Value, reported
from specinfer.reporting.spread import Spread

_COUNTERS = ("bytes_read", "seconds_reading", "seconds_waiting")  # of the stream, during decoding
_LEAST_BYTES = 2**20  # smallest file that is useful to time the disk with


@dataclass(frozen=True, slots=True)
class OffloadConfig(ThroughputConfig):
    """Options of the measurement of a streamed target.

    Raises:
        ValueError: A field is out of range. The message names it.
    """

    offload: Offload | None = setting_of(EngineArgs, "offload", default="disk")
    grow: str | None = setting_of(LabSettings, "grow")
    plot: str | Path | None = None
    batch_sizes: tuple[int, ...] = setting(
        (1, 16), "Sampling", "Batch size. May be repeated. (default: 1 and 16)", name="batch"
    )
    num_prompts: int = setting_of(SharedSettings, "num_prompts", default=4)
    max_tokens: int = setting_of(SharedSettings, "max_tokens", default=32)
    repeats: int = setting_of(LabSettings, "repeats", default=1)
    disk_seconds: float = setting(
        1.0, "Sampling", "Duration of each disk read measurement before and after each run.", low=0, low_open=True
    )


@reported
def run_offload(config: OffloadConfig, progress: StageBar) -> Report[None]:
    """Measure the arms on a streamed target.

    Raises:
        ModelError: A model cannot be used.
        ValueError: An option cannot be used. The message names it, and nothing was measured.
        RuntimeError: A request failed, or in float32 a tree changed a greedy output.
    """
    with open_session(config, progress, growing(config.grow)) as session:
        stream, pid = session.llm.target.loaded.stream, os.getpid()
        assert stream is not None
        yardstick = _yardstick(config, session.models.target, session.llm.target.loaded.device)
        peak_loading = peak_resident(pid)

        def counters() -> dict[str, float]:
            return {name: getattr(stream, name) for name in _COUNTERS}

        def measure(turn: Turn, name: str) -> Run:
            begun: list[dict[str, float]] = []
            before = yardstick.measure(config.disk_seconds)
            reset_peak(pid)
            policy = session.policies[len(turn.prompts), name]
            run = measure_batch(session.of_arm(name), turn, policy, lambda: begun.append(counters()), samples=False)
            found = {name: value - begun[0][name] for name, value in counters().items()}
            found["peak_resident"] = peak_resident(pid)
            found["source_rate"] = (before + yardstick.measure(config.disk_seconds)) / 2
            return replace(run, counters=found)

        measured = session.compare(measure)
        numbers = {
            "num_layers": stream.num_layers,
            "num_resident": stream.num_resident,
            "bytes_per_pass": stream.bytes_per_pass,
            "loading_peak_resident": peak_loading,
            "rates": {way: list(rates) for way, rates in yardstick.rates.items()},
            "is_direct": yardstick.is_direct,
        }
        yardstick.close()
    best = max(rate for rates in yardstick.rates.values() for rate in rates)
    budget = "" if config.memory_budget is None else f"; budget {parse_size('', config.memory_budget) / 2**20:,.0f} MiB"
    lines = [
        f"{config.model}: {measured.environment.description}; {stream.num_resident} of {stream.num_layers} layers "
        f"stay, a pass reads {stream.bytes_per_pass / 1e9:.2f} GB; {config.offload} at {best / 1e9:.2f} GB/s at "
        f"best{budget}"
    ]
    tables, environment = (_table(measured.rows),), measured.environment
    return Report(lines, tables, environment=environment, numbers=numbers, last=measured.fidelity())


def _yardstick(config: OffloadConfig, target: Path, device: torch.device) -> DiskBandwidth | LinkBandwidth:
    """Return the bandwidth measurement of the files, or the link, that layers are read through."""
    if config.offload == "cpu":
        return LinkBandwidth(CudaTransfer(device))
    copies = [] if config.offload_folder is None else [p for p in Path(config.offload_folder).rglob("*") if p.is_file()]
    large = [path for path in copies if path.stat().st_size >= _LEAST_BYTES]
    return DiskBandwidth(sorted(large or copies) or sorted(target.glob("*.safetensors")))


def _rate(arm: Arm) -> Spread:
    """Return the bytes per second streamed during decoding."""
    return arm.spread(lambda run: float(run.counters["bytes_read"]) / run.time)


def _of_source(arm: Arm) -> Spread:
    """Return the same as a share of the disk's or link's rate around the run."""
    return arm.spread(lambda run: float(run.counters["bytes_read"] / run.time / run.counters["source_rate"]))


def _peak(arm: Arm) -> int:
    return max(int(run.counters["peak_resident"]) for run in arm.runs)


def _table(rows: list[ArmRow]) -> Table[ArmRow]:
    return Table(
        "streamed",
        "A streamed target; medians of batches",
        (
            Value[ArmRow]("batch_size", lambda row: row.result.size, heading="batch"),
            Value[ArmRow]("arm", lambda row: row.arm.name),
            tokens_per_second("{:.3g}"),
            TOKENS_PER_PASS,
            Value[ArmRow]("nodes", lambda row: row.arm.nodes, "{:.1f}"),
            Value[ArmRow]("speedup", lambda row: row.result.speedup_of(row.arm), "{:.2f}"),
            Value[ArmRow]("gb_per_s", lambda row: _rate(row.arm).median / 1e9, "{:.2f}", "GB/s"),
            Value[ArmRow]("of_source", lambda row: _of_source(row.arm), "{:.0%}", "of disk"),
            Value[ArmRow]("peak_mib", lambda row: _peak(row.arm) / 2**20, "{:,.0f}", "peak MiB"),
            Value[ArmRow]("tokens_before_parting", lambda row: row.result.partings(row.arm), None),
        ),
        rows,
        "GB/s: streamed while decoding; of disk: of what direct reads, or copies, reach around the run",
    )


OFFLOAD = Measurement(
    "offload",
    OffloadConfig,
    "benchmarks.offload:run_offload",
    "Compare trees with plain decoding on an offloaded target, and its reads with the bandwidth of the disk.",
    usual=usual_settings,
)

"""Time to load quantized models: of reading the files, and of the whole load, beside transformers' own.

Both load in this process and take turns. What a load reads is in the page cache from the second turn on, but for files
that are read past it. transformers decodes most formats to full-size weights, or needs packages for them.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from specinfer.bench.options import check_whole
from specinfer.core.errors import first_line
from specinfer.model.definition import quietly
from specinfer.model.gguf.folder import weights_file
from specinfer.model.load import load_model
from specinfer.model.offload.shards import Shards
from specinfer.model.stacked_source import StackedSource
from specinfer.reporting.environment import surroundings
from specinfer.reporting.files import check_files, write_json
from specinfer.reporting.spread import Spread
from specinfer.reporting.tables import Column, print_rows
from specinfer.setup.model_names import find_target

READING, LOADING, THEIRS = "reading", "loading", "transformers"


@dataclass(frozen=True, slots=True)
class LoadingConfig:
    """Options of `load`.

    Attributes:
        models: Folders of quantized safetensors, GGUF files, or models of the hub.
        repeats: Loads of each model.
        dtype: Type of weights that are not quantized.
        json: File to write the numbers to.

    Raises:
        ValueError: A field is out of range; the message names it.
    """

    models: tuple[str, ...]
    repeats: int = 3
    dtype: str = "auto"
    json: str | Path | None = None

    def __post_init__(self) -> None:
        check_whole("repeats", self.repeats, 1, 1000)
        check_files(self.json, None)


@dataclass(frozen=True, slots=True)
class LoadedTimes:
    """Seconds of each load of one model.

    Attributes:
        types: Types of the weights, as they are computed with.
        seconds: Seconds by what was done: reading codes, the whole load (which reads, packs and checks), and
            transformers' load.
        fault: Reason why transformers does not load it, or None.
    """

    model: str
    types: str
    num_bytes: int
    seconds: dict[str, list[float]]
    fault: str | None

    def as_dict(self) -> dict[str, object]:
        spreads = {name: Spread.from_values(times).as_dict() for name, times in self.seconds.items() if times}
        return {"types": self.types, "num_bytes": self.num_bytes, "seconds": spreads, "fault": self.fault}


@dataclass(frozen=True, slots=True)
class LoadingReport:
    """Times of all models."""

    rows: tuple[LoadedTimes, ...]
    options: dict[str, object]
    environment: dict[str, object] = field(default_factory=surroundings)

    def as_dict(self) -> dict[str, object]:
        """Return the report as values that JSON can hold."""
        rows = {row.model: row.as_dict() for row in self.rows}
        return {"models": rows, "options": self.options, "environment": self.environment}


def run_loading(config: LoadingConfig) -> LoadingReport:
    """Load each model several times.

    Raises:
        ModelError: A model cannot be loaded.
    """
    rows = [_time_model(model, config) for model in config.models]
    report = LoadingReport(tuple(rows), {"repeats": config.repeats, "dtype": config.dtype})
    if config.json is not None:
        write_json(config.json, report.as_dict())
    return report


def _time_model(model: str, config: LoadingConfig) -> LoadedTimes:
    folder, fault = find_target(model), None
    loaded = load_model(folder, config.dtype, torch.device("cpu"))
    types, num_bytes = loaded.weights_type, loaded.num_bytes
    del loaded
    seconds: dict[str, list[float]] = {name: [] for name in (READING, LOADING, THEIRS)}
    for _ in range(config.repeats):
        seconds[READING].append(_timed(lambda: _read(folder)))
        seconds[LOADING].append(_timed(lambda: load_model(folder, config.dtype, torch.device("cpu"))))
        if fault is None:
            try:
                seconds[THEIRS].append(_timed(lambda: _load_theirs(folder, config.dtype)))
            except Exception as error:  # a missing package, or a format that it does not have
                fault = first_line(error)
    return LoadedTimes(model, types, num_bytes, seconds, fault)


def _timed(run: Callable[[], object]) -> float:
    gc.collect()
    started = time.perf_counter()
    found = run()
    seconds = time.perf_counter() - started
    del found
    return seconds


def _read(folder: Path) -> None:
    """Read all weights as they are stored, or decoded if kernels do not take their codes."""
    with Shards(folder) as shards:
        for source in shards.sources.values():
            if not source.has_codes:
                source.read()
            elif isinstance(source, StackedSource):
                for expert in range(len(source.experts)):
                    source.codes(expert)
            else:
                source.codes()


def _load_theirs(folder: Path, dtype: str) -> object:
    from transformers import AutoModelForCausalLM

    file = weights_file(folder)
    place, options = (folder, {}) if file is None else (file.parent, {"gguf_file": file.name})
    with quietly():
        return AutoModelForCausalLM.from_pretrained(place, dtype=dtype, local_files_only=True, **options)


def print_loading(report: LoadingReport, console: Console) -> None:
    """Print one row for each model, and why transformers does not load some."""
    columns = (
        Column[LoadedTimes]("model", lambda row: row.model, label=True),
        Column[LoadedTimes]("weights", lambda row: row.types, label=True),
        Column[LoadedTimes]("MiB", lambda row: f"{row.num_bytes / 2**20:.0f}"),
        *(Column(f"{name} s", partial(_shown, name=name)) for name in (READING, LOADING, THEIRS)),
    )
    print_rows(console, "Time to load, median", columns, report.rows)
    for row in report.rows:
        if row.fault is not None:
            console.print(f"transformers does not load {row.model}: {row.fault}", markup=False)


def _shown(row: LoadedTimes, name: str) -> str:
    times = row.seconds[name]
    return f"{Spread.from_values(times).median:.2f}" if times else "-"

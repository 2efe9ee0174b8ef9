"""Time to load a quantized model: of reading the files, and of the whole load, beside transformers' own.

Both load in this process and take turns. What a load reads is in the page cache from the second turn on, but for files
that are read past it. transformers decodes most formats to full-size weights, or needs packages for them.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.options import LabSettings
from specinfer.bench.options import SharedSettings
from specinfer.cli.measure import Measurement
from specinfer.core.errors import first_line
from specinfer.core.options import check_settings, setting_of
from specinfer.engine_args import EngineArgs
from specinfer.model.definition import quietly
from specinfer.model.gguf.folder import weights_file
from specinfer.model.load import load_model
from specinfer.model.offload.shards import Shards
from specinfer.model.stacked_source import StackedSource
from specinfer.reporting.progress_bar import StageBar
from specinfer.reporting.report import Report, Table, Value, reported
from specinfer.reporting.spread import Spread
from specinfer.setup.model_names import find_target

READING, LOADING, THEIRS = "reading", "loading", "transformers"
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class LoadingConfig:
    """Options of the measurement of a folder of quantized safetensors, a GGUF file, or a model of the hub.

    Raises:
        ValueError: A field is out of range; the message names it.
    """

    model: str = setting_of(LabSettings, "model")
    repeats: int = setting_of(LabSettings, "repeats", default=3)
    dtype: str = setting_of(EngineArgs, "dtype")
    json: str | Path | None = setting_of(SharedSettings, "json")

    def __post_init__(self) -> None:
        check_settings(self)


@reported
def run_loading(config: LoadingConfig, progress: StageBar) -> Report[None]:
    """Load the model several times: read its codes, load it whole (which reads, packs and checks), and as transformers.

    Raises:
        ModelError: The model cannot be loaded.
    """
    folder, fault = find_target(config.model), None
    loaded = load_model(folder, config.dtype, _CPU)
    types, num_bytes = loaded.weights_type, loaded.num_bytes
    del loaded
    seconds: dict[str, list[float]] = {name: [] for name in (READING, LOADING, THEIRS)}
    progress.stage("loading", config.repeats)
    for _ in range(config.repeats):
        seconds[READING].append(_timed(lambda: _read(folder)))
        seconds[LOADING].append(_timed(lambda: load_model(folder, config.dtype, _CPU)))
        if fault is None:
            try:
                seconds[THEIRS].append(_timed(lambda: _load_theirs(folder, config.dtype)))
            except Exception as error:  # a missing package, or a format that it does not have
                fault = first_line(error)
        progress.advance()
    values = (Value[str]("what", str), Value[str]("seconds", lambda name: Spread.from_values(seconds[name]), "{:.2f}"))
    table = Table("times", "Time to load, median", values, [name for name, times in seconds.items() if times])
    last = [] if fault is None else [f"transformers does not load it: {fault}"]
    lines = [f"{config.model}: {types}, {num_bytes / 2**20:.0f} MiB"]
    numbers = {"types": types, "num_bytes": num_bytes, "fault": fault}
    return Report(lines, (table,), numbers=numbers, last=last)


def _timed(run: Callable[[], object]) -> float:
    gc.collect()
    started = time.perf_counter()
    loaded = run()
    seconds = time.perf_counter() - started
    del loaded
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


LOAD = Measurement(
    "load",
    LoadingConfig,
    "benchmarks.loading:run_loading",
    "Measure the time to load a quantized model, beside transformers.",
    model="A folder of quantized safetensors, a GGUF file, or a model of the hub.",
)

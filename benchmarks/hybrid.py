"""Passes of a random model most of whose layers have no attention: trees against one row, prompts against transformers.

With `drafter` the model is one that `specinfer tune` would begin with for the embedded target, whatever its layers.

The weights are random, which changes no cost of a pass. All passes take turns, and each timed one follows an untimed
one, so ratios hold on a machine that does other work, too.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.options import MODEL, SAMPLING, SPECULATION, LabSettings
from specinfer import ops
from specinfer.bench.ceilings import Bandwidth, time_second
from specinfer.bench.options import SharedSettings
from specinfer.cli.measure import Measurement
from specinfer.core.options import check_settings, setting, setting_of
from specinfer.core.tree import TokenTree
from specinfer.learning.trainable import export
from specinfer.learning.tune.initial_weights import build, parse_initial_weights
from specinfer.model.batch import Piece
from specinfer.model.capacity import bytes_per_token
from specinfer.model.load import LoadedModel, load_model
from specinfer.model.pass_work import read_bytes
from specinfer.model.recurrent.layers import state_bytes
from specinfer.model.recurrent.states import ROWS_PER_REQUEST
from specinfer.model.runner import ModelRunner
from specinfer.reporting.progress_bar import StageBar
from specinfer.reporting.report import Report, Table, Value, reported
from specinfer.reporting.spread import Spread
from specinfer.setup.model_names import find_target

# About 50 million parameters a layer, Mamba half as many; every fourth has attention, where a family has any.
_WIDE = {"hidden_size": 2048, "intermediate_size": 4096, "vocab_size": 65536, "tie_word_embeddings": True}
_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256}
_MAMBA = {"mamba_n_heads": 64, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_expand": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _WIDE | _HEADS | {"linear_num_key_heads": 16, "linear_num_value_heads": 16},
    "bamba": _WIDE | _MAMBA | {"num_attention_heads": 16, "num_key_value_heads": 4},
    "lfm2": _WIDE | {"num_attention_heads": 16, "num_key_value_heads": 4, "block_auto_adjust_ff_dim": False},
    "mamba": {"hidden_size": 2048, "vocab_size": 65536, "tie_word_embeddings": True},
    "mamba2": _WIDE | {"num_heads": 64, "head_dim": 64, "n_groups": 1},
}
# Layers without attention, by the name that families give them.
_OTHERS = {"lfm2": "conv"}
_ALIKE = ("mamba", "mamba2")  # families whose layers are all of one kind
_NUM_REQUESTS, _NODES = 8, 16  # of the memory that is reported
_THEIRS = "transformers"


@dataclass(frozen=True, slots=True)
class HybridConfig:
    """Options of the measurement.

    Raises:
        ValueError: A field is out of range. The message names it.
    """

    family: str = setting("qwen3_5_text", MODEL, "Family: {choices}.", choices=tuple(FAMILIES))
    layers: int = setting(20, MODEL, "Number of layers; 20 make about a billion parameters.", low=4)
    drafter: str | None = setting(
        None,
        MODEL,
        "Initial weights of a drafter for the embedded target, as of tune: new:hybrid:4x512.",
        metavar="START",
    )
    rows: tuple[int, ...] = setting(
        (8, 16), SPECULATION, "Number of nodes of a tree. May be repeated. (default: 8 and 16)"
    )
    prompt: int = setting(450, SPECULATION, "Number of tokens of the prompt.", low=1)
    context: int = setting(256, SPECULATION, "Number of tokens before a tree.", low=1)
    repeats: int = setting_of(LabSettings, "repeats")
    compares: bool = setting(True, SAMPLING, "Compute the prompt with transformers, too.", name="compare")
    json: str | Path | None = setting_of(SharedSettings, "json")

    def __post_init__(self) -> None:
        check_settings(self)
        if self.drafter is not None and parse_initial_weights(self.drafter).is_head:
            raise ValueError(
                f"drafter: {self.drafter} reads hidden states of a target; give new:hybrid, new:N or layers:N"
            )


@reported
def run_hybrid(config: HybridConfig, progress: StageBar) -> Report[None]:
    """Measure the passes."""
    cpu = torch.device("cpu")
    with _random_folder(config) as folder:
        progress.stage("loading")
        loaded = load_model(folder, torch.bfloat16, cpu)
        passes = {f"tree of {size}": _tree(loaded, size, config.context) for size in (1, *config.rows)}
        passes |= {f"prompt of {config.prompt}": _prompt(loaded, config.prompt)}
        if config.compares:
            passes[_THEIRS] = _theirs(folder, loaded.vocab_size, config.prompt)
        bandwidth = Bandwidth(cpu)
        seconds: dict[str, list[float]] = {name: [] for name in passes}
        progress.stage("measuring", config.repeats * len(passes))
        for _ in range(config.repeats):
            bandwidth.measure()
            for name, run in passes.items():
                seconds[name].append(time_second(cpu, run))
                progress.advance()
        return _report(loaded, seconds, max(max(rates) for rates in bandwidth.rates.values()), config)


def _report(loaded: LoadedModel, seconds: dict[str, list[float]], rate: float, config: HybridConfig) -> Report[None]:
    def relative(name: str) -> Spread:
        """Return the time over that of one row, or of a prompt that of transformers over it, in each round."""
        base = "tree of 1" if name.startswith("tree") or _THEIRS not in seconds else _THEIRS
        return Spread.from_values(a / b for a, b in zip(seconds[name], seconds[base], strict=True))

    state, token = state_bytes(loaded.model), bytes_per_token([loaded])
    times = Table(
        "passes",
        "Passes; medians",
        (
            Value[str]("pass", str),
            Value[str]("ms", lambda name: Spread.from_values(1000 * each for each in seconds[name]), "{:.1f}"),
            Value[str]("relative", relative, "{:.2f}", "of 1 row, or transformers"),
        ),
        list(seconds),
    )
    sizes = {
        "weights": read_bytes(loaded),
        "one state": state,
        f"states of {_NUM_REQUESTS} requests": ROWS_PER_REQUEST * _NUM_REQUESTS * state,
        f"slots of {_NUM_REQUESTS} trees of {_NODES} nodes": _NUM_REQUESTS * _NODES * token,
        "a state for each of these nodes instead": _NUM_REQUESTS * _NODES * state,
    }
    values = (Value[str]("what", str), Value[str]("mib", lambda name: sizes[name] / 2**20, "{:,.1f}", "MiB"))
    memory = Table("memory", "Memory", values, list(sizes))
    of_floor = Spread.from_values(seconds["tree of 1"]).median * rate / sizes["weights"]
    name = config.drafter or f"{config.family}, {config.layers} layers"
    lines = [
        f"{name}: {loaded.num_parameters / 1e6:,.1f} million random bfloat16 weights; {ops.describe()}",
        f"one row takes {of_floor:.2f} of the time of reading the weights at {rate / 1e9:.1f} GB/s",
    ]
    numbers = {"parameters": loaded.num_parameters, "one_row_of_reading": of_floor}
    return Report(lines, (times, memory), numbers=numbers)


@contextmanager
def _random_folder(config: HybridConfig) -> Iterator[Path]:
    """Write a random model for the time of a measurement."""
    folder = Path(tempfile.mkdtemp(prefix="hybrid-"))
    try:
        if config.drafter is None:
            _write_random(config, folder)
        else:
            target = find_target("demo")
            export(build(parse_initial_weights(config.drafter), target, 0), folder, target)
        yield folder
    finally:
        shutil.rmtree(folder)


def _write_random(config: HybridConfig, folder: Path) -> None:
    fields = FAMILIES[config.family] | {"num_hidden_layers": config.layers}
    attending = list(range(3, config.layers, 4))
    if config.family == "bamba":
        fields = fields | {"attn_layer_indices": attending}
    elif config.family not in _ALIKE:
        other = _OTHERS.get(config.family, "linear_attention")
        types = ["full_attention" if i in attending else other for i in range(config.layers)]
        fields = fields | {"layer_types": types}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.family, **fields), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["model_type"] == config.family


def _tree(loaded: LoadedModel, size: int, context: int) -> Callable[[], None]:
    """Return a pass over a tree, whose request continues from the state before its root."""
    source = np.random.default_rng(size)
    tokens = source.integers(loaded.vocab_size, size=context + size).tolist()
    parents = (-1, *(int(source.integers(node)) for node in range(1, size)))
    runner, slots = ModelRunner(loaded, context + size), np.arange(context + size)
    runner.forward([Piece.from_span(tokens[:context], None, slots[:0], slots[:context])])
    tree = TokenTree(tuple(tokens[context:]), parents)
    piece = Piece.from_span(tokens[context : context + 1], tree, slots[:context], slots[context:])
    return lambda: _checked(runner, piece)


def _prompt(loaded: LoadedModel, size: int) -> Callable[[], None]:
    tokens = np.random.default_rng(0).integers(loaded.vocab_size, size=size).tolist()
    runner, slots = ModelRunner(loaded, size), np.arange(size)
    piece = Piece.from_span(tokens, TokenTree.root(tokens[-1]), slots[:0], slots)
    return lambda: _checked(runner, piece)


def _checked(runner: ModelRunner, piece: Piece) -> None:
    if not bool(runner.forward([piece])[-1].isfinite().all()):
        raise RuntimeError("a pass gave values that are no numbers")


def _theirs(folder: Path, vocab_size: int, size: int) -> Callable[[], None]:
    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    ids = torch.from_numpy(np.random.default_rng(0).integers(vocab_size, size=(1, size)))

    def run() -> None:
        with torch.inference_mode():
            model(input_ids=ids, use_cache=True, logits_to_keep=1)

    return run


HYBRID = Measurement(
    "hybrid",
    HybridConfig,
    "benchmarks.hybrid:run_hybrid",
    "Measure passes of a random model with layers without attention: trees, prompts, and the memory of states.",
    model=None,
)

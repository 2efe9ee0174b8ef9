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
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from specinfer import ops
from specinfer.bench.bandwidth import Bandwidth
from specinfer.bench.clock import now
from specinfer.bench.options import check_whole
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
from specinfer.reporting.environment import surroundings
from specinfer.reporting.files import check_files, write_json
from specinfer.reporting.progress_bar import stage_bar
from specinfer.setup.model_names import find_target

# About 50 million parameters a layer, Mamba half as many; every fourth has attention, where a family has any.
_WIDE = {"hidden_size": 2048, "intermediate_size": 4096, "vocab_size": 65536, "tie_word_embeddings": True}
_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256}
_MAMBA = {"mamba_n_heads": 64, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_expand": 2}
_EXPERTS = {
    "hidden_size": 1024, "intermediate_size": 512, "vocab_size": 65536, "tie_word_embeddings": True,
    "num_experts_per_tok": 8, "num_attention_heads": 8, "num_key_value_heads": 2,
}  # fmt: skip
_DELTA_EXPERTS = _EXPERTS | {
    "num_experts": 32, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "head_dim": 128,
    "linear_num_key_heads": 8, "linear_num_value_heads": 16,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _WIDE | _HEADS | {"linear_num_key_heads": 16, "linear_num_value_heads": 16},
    "bamba": _WIDE | _MAMBA | {"num_attention_heads": 16, "num_key_value_heads": 4},
    "lfm2": _WIDE | {"num_attention_heads": 16, "num_key_value_heads": 4, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": _EXPERTS | {"num_experts": 32, "moe_intermediate_size": 512, "num_dense_layers": 1},
    "mamba": {"hidden_size": 2048, "vocab_size": 65536, "tie_word_embeddings": True},
    "mamba2": _WIDE | {"num_heads": 64, "head_dim": 64, "n_groups": 1},
    "falcon_h1": _WIDE | _MAMBA | {"num_attention_heads": 16, "num_key_value_heads": 4, "mamba_d_ssm": 4096},
    "nemotron_h": _WIDE
    | {"intermediate_size": 8192, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128}
    | {"mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 1},
    "granitemoehybrid": _EXPERTS
    | _MAMBA
    | {"mamba_n_heads": 32, "num_local_experts": 32, "shared_intermediate_size": 1024},
    "qwen3_next": _DELTA_EXPERTS,
    "qwen3_5_moe_text": _DELTA_EXPERTS,
}
# Layers without attention, by the name that families give them.
_OTHERS = {"lfm2": "conv", "lfm2_moe": "conv", "granitemoehybrid": "mamba"}
_ALIKE = ("mamba", "mamba2", "falcon_h1")  # families whose layers are all of one kind
_NUM_REQUESTS, _NODES = 8, 16  # of the memory that is reported


@dataclass(frozen=True, slots=True)
class HybridConfig:
    """Options of the measurement.

    Attributes:
        family: One of `FAMILIES`.
        layers: Number of layers; 20 make about a billion parameters.
        drafter: The initial weights of a drafter to measure instead of a family, such as "new:hybrid:4x512".
        rows: Numbers of nodes of the trees, beside one.
        prompt: Tokens of the prompt.
        context: Tokens before a tree.
        repeats: Timed passes of each kind.
        compares: Whether transformers computes the prompt, too, which takes the memory of another copy.
        json: File to write the numbers to.

    Raises:
        ValueError: A field is out of range. The message names it.
    """

    family: str = "qwen3_5_text"
    layers: int = 20
    drafter: str | None = None
    rows: tuple[int, ...] = (8, 16)
    prompt: int = 450
    context: int = 256
    repeats: int = 7
    compares: bool = True
    json: str | Path | None = None

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"family: {self.family!r} is none of {', '.join(FAMILIES)}")
        if self.drafter is not None and parse_initial_weights(self.drafter).is_head:
            raise ValueError(
                f"drafter: {self.drafter} reads hidden states of a target; give new:hybrid, new:N or layers:N"
            )
        for name, least in (("layers", 4), ("prompt", 1), ("context", 1), ("repeats", 1)):
            check_whole(name, getattr(self, name), least, 2**14)


def run_hybrid(config: HybridConfig, console: Console | None = None) -> dict[str, Any]:
    """Measure, write the requested file, and return the numbers; times are in milliseconds.

    Raises:
        ValueError: The file cannot be written.
    """
    check_files(config.json, None)
    with stage_bar(console) as progress, _random_folder(config) as folder:
        progress.stage("loading")
        loaded = load_model(folder, torch.bfloat16, torch.device("cpu"))
        passes = {f"tree of {size}": _tree(loaded, size, config.context) for size in (1, *config.rows)}
        passes |= {f"prompt of {config.prompt}": _prompt(loaded, config.prompt)}
        if config.compares:
            passes["transformers"] = _theirs(folder, loaded.vocab_size, config.prompt)
        bandwidth = Bandwidth(torch.device("cpu"))
        times: dict[str, list[float]] = {name: [] for name in passes}
        progress.stage("measuring", config.repeats * len(passes))
        for _ in range(config.repeats):
            bandwidth.measure()
            for name, run in passes.items():
                run()
                started = now(torch.device("cpu"))
                run()
                times[name].append(1000 * (now(torch.device("cpu")) - started))
                progress.advance()
        result = _report(loaded, times, max(max(rates) for rates in bandwidth.rates.values()), config)
    if config.json is not None:
        write_json(config.json, result)
    return result


def _report(
    loaded: LoadedModel, times: dict[str, list[float]], bandwidth: float, config: HybridConfig
) -> dict[str, Any]:
    one = times["tree of 1"]
    ratios = {f"T({n})/T(1)": _ratio(times[f"tree of {n}"], one) for n in config.rows}
    if config.compares:
        ratios["prompt, to transformers"] = _ratio(times[f"prompt of {config.prompt}"], times["transformers"])
    ratios["one row, to reading the weights at the best bandwidth"] = (
        median(one) / 1000 * bandwidth / read_bytes(loaded)
    )
    state, token = state_bytes(loaded.model), bytes_per_token([loaded])
    return {
        "ms": {name: median(values) for name, values in times.items()},
        "ratios": ratios,
        "bytes": {
            "weights": read_bytes(loaded),
            "one state": state,
            f"states of {_NUM_REQUESTS} requests": ROWS_PER_REQUEST * _NUM_REQUESTS * state,
            f"slots of {_NUM_REQUESTS} trees of {_NODES} nodes": _NUM_REQUESTS * _NODES * token,
            "a state for each of these nodes instead": _NUM_REQUESTS * _NODES * state,
        },
        "parameters": loaded.num_parameters,
        "kernels": ops.describe(),
        "options": asdict(config) | {"json": None if config.json is None else str(config.json)},
        "environment": surroundings(),
    }


def _ratio(times: list[float], others: list[float]) -> float:
    """Return the median of the ratios of passes in the same round."""
    return median(a / b for a, b in zip(times, others, strict=True))


def print_hybrid(report: dict[str, Any], console: Console) -> None:
    """Print times, ratios and memory."""
    options = report["options"]
    name = options["drafter"] or f"{options['family']}, {options['layers']} layers"
    console.print(f"{name}: {report['parameters'] / 1e6:,.1f} million random bfloat16 weights")
    console.print(f"{report['kernels']}; {report['environment']['num_threads']} threads")
    for name, value in report["ms"].items():
        console.print(f"{name:>56} {value:10.1f} ms")
    for name, value in report["ratios"].items():
        console.print(f"{name:>56} {value:10.2f}")
    for name, value in report["bytes"].items():
        console.print(f"{name:>56} {value / 2**20:10.1f} MiB")


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
        other, own = _OTHERS.get(config.family, "linear_attention"), "full_attention"
        own = "attention" if other == "mamba" else own
        types = [own if i in attending else other for i in range(config.layers)]
        if config.family == "nemotron_h":  # half of its layers are MLPs
            types = [one if i % 2 == 0 or i in attending else "mlp" for i, one in enumerate(types)]
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
    runner.forward([Piece.of_span(tokens[:context], None, slots[:0], slots[:context])])
    tree = TokenTree(tuple(tokens[context:]), parents)
    piece = Piece.of_span(tokens[context : context + 1], tree, slots[:context], slots[context:])
    return lambda: _checked(runner, piece)


def _prompt(loaded: LoadedModel, size: int) -> Callable[[], None]:
    tokens = np.random.default_rng(0).integers(loaded.vocab_size, size=size).tolist()
    runner, slots = ModelRunner(loaded, size), np.arange(size)
    piece = Piece.of_span(tokens, TokenTree.root(tokens[-1]), slots[:0], slots)
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


if __name__ == "__main__":
    from benchmarks.program import run

    run("hybrid")

"""Models whose layers are streamed, and the text that they generate."""

from pathlib import Path
from typing import Any

import torch

from specinfer.core.config import OffloadConfig
from specinfer.core.sampling import SamplingParams
from specinfer.model.load import LoadedModel, load_model
from specinfer.model.offload.streamed_layer import LayerStream
from specinfer.model.runner import ModelRunner
from tiny import make_engine, make_request, random_prompts, run, save_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
_DEPTHS = {"bloom": "n_layer", "gpt2": "n_layer", "gpt_bigcode": "n_layer", "mpt": "n_layers"}


def save_deep(folder: Path, family: str = "llama", num_layers: int = 6) -> Path:
    if family == "gemma3_text":  # its layers are listed
        types = ["sliding_attention", "full_attention"] * 3
        return save_model(folder, family, num_hidden_layers=num_layers, layer_types=types[:num_layers])
    return save_model(folder, family, **{_DEPTHS.get(family, "num_hidden_layers"): num_layers})


def load_streamed(
    folder: Path, num_resident: int = 0, dtype: torch.dtype = torch.float32, quantization: str | None = None,
    **options: Any,
) -> ModelRunner:  # fmt: skip
    """Options are those of `OffloadConfig`."""
    offload = OffloadConfig("disk", **options)
    return settled(load_model(folder, dtype, torch.device("cpu"), quantization, offload=offload), num_resident)


def settled(loaded: LoadedModel, num_resident: int) -> ModelRunner:
    """A runner of a model that keeps so many layers in memory, or all if the ring has room for the others."""
    assert loaded.stream is not None
    loaded.stream.settle(num_resident * loaded.stream.buffer_bytes)
    return ModelRunner(loaded, 2048)


def stream_of(runner: ModelRunner) -> LayerStream:
    assert runner.loaded.stream is not None
    return runner.loaded.stream


def serve(runner: ModelRunner, params: SamplingParams = GREEDY, **settings: Any) -> list[list[int]]:
    """Tokens of three requests, by the settings of `make_engine`."""
    requests = [make_request(str(i), p, params, seed=i) for i, p in enumerate(random_prompts([5, 30, 3]))]
    return run(make_engine(runner, **settings), requests)


def generated(runner: ModelRunner, temperature: float = 0.0) -> list[list[int]]:
    """The same with prompts in chunks."""
    return serve(runner, SamplingParams(temperature=temperature, max_tokens=8), max_num_batched_tokens=20)

"""The matrices of a PEFT folder, checked against the linear layers of a model before they are read."""

import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specinfer.core.errors import ModelError
from specinfer.model.adapters.peft_config import PeftConfig, read_config

_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_KEY = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(A|B)(?:\.default)?\.weight")
_SPARE_BYTES = 1 << 24  # of a header, and of tensors that are named in a refusal


class Pair(NamedTuple):
    """The matrices of one linear layer, which gets `up @ down` added; `up` has the factor of the adapter."""

    down: Tensor  # [rank, inputs] float32
    up: Tensor  # [outputs, rank] float32


class Shape(NamedTuple):
    """Size of a linear layer."""

    inputs: int
    outputs: int


def read_adapter(folder: Path, linears: Mapping[str, Shape], max_rank: int) -> tuple[PeftConfig, dict[str, Pair]]:
    """Read an adapter.

    Args:
        linears: Linear layers of the model that an adapter may change.

    Returns:
        Its configuration, and its matrices by the name of the linear layer.

    Raises:
        ModelError: It cannot be read, does not fit the model, or has a feature that cannot be applied.
    """
    config = read_config(folder, linears)
    for rank in (config.rank, *(value for _, value in config.rank_pattern)):
        if rank > max_rank:
            raise ModelError(f"lora_path: {folder} has rank {rank}, more than max_lora_rank {max_rank}; raise that")
    file = next((folder / name for name in _FILES if (folder / name).is_file()), None)
    if file is None:
        raise ModelError(f"lora_path: {folder} has no {_FILES[0]}")
    largest = sum((one.inputs + one.outputs) * max_rank * 4 for one in linears.values())
    if file.stat().st_size > largest + _SPARE_BYTES:
        raise ModelError(f"lora_path: {file} is larger than an adapter of rank {max_rank} of this model can be")
    tensors = _read(file)
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None or match[1] not in linears:
            raise ModelError(
                f"lora_path: {file}: {key} belongs to no linear layer inside the decoder layers of this model; use the "
                "model that it was trained with, or merge it with peft's merge_and_unload"
            )
        found.setdefault(match[1], {})[match[2]] = tensor
    if missing := sorted(config.targeted(linears) - found.keys()):
        raise ModelError(f"lora_path: {file} has no tensors for {missing[0]}, which target_modules name")
    if not found:
        raise ModelError(f"lora_path: {file} has no tensors")
    return config, {name: _pair(file, name, parts, linears[name], config) for name, parts in found.items()}


def _read(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as stored:
                return {key: stored.get_tensor(key) for key in stored.keys()}  # noqa: SIM118 - it is no dict
        tensors = torch.load(file, map_location="cpu", weights_only=True)  # refuses all but tensors
    except (OSError, SafetensorError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        first = str(error).partition("\n")[0]
        raise ModelError(f"lora_path: {file} cannot be read: {first:.200}") from error
    if not isinstance(tensors, dict) or not all(isinstance(one, Tensor) for one in tensors.values()):
        raise ModelError(f"lora_path: {file} cannot be read: it is not a dict of tensors")
    return {str(key): tensor for key, tensor in tensors.items()}


def _pair(file: Path, name: str, parts: Mapping[str, Tensor], shape: Shape, config: PeftConfig) -> Pair:
    """Return the matrices of a linear layer after a check of their shapes and numbers."""
    rank = config.rank_of(name)
    wanted = {"A": (rank, shape.inputs), "B": (shape.outputs, rank)}
    for part, size in wanted.items():
        if part not in parts:
            raise ModelError(f"lora_path: {file} has no tensor {name}.lora_{part}.weight, only the other one")
        tensor = parts[part]
        if tuple(tensor.shape) != size or not tensor.is_floating_point():
            raise ModelError(
                f"lora_path: {file}: {name}.lora_{part}.weight is {list(tensor.shape)} of {tensor.dtype}, and should "
                f"be {list(size)}; use the model that it was trained with"
            )
        if not tensor.isfinite().all():
            raise ModelError(f"lora_path: {file}: {name}.lora_{part}.weight has values that are not finite")
    up = parts["B"].double() * config.scale_of(name)
    return Pair(parts["A"].float(), up.float())

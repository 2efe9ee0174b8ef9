"""Weights of quantized checkpoints as a model's weights, decoded a matrix at a time."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from specinfer.core.errors import ModelError
from specinfer.hub.files import already_quantized, quantization_settings, read_object
from specinfer.model.quantized.floats import GPT_OSS
from specinfer.model.quantized.format import Format, Tensors
from specinfer.model.quantized.formats import choose, find_formats
from specinfer.model.quantized.settings import unread_field
from specinfer.model.stacked_source import STACKED, TRANSPOSED, StackedSource, stacked
from specinfer.ops import QuantizedWeight

T = TypeVar("T")
# What decoding raises where tensors do not fit each other.
_MISFITS = (RuntimeError, IndexError, ValueError, ZeroDivisionError, KeyError, TypeError)
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def is_quantized(folder: Path) -> bool:
    """Return whether the weights of a folder of safetensors are quantized."""
    return quantization_settings(read_object(folder / "config.json") or {}) is not None


@dataclass(frozen=True, slots=True)
class DecodedSource:
    """A weight that is stored as several tensors.

    Attributes:
        layer: Name of the layer, for messages.
        stored: Sources of the tensors, by the ends of their names.
    """

    layer: str
    format: Format
    stored: Mapping[str, Any]
    shape: tuple[int, int]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def has_codes(self) -> bool:
        """True if our kernels take the codes and scales as they are."""
        tensors = {name: source.read() for name, source in self.stored.items() if name != self.format.names[0]}
        with contextlib.suppress(*_MISFITS):  # which `read` reports
            return self.format.keeps(tensors, self.shape)
        return False

    def codes(self) -> tuple[str, QuantizedWeight]:
        """Read the whole weight as it is stored, and return its type's name, too.

        Raises:
            ModelError: The tensors do not fit each other.
            WeightsError: A file cannot be read.
        """
        weight = self._made(self.format.quantized)
        self._check((weight.out_features, weight.in_features))
        return self.format.kind, weight

    def outline(self) -> tuple[str, QuantizedWeight]:
        """Return what `codes` does, on the meta device."""
        kind, weight = self.codes()
        return kind, weight.outline(self.shape[0])

    def read(self) -> Tensor:
        """Read and decode the whole weight.

        Raises:
            ModelError: The tensors do not fit each other.
            WeightsError: A file cannot be read.
        """
        weight = self._made(self.format.decode)
        self._check(tuple(weight.shape))
        return weight.to(self.dtype)

    def _made(self, make: Callable[[Tensors], T]) -> T:
        tensors = {name: source.read() for name, source in self.stored.items()}
        try:
            return make(tensors)
        except _MISFITS as error:
            fault = f"quantized weights of {self.layer} do not fit each other: {str(error)[:200]}"
            raise ModelError(f"model: {fault}; fetch the model again") from error

    def _check(self, shape: tuple[int, ...]) -> None:
        if shape != self.shape:
            raise ModelError(
                f"model: quantized weights of {self.layer} give {shape}, not {self.shape}; fetch the model again"
            )


def with_decoded(sources: Mapping[str, Any], folder: Path, dtype: torch.dtype | None) -> dict[str, Any]:
    """Return the sources of a folder, with one for each quantized weight in place of its tensors.

    Args:
        dtype: Type that weights are decoded to, or None for that of config.json.

    Raises:
        ModelError: The format is not read, or a tensor is missing.
    """
    config = read_object(folder / "config.json") or {}
    settings = quantization_settings(config)
    if settings is None:
        return dict(sources)
    usual = _DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")), torch.bfloat16)
    if settings.get("quant_method") == "mxfp4" and any(name.endswith("_blocks") for name in sources):
        return _with_stacks(sources, dtype or usual)
    formats = find_formats(settings)
    if not formats:
        raise ModelError(f"model: {folder}: {already_quantized(settings, unread_field(settings))}")
    result = dict(sources)
    for layer in _layers(formats, sources):
        found, own = _stored(formats, sources, layer)
        for end in own:
            del result[f"{layer}.{end}"]
        result[f"{layer}.weight"] = DecodedSource(layer, found, own, _shape(found, own, layer), dtype or usual)
    family = config.get("model_type")
    return stacked(result, is_transposed=family in TRANSPOSED) if family in STACKED else result


def _layers(formats: Sequence[Format], sources: Mapping[str, Any]) -> list[str]:
    """Return the names of the layers that are quantized."""
    layers = {}
    for name in sources:
        layer, _, end = name.rpartition(".")
        for one in formats if layer else ():
            if end == one.names[0] and (end != "weight" or f"{layer}.{one.names[1]}" in sources):
                layers[layer] = True
    return list(layers)


def _stored(formats: Sequence[Format], sources: Mapping[str, Any], layer: str) -> tuple[Format, dict[str, Any]]:
    """Return the format of a layer, and the sources of its tensors by the ends of their names."""
    ends = dict.fromkeys(end for one in formats for end in (*one.names, *one.others))
    given = {end: sources[f"{layer}.{end}"] for end in ends if f"{layer}.{end}" in sources}
    found = choose(formats, given)
    near = found or next(one for one in formats if one.names[0] in given)
    if missing := [end for end in near.names if end not in given]:
        raise ModelError(f"model: tensor {layer}.{missing[0]} is missing; fetch the model again")
    if found is None:
        raise ModelError(
            f"model: the tensors of {layer} have the sizes of none, or of several, of the formats that "
            "quantization_config of config.json lists; fetch the model again"
        )
    return found, {end: source for end, source in given.items() if end in (*found.names, *found.others)}


def _with_stacks(sources: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return the sources of gpt-oss, with one for each stack of experts in place of its blocks and scales."""
    ends = {end: f"_{end}" for end in GPT_OSS.names}
    result = {name: source for name, source in sources.items() if not name.endswith(tuple(ends.values()))}
    for name in (name.removesuffix(ends["blocks"]) for name in sources if name.endswith(ends["blocks"])):
        if f"{name}{ends['scales']}" not in sources:
            raise ModelError(f"model: tensor {name}{ends['scales']} is missing; fetch the model again")
        stored = {end: sources[f"{name}{suffix}"] for end, suffix in ends.items()}
        scales = stored["scales"]
        if stored["blocks"].shape != (*scales.shape, 16) or len(scales.shape) != 3:
            raise ModelError(f"model: the tensors of {name} have shapes that no weight has; fetch the model again")
        each = [{end: source.rows(range(i, i + 1)) for end, source in stored.items()} for i in range(scales.shape[0])]
        result[name] = StackedSource([[DecodedSource(name, GPT_OSS, own, GPT_OSS.shape(own), dtype)] for own in each])
    return result


def _shape(found: Format, stored: Mapping[str, Any], layer: str) -> tuple[int, int]:
    try:
        shape = found.shape(stored)
        if min(shape) < 1:
            raise ValueError(f"a weight of {shape}")
        return shape
    except _MISFITS as error:
        fault = f"the tensors of {layer} have shapes that no weight has ({str(error)[:100]})"
        raise ModelError(f"model: {fault}; fetch the model again") from error

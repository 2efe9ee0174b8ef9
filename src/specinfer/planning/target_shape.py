"""The sizes of a model that decide the time of a pass, counted in its files' headers, and the bytes of a weight."""

import re
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Self

import torch

from specinfer.model.definition import load_config, outline
from specinfer.model.folder import weight_shapes
from specinfer.model.recurrent.layers import has_stages, num_attending, replace_layers, slot_numbers, state_bytes
from specinfer.policy.offload_choice import BYTES_PER_WEIGHT, layer_weights

_LAYER_WEIGHT = re.compile(r"\b(?:layers|h|blocks)\.\d+\.")
BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, **BYTES_PER_WEIGHT}


def mean_bytes(folder: Path, dtype: str, quantization: str | None, device: torch.device) -> float:
    """Return the bytes of a weight of the decoder layers, on average: experts may stay as they are.

    Args:
        dtype: Name of the number type of weights that are not quantized.
    """
    if quantization is None:
        return BYTES[dtype]
    rounded, kept, _ = layer_weights(folder, device, quantization)
    return (BYTES[quantization] * rounded + BYTES[dtype] * kept) / (rounded + kept)


@dataclass(frozen=True, slots=True)
class TargetShape:
    """Sizes of a model that matter for the time of its passes, whole or split.

    Attributes:
        width: Width of the hidden states.
        layer_parameters: Parameters of one decoder layer; `kv_parameters` of these compute keys and values. Both are
            means over the layers, some of which may have no attention.
        head_parameters: Parameters of the output head.
        bytes_per_parameter: Bytes of one parameter in memory.
        by_layers: Whether the target can be split into stages.
        state_bytes: Bytes of the states of all recurrent layers of one request.
        slot_numbers: Numbers that recurrent layers store for each token.
    """

    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    layer_parameters: int
    kv_parameters: int
    head_parameters: int
    bytes_per_parameter: float
    by_layers: bool = True
    state_bytes: int = 0
    slot_numbers: int = 0

    @classmethod
    def from_folder(cls, folder: Path, bytes_per_parameter: float) -> Self:
        """Return the shape of the target in a folder, counted in the headers of its weight files."""
        config = load_config(folder).get_text_config()
        in_layers = sum(prod(shape) for name, shape in weight_shapes(folder).items() if _LAYER_WEIGHT.search(name))
        width, num_heads = config.hidden_size, getattr(config, "num_attention_heads", 1)  # 1: it has no attention
        num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
        head_dim = getattr(config, "head_dim", None) or width // num_heads
        recurrent = replace_layers(outline(folder)) if num_attending(config) < config.num_hidden_layers else None
        return cls(
            num_layers=config.num_hidden_layers,
            width=width,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            layer_parameters=in_layers // config.num_hidden_layers,
            kv_parameters=2 * width * num_kv_heads * head_dim * num_attending(config) // config.num_hidden_layers,
            head_parameters=config.vocab_size * width,
            bytes_per_parameter=bytes_per_parameter,
            by_layers=has_stages(config),
            state_bytes=0 if recurrent is None else state_bytes(recurrent),
            slot_numbers=0 if recurrent is None else slot_numbers(recurrent),
        )

    @property
    def num_bytes(self) -> float:
        """Bytes of weights that a pass reads."""
        return self.bytes_per_parameter * (self.num_layers * self.layer_parameters + self.head_parameters)

    @property
    def head_share(self) -> float:
        """Share of the output head in the bytes of a pass."""
        return self.bytes_per_parameter * self.head_parameters / self.num_bytes

"""The bytes that a weight takes in memory, by number type and quantization."""

from pathlib import Path

import torch

from specinfer.policy.offload_choice import BYTES_PER_WEIGHT, layer_weights

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

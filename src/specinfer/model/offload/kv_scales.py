"""Scales of checkpoints for keys and values of 8 bits, as vLLM reads them."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from specinfer.core.errors import ModelError
from specinfer.model.kv_tensors import LayerShape
from specinfer.model.offload.shards import Shards
from specinfer.model.quantized.sources import is_quantized
from specinfer.ops.kv_types import KVScales

# `kv_scale` is the older name, of both. It may be of the attention, or of a linear layer in it.
_NAME = re.compile(r"\blayers\.(\d+)\.(?:\w+\.)+(k|v|kv)_scale")


def with_scales(shapes: Sequence[LayerShape], folder: Path, layers: range) -> tuple[LayerShape, ...]:
    """Return the shapes of these layers with the scales of a checkpoint; where it has none, they are 1.

    Raises:
        ModelError: A scale is not a single number above 0.
    """
    if len(shapes) != len(layers) or not is_quantized(folder):
        return tuple(shapes)
    found: dict[int, dict[str, float]] = {}
    with Shards(folder) as shards:
        for name, source in shards.sources.items():
            if (match := _NAME.fullmatch(name.removeprefix("model."))) is None or int(match[1]) not in layers:
                continue
            numbers = source.read().flatten().float()
            if len(numbers) != 1:
                raise ModelError(f"model: {name} has {len(numbers)} numbers, and only one for a whole layer is read")
            scale = float(numbers[0])
            if scale > 0 and math.isfinite(scale):  # others stand for none
                found.setdefault(int(match[1]), {})[match[2]] = scale
    return tuple(
        replace(shape, scales=_scales(found[layer])) if layer in found else shape
        for shape, layer in zip(shapes, layers, strict=True)
    )


def _scales(found: dict[str, float]) -> KVScales:
    """Return a layer's scales; one alone is that of keys and of values."""
    key, value = (found.get(kind, found.get("kv")) for kind in ("k", "v"))
    return KVScales(key or value or 1.0, value or key or 1.0)

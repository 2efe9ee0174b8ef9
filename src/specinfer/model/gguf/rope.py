"""Rotations of queries and keys by the metadata of a GGUF file."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from specinfer.model.gguf.header import GgufError, GgufHeader
from specinfer.model.gguf.metadata import TAKE_ANOTHER, Metadata
from specinfer.model.gguf.weights import read_tensor

LONGROPE = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
LLAMA3 = "rope_freqs.weight"


def read_rope(meta: Metadata, rotated: int) -> dict[str, Any]:
    """Return `rope_parameters` of config.json for heads of which this many numbers are rotated.

    Raises:
        GgufError: Positions are scaled in a way that is not read.
    """
    tensors = meta.header.tensors
    theta, scaling = meta.positive("rope.freq_base", 10000.0), meta.get("rope.scaling.type", str, "none")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if not tensors.keys().isdisjoint(LONGROPE.values()):
        rope |= _longrope(meta, rotated)
    elif LLAMA3 in tensors:
        rope = _llama3_rope(meta.header, theta, rotated)
    elif scaling in ("linear", "yarn"):
        rope = {"rope_type": scaling, "rope_theta": theta, "factor": meta.positive("rope.scaling.factor")}
        if scaling == "yarn":
            original = "rope.scaling.original_context_length"
            name = original if meta.get(original, int) else "context_length"
            rope["original_max_position_embeddings"] = meta.size(name)
    elif scaling != "none":
        raise meta.error(f"positions scaled by {scaling!r} are not read", TAKE_ANOTHER)
    return rope


def llama3_factors(rope: Mapping[str, Any], head_dim: int) -> list[float]:
    """Return the number that Llama 3 divides each frequency by."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / head_dim)
        turns = rope["original_max_position_embeddings"] / wavelength
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return factors


def _llama3_rope(header: GgufHeader, theta: float, head_dim: int) -> dict[str, Any]:
    """Return the settings that the file's factors were made from; all Llama 3 models differ only in the factor."""
    place = header.tensors[LLAMA3]
    found = read_tensor(place, torch.float32) if place.shape == (head_dim // 2,) else torch.empty(0)
    rope = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": round(float(found.max()), 3) if len(found) else 1.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if len(found) and torch.allclose(found, torch.tensor(llama3_factors(rope, head_dim)), rtol=1e-4):
        return rope
    raise GgufError(header.path, "its frequencies of positions are scaled in a way that is not known", TAKE_ANOTHER)


def _longrope(meta: Metadata, rotated: int) -> dict[str, Any]:
    """Return the settings of rotations with factors for short and for long contexts."""
    factors = {}
    for name, stored in LONGROPE.items():
        if (place := meta.header.tensors.get(stored)) is None:
            raise meta.error(f"the tensor {stored!r} is missing")
        if place.shape != (rotated // 2,):
            raise meta.error(f"the tensor {stored!r} has the shape {list(place.shape)}")
        factors[name] = read_tensor(place, torch.float32).tolist()
    original = meta.size("rope.scaling.original_context_length")
    rope = {"rope_type": "longrope", "original_max_position_embeddings": original, **factors}
    if meta.get("rope.scaling.attn_factor", (int, float)) is not None:
        rope["attention_factor"] = meta.positive("rope.scaling.attn_factor")
    return rope

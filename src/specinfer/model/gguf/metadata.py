"""Metadata: the values of a GGUF file that belong to its architecture, checked as they are read."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from specinfer.model.gguf.header import GgufError, GgufHeader
from specinfer.model.gguf.weights import read_tensor

TAKE_ANOTHER = "take the model as a folder of safetensors"
_MOST_PARTS = 2**12  # limit of experts and of heads, of which each is planned for itself
_MOST = 2**24  # limit of any size, because definitions are made before weights are read


@dataclass(frozen=True, slots=True)
class Metadata:
    """The values whose keys begin with the architecture's name; errors are `GgufError`."""

    header: GgufHeader
    arch: str

    def get(self, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """Return a value, or the default."""
        return self.header.get(f"{self.arch}.{name}", kind, default)

    def size(self, name: str, default: int | None = None) -> int:
        """Return a number of at least 1."""
        return self._checked(name, self.get(name, int, default), _MOST)

    def count(self, name: str) -> int:
        """Return a number of experts or heads, at least 1."""
        return self._checked(name, self.get(name, int), _MOST_PARTS)

    def experts(self, name: str) -> dict[str, int]:
        """Return the fields of config.json for the number of experts, under this name, and of those for each token."""
        count, used = self.count("expert_count"), self.size("expert_used_count")
        if used > count:
            raise self.error(f"{self.arch}.expert_used_count is {used}, of {count} experts")
        return {name: count, "num_experts_per_tok": used}

    def positive(self, name: str, default: float | None = None) -> float:
        """Return a finite number above 0."""
        value = self.get(name, (int, float), default)
        if value is None:
            raise self.missing(name)
        if not (math.isfinite(value) and value > 0):
            raise self.error(f"{self.arch}.{name} is {value}, not a number above 0")
        return float(value)

    def sizes(self, name: str, count: int) -> list[int]:
        """Return a number of at least 0 for each layer; the file may have one for all."""
        value = self.get(name, (int, list))
        if value is None:
            raise self.missing(name)
        values = value if isinstance(value, list) else [value] * count
        if len(values) < count or not all(isinstance(one, int) and 0 <= one <= _MOST for one in values):
            raise self.error(f"{self.arch}.{name} has no number from 0 to {_MOST} for each of {count} layers")
        return [int(one) for one in values[:count]]

    def only(self, name: str, count: int, default: int) -> int:
        """Return the number above 0 that all layers with one have in common; `count` is that of layers."""
        if self.get(name, (int, list)) is None:
            return default
        found = {size for size in self.sizes(name, count) if size}
        if len(found) != 1:
            raise self.error(f"{self.arch}.{name} has {len(found)} numbers for different layers", TAKE_ANOTHER)
        return found.pop()

    def check_heads(self, heads: int, kv_heads: int) -> None:
        """Refuse heads of queries that cannot be shared out evenly among those of keys."""
        if heads % kv_heads:
            raise self.error(
                f"{self.arch}.attention.head_count is {heads}, no multiple of {kv_heads}, the heads of keys"
            )

    def missing(self, name: str) -> GgufError:
        return self.error(f"{self.arch}.{name} is missing from the metadata")

    def error(self, fault: str, *remedy: str) -> GgufError:
        return GgufError(self.header.path, fault, *remedy)

    def _checked(self, name: str, value: int | None, most: int) -> int:
        if value is None:
            raise self.missing(name)
        if not 1 <= value <= most:
            raise self.error(f"{self.arch}.{name} is {value}, not a number from 1 to {most}")
        return value


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

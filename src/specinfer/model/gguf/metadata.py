"""Metadata: the values of a GGUF file that belong to its architecture, checked as they are read."""

import math
from dataclasses import dataclass
from typing import Any

from specinfer.model.gguf.header import GgufError, GgufHeader

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

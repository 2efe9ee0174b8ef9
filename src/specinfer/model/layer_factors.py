"""Fixed factors between the linear layers of a decoder layer, which Granite 4 and Falcon-H1 have."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from specinfer.model.layer_kind import PartKind, find


class Factors(NamedTuple):
    """The factors of a part of a layer.

    Attributes:
        columns: [outputs] float32 what the outputs of its first linear layers are multiplied by, or None.
        results: What its results are multiplied by.
    """

    columns: Tensor | None
    results: float

    @property
    def are_one(self) -> bool:
        return self.columns is None and self.results == 1.0


def factors_of(layer: Any, part: PartKind) -> Factors:
    """Return the factors of a part of a decoder layer; those of its inputs are among those of the columns."""
    module, results = find(layer, part.module), float(getattr(layer, "residual_multiplier", 1.0))
    columns: Tensor | None = None
    if part.between == "recurrence":
        results *= getattr(layer, "recurrent_factor", 1.0)
        columns, given = getattr(module, "factors", None), getattr(module, "in_factor", 1.0)
        columns = None if columns is None else columns.float() * given
        assert columns is not None or given == 1.0
    elif part.between == "attention":
        results *= getattr(layer, "out_factor", 1.0)
        given, keys = getattr(layer, "in_factor", 1.0), getattr(module, "key_multiplier", 1.0)
        columns = _columns(layer, part, (given, given * keys, given))
    elif part.between == "halves" and len(part.first) > 1:
        results *= getattr(module, "down_multiplier", 1.0)
        columns = _columns(layer, part, (getattr(module, "gate_multiplier", 1.0), 1.0))
    return Factors(columns, float(results))


def _columns(layer: Any, part: PartKind, factors: tuple[float, ...]) -> Tensor | None:
    """Return [outputs] the factor of each linear layer for each of its outputs, or None if all are 1."""
    if all(factor == 1.0 for factor in factors):
        return None
    sizes = [find(layer, name).out_features for name in part.first]
    return torch.cat([torch.full((size,), factor) for size, factor in zip(sizes, factors, strict=True)])

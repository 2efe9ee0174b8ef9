"""The packing of linear layers with the same input into one native call."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specinfer.ops import LinearCall, Panels, QuantizedLinear, QuantizedWeight, quantize
from specinfer.ops.quantization import Bits
from specinfer.ops.scales import WIDTH

GATES_OF_PANEL = 16  # as many values follow them
_ROWS_AT_ONCE = 1024  # rows of a weight checked at a time


@dataclass(frozen=True, slots=True)
class Packing:
    """The storage of weights; fields as in `fused.FusedDecoder`."""

    bits: Bits | None
    narrows: bool


def are_alike(layers: Sequence[Any]) -> bool:
    """Return whether all layers are stored as codes of one format, or none."""
    has_codes = {isinstance(one, QuantizedLinear) for one in layers}
    formats = {one.call.panels.format for one in layers if isinstance(one, QuantizedLinear) and one.call is not None}
    return len(has_codes) == 1 and len(formats) <= 1


def runs_of(parts: Sequence[Any]) -> list[list[Any]]:
    """Return the layers one by one, but those that do not fill whole panels, and what follows them, together."""
    first = next((i for i, one in enumerate(parts) if one.out_features % WIDTH), len(parts) - 1)
    return [*([one] for one in parts[:first]), list(parts[first:])]


def call_of(parts: Sequence[Any], packing: Packing, *, interleaved: bool = False) -> LinearCall:
    """Return a call with the outputs of all layers, concatenated or, if interleaved, in alternating blocks of 16."""

    if any(isinstance(part, QuantizedLinear) for part in parts):
        return _call_of_codes(parts, packing, interleaved=interleaved)
    weights, bias = [part.weight for part in parts], _bias(parts, interleaved=interleaved)
    weight, bits = together(weights, interleaved=interleaved), packing.bits
    if bits is None:
        narrows = packing.narrows and _is_bfloat16(weight)
        panels = Panels.from_weight(weight.bfloat16() if narrows else weight, bias)
        return LinearCall(panels, widens=narrows)
    return LinearCall.from_weight(quantize(weight, bits), bias)


def _call_of_codes(parts: Sequence[Any], packing: Packing, *, interleaved: bool) -> LinearCall:
    """Return a call of layers of which some are stored as codes."""
    if interleaved:
        weights, join = [part.quantized for part in parts], partial(together, interleaved=True)
        return LinearCall.from_weight(QuantizedWeight.joined(weights, join), _bias(parts, interleaved=True))
    panels = []
    for run in runs_of(parts):
        if isinstance(run[0], QuantizedLinear):
            weight = QuantizedWeight.joined([one.quantized for one in run]) if len(run) > 1 else None
            call = run[0].call if weight is None else LinearCall.from_weight(weight, _bias(run, interleaved=False))
        else:
            call = call_of(run, packing)
        assert call is not None
        panels.append(call.panels)
    following: LinearCall | None = None
    for one in reversed(Panels.joined(panels)):
        following = LinearCall(one, following=following)
    assert following is not None
    return following


def _bias(parts: Sequence[Any], *, interleaved: bool) -> Tensor | None:
    given = [part.bias for part in parts if part.bias is not None]
    return together(given, interleaved=interleaved) if parts[0].bias is not None else None


def together(tensors: Sequence[Tensor], *, interleaved: bool) -> Tensor:
    """Return the rows of all tensors as a `LinearCall` of several layers has them."""
    if not interleaved:
        return torch.cat(tuple(tensors))
    return torch.stack([tensor.unflatten(0, (-1, GATES_OF_PANEL)) for tensor in tensors], dim=1).flatten(0, 2)


def _is_bfloat16(weight: Tensor) -> bool:
    """Return whether all weights are float32 numbers that bfloat16 can represent: the lower half of their bits is 0."""
    parts = weight.split(_ROWS_AT_ONCE)
    return weight.dtype == torch.float32 and not any((part.view(torch.int32) & 0xFFFF).any() for part in parts)


def can_join(layers: Sequence[Any]) -> bool:
    """Return whether `call_of` takes layers with the same input."""
    last = runs_of(layers)[-1]
    return (len(last) == 1 or are_alike(last)) and not any(
        one.out_features % WIDTH for one in layers[: -len(last)] if isinstance(one, QuantizedLinear)
    )

"""Fused decoder layers: a layer of a kind in `layer_kind.py`, computed in one native call.

Products with the same input are computed together (queries, keys and values; gates and values). Hidden states stay
float32 from layer to layer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from specinfer.kernels import (
    GATES,
    WIDTH,
    AttentionCall,
    LayerCall,
    LinearCall,
    NativePieces,
    Panels,
    QuantizedLinear,
    QuantizedWeight,
    choose,
    packs_type,
    quantize,
)
from specinfer.kernels.attention import MAX_DIM
from specinfer.kernels.quantization import BITS, Bits
from specinfer.model.batch import ForwardBatch, KVStore
from specinfer.model.cut import Cut
from specinfer.model.layer_kind import LayerKind, activation_of, kind_of, linears_of, window_of
from specinfer.model.offload.meta_weights import origin_of
from specinfer.model.sharding.placeholder import Placeholder

_GATES = 16  # gates per panel; as many values follow them
_ROWS_AT_ONCE = 1024  # rows of a weight checked at a time
_Table = tuple[Tensor, Tensor]  # [positions, rotated] cosines and sines


@dataclass(frozen=True, slots=True)
class Origin:
    """The checkpoint tensors that a linear layer is made of, see `call_of`; None for an unknown one."""

    call: LinearCall
    sources: tuple[tuple[str, Cut | None] | None, ...]
    interleaved: bool


@dataclass(frozen=True, slots=True)
class Packing:
    """The storage of weights; fields as in `fused.FusedDecoder`."""

    bits: Bits | None
    narrows: bool


class Layer:
    """One decoder layer.

    Attributes:
        rotation: Arguments that select this layer's rotation in the model's rotary embedding.
        shapes: Inputs and outputs of the linear layers that each of its calls computes.
    """

    def __init__(self, layer: Any, kind: LayerKind, config: Any, packing: Packing) -> None:
        attention = layer.self_attn
        self.heads, self.scale = attention.q_proj.out_features // attention.head_dim, attention.scaling
        self.window = window_of(attention)
        self.rotation: tuple[str, ...] = (attention.layer_type,) if kind.rotates_by_type else ()
        self.head_norms = [
            norm_weight(one, kind) if (one := getattr(attention, name, None)) is not None else None
            for name in ("q_norm", "k_norm")
        ]
        made_of = linears_of(layer)
        self.shapes = [[(one.in_features, one.out_features) for one in parts] for parts in made_of]
        qkv, output = (call_of(list(linears), packing) for linears in made_of[:2])
        gated, down = call_of(list(made_of[2]), packing, interleaved=True), call_of(list(made_of[3]), packing)
        norms = _weights(layer, kind.norms, kind)
        post_norms = None if kind.post_norms is None else _weights(layer, kind.post_norms, kind)
        self.eps, gate = float(config.rms_norm_eps), GATES[activation_of(config)]
        self.call = LayerCall((qkv, output, gated, down), norms, self.eps, post_norms=post_norms, gate=gate)
        self.origins = [
            Origin(call, tuple(origin_of(part._parameters.get("weight")) for part in parts), interleaved=call is gated)
            for call, parts in zip(self.call.linears, made_of, strict=True)
        ]
        self._attention: WeakKeyDictionary[KVStore, AttentionCall] = WeakKeyDictionary()
        self._keys_and_values: LinearCall | None = None  # a part of the first call, see `read`

    def attention(self, store: KVStore, index: int) -> AttentionCall:
        """Return the attention over the store's keys and values, made once for each store."""
        call = self._attention.get(store)
        if call is None:
            call = self._attention[store] = self._attend(store, index, self.heads)
        return call

    def read(self, store: KVStore, index: int, pieces: NativePieces, table: _Table, inputs: Tensor) -> None:
        """Store the keys and values of contiguous float32 `inputs` [tokens, inputs], and compute nothing else."""
        attend = self._attend(store, index, num_heads=0)
        if self._keys_and_values is None:
            self._keys_and_values = self.call.linears[0].outputs_from(self.heads * store.keys[index].shape[2])
        attend.rotate(pieces, *table, self._keys_and_values(inputs))

    def _attend(self, store: KVStore, index: int, num_heads: int) -> AttentionCall:
        query_norm, key_norm = self.head_norms
        return AttentionCall(
            store.keys[index],
            store.values[index],
            num_heads,
            self.scale,
            window=self.window,
            query_norm=query_norm,
            key_norm=key_norm,
            eps=self.eps,
            rotated=store.keys[index].shape[2],
        )


class Rotations:
    """The tables of a rotary embedding, which grow with the positions that are asked for."""

    def __init__(self, rotary: nn.Module) -> None:
        self._rotary = rotary
        self._tables: dict[tuple[str, ...], _Table] = {}

    def table(self, rotation: tuple[str, ...], positions: int) -> _Table:
        """Return a rotation's table for at least this many positions; a table too short is replaced by a longer one."""
        table = self._tables.get(rotation)
        if table is None or positions > len(table[0]):
            places = torch.arange(max(2 * positions, 512), device="cpu").unsqueeze(0)
            cosines, sines = self._rotary(torch.empty(0), places, *rotation)
            table = self._tables[rotation] = cosines[0].contiguous(), sines[0].contiguous()
        return table


class FusedLayers(nn.Module):
    """The decoder layers of a head on a target's hidden states, taken apart; arguments as for `fused.FusedDecoder`."""

    def __init__(self, layers: nn.ModuleList, rotary: nn.Module, config: Any, quantization: str | None = None) -> None:
        super().__init__()
        kind, packing = kind_of(config), Packing(None if quantization is None else BITS[quantization], narrows=True)
        assert kind is not None
        self.layers = [Layer(layer, kind, config, packing) for layer in taken_apart(layers)]
        self._rotations = Rotations(rotary)

    def forward(
        self, batch: ForwardBatch, hidden: Tensor, inputs: Tensor | None = None, windowed: ForwardBatch | None = None
    ) -> Tensor:
        """Run the layers on `hidden` [tokens, width] in place, and return it; both arguments are contiguous float32.

        Args:
            inputs: What the first layer's attention reads in place of the norm of `hidden`, or None.
            windowed: The batch as layers with a window see it, or None for the same.
        """
        positions = int(batch.positions.max()) + 1
        for i, layer in enumerate(self.layers):
            pieces = (batch if windowed is None or layer.window is None else windowed).native
            assert pieces is not None
            attention, table = layer.attention(batch.store, i), self._rotations.table(layer.rotation, positions)
            layer.call(attention, pieces, *table, hidden, runs=batch.adapters, inputs=None if i else inputs)
        return hidden

    def read(self, batch: ForwardBatch, inputs: Tensor) -> None:
        """Store the keys and values that each layer makes of contiguous float32 `inputs` [tokens, inputs]."""
        pieces, positions = batch.native, int(batch.positions.max()) + 1
        assert pieces is not None
        for i, layer in enumerate(self.layers):
            layer.read(batch.store, i, pieces, self._rotations.table(layer.rotation, positions), inputs)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights, which are not parameters of this module."""
        return sum(call.num_bytes for layer in self.layers for call in layer.call.linears)


def can_fuse_layers(layers: nn.ModuleList, config: Any) -> bool:
    """Return whether decoder layers are of a known kind, and native kernels run them faster on a CPU."""
    if kind_of(config) is None or activation_of(config) not in GATES:
        return False
    linears = [module for module in layers.modules() if isinstance(module, nn.Linear)]
    first: Any = next(layer for layer in layers if not isinstance(layer, Placeholder))
    return bool(
        all(type(layer) is nn.Linear and packs_type(layer.weight.dtype) for layer in linears)
        and all(_can_join(layer) for layer in layers)
        and first.mlp.gate_proj.out_features % _GATES == 0
        and first.self_attn.head_dim <= MAX_DIM
    )


def _can_join(layer: Any) -> bool:
    """Return whether the linear layers of a decoder layer that are stored as codes can be computed together."""
    if isinstance(layer, Placeholder):
        return True
    qkv, _, gates, _ = linears_of(layer)
    formats = {one.call.panels.format for one in gates if isinstance(one, QuantizedLinear) and one.call is not None}
    has_codes = {isinstance(one, QuantizedLinear) for one in gates}
    if len(formats) > 1 or len(has_codes) > 1:
        return False
    return not any(one.out_features % WIDTH for one in qkv if isinstance(one, QuantizedLinear))


def taken_apart(layers: nn.ModuleList) -> Iterator[nn.Module]:
    """Yield the layers one after the other and remove each, so that its weights are not in memory twice for long."""
    while len(layers):
        yield layers[0]
        del layers[0]


def norm_weight(norm: Any, kind: LayerKind) -> Tensor:
    """Return the [size] float32 weight of a norm."""
    weight: Tensor = norm.weight.float() + kind.norm_offset
    return weight


def _weights(layer: Any, names: tuple[str, str], kind: LayerKind) -> tuple[Tensor, Tensor]:
    first, second = getattr(layer, names[0]), norm_weight(getattr(layer, names[1]), kind)
    # EAGLE-1 heads have no norm before attention; their calls have inputs.
    return torch.ones_like(second) if isinstance(first, nn.Identity) else norm_weight(first, kind), second


def call_of(parts: list[nn.Linear], packing: Packing, *, interleaved: bool = False) -> LinearCall:
    """Return a call with the outputs of all layers, concatenated or, if interleaved, in alternating blocks of 16."""

    if any(isinstance(part, QuantizedLinear) for part in parts):
        return _call_of_codes(parts, packing, interleaved=interleaved)
    weights, bias = [part.weight for part in parts], _bias(parts, interleaved=interleaved)
    weight, bits = together(weights, interleaved=interleaved), packing.bits
    if bits is None:
        narrows, choice = packing.narrows and _is_bfloat16(weight), choose(weight.dtype)
        panels = Panels.of(weight.bfloat16() if narrows else weight, bias)
        return LinearCall(panels, **choice._asdict(), widens=narrows)
    rounded = quantize(weight, bits)
    return LinearCall(Panels.of_codes(rounded, bias))


def _call_of_codes(parts: Sequence[Any], packing: Packing, *, interleaved: bool) -> LinearCall:
    """Return a call of layers of which some are stored as codes."""
    if interleaved:
        weights, join = [part.quantized for part in parts], partial(together, interleaved=True)
        return LinearCall(Panels.of_codes(QuantizedWeight.joined(weights, join), _bias(parts, interleaved=True)))
    panels = []
    for part in parts:
        call = part.call if isinstance(part, QuantizedLinear) else call_of([part], packing)
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
    return torch.stack([tensor.unflatten(0, (-1, _GATES)) for tensor in tensors], dim=1).flatten(0, 2)


def _is_bfloat16(weight: Tensor) -> bool:
    """Return whether all weights are float32 numbers that bfloat16 can represent: the lower half of their bits is 0."""
    parts = weight.split(_ROWS_AT_ONCE)
    return weight.dtype == torch.float32 and not any((part.view(torch.int32) & 0xFFFF).any() for part in parts)

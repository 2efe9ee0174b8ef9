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
from specinfer.kernels.recurrent_layer import RecurrentCall, RecurrentParts
from specinfer.model.batch import ForwardBatch, KVStore
from specinfer.model.cut import Cut
from specinfer.model.layer_kind import LayerKind, activation_of, eps_of, kind_of, linears_of, window_of
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
        recurrent: The module without attention, which keeps all but its linear layers, or None.
        names, shapes: Names, and inputs and outputs, of the linear layers that each of its calls computes.
    """

    def __init__(self, layer: Any, kind: LayerKind, config: Any, packing: Packing) -> None:
        self.recurrent: Any = None if hasattr(layer, "self_attn") else getattr(layer, str(kind.recurrent))
        self.rotation: tuple[str, ...] = ()
        self.window: int | None = None
        self.parts: RecurrentParts | None = None if self.recurrent is None else self.recurrent.parts()
        if self.recurrent is None:
            self._take_attention(layer.self_attn, kind)
        self.names, made_of = kind.linear_names(layer), linears_of(layer, kind)
        self.shapes = [[(one.in_features, one.out_features) for one in parts] for parts in made_of]
        mixed, output = (call_of(list(linears), packing) for linears in made_of[:2])
        gated, down = call_of(list(made_of[2]), packing, interleaved=True), call_of(list(made_of[3]), packing)
        norms = _weights(layer, kind.norms, kind)
        post_norms = None if kind.post_norms is None else _weights(layer, kind.post_norms, kind)
        self.eps, gate = eps_of(config), GATES[activation_of(config)]
        self.call = LayerCall(
            (mixed, output, gated, down), norms, self.eps, post_norms=post_norms, gate=gate, recurrent=self.parts
        )
        self.origins = [
            Origin(call, tuple(origin_of(part._parameters.get("weight")) for part in parts), interleaved=call is gated)
            for call, parts in zip(self.call.linears, made_of, strict=True)
        ]
        self._mixers: WeakKeyDictionary[KVStore, AttentionCall | RecurrentCall] = WeakKeyDictionary()
        self._keys_and_values: LinearCall | None = None  # a part of the first call, see `read`
        for parts in kind.recurrent_linears if self.recurrent is not None else ():
            for name in parts:
                delattr(self.recurrent, name)

    def _take_attention(self, attention: Any, kind: LayerKind) -> None:
        self.is_gated, self.scale, self.window = kind.is_gated, attention.scaling, window_of(attention)
        self.heads = attention.q_proj.out_features // attention.head_dim // (2 if kind.is_gated else 1)
        self.rotation = (attention.layer_type,) if kind.rotates_by_type else ()
        self.head_norms = [
            norm_weight(one, kind) if (one := getattr(attention, name, None)) is not None else None
            for name in kind.head_norms
        ]

    def mixer(self, store: KVStore, index: int, table: _Table) -> AttentionCall | RecurrentCall:
        """Return the attention, or the recurrence, over what the store has, made once for each store."""
        call = self._mixers.get(store)
        if call is None:
            if self.parts is None:
                call = self._attend(store, index, self.heads, table)
            else:
                pool = store.states.pools.get(index)
                call = RecurrentCall(self.parts, store.keys[index], store.values[index], pool)
            self._mixers[store] = call
        return call

    def read(self, store: KVStore, index: int, pieces: NativePieces, table: _Table, inputs: Tensor) -> None:
        """Store the keys and values of contiguous float32 `inputs` [tokens, inputs], and compute nothing else."""
        attend = self._attend(store, index, 0, table)
        if self._keys_and_values is None:
            first = self.heads * store.keys[index].shape[2] * (2 if self.is_gated else 1)
            self._keys_and_values = self.call.linears[0].outputs_from(first)
        attend.rotate(pieces, *table, self._keys_and_values(inputs))

    def _attend(self, store: KVStore, index: int, num_heads: int, table: _Table) -> AttentionCall:
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
            rotated=table[0].shape[1],
            is_gated=self.is_gated,
            kv_scales=store.scales[index],
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
            table = self._rotations.table(layer.rotation, positions)
            layer.call(
                layer.mixer(batch.store, i, table),
                pieces,
                *table,
                hidden,
                runs=batch.adapters,
                inputs=None if i else inputs,
            )
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
    if (kind := kind_of(config)) is None or activation_of(config) not in GATES:
        return False
    linears = [module for module in layers.modules() if isinstance(module, nn.Linear)]
    return all(type(layer) is nn.Linear and packs_type(layer.weight.dtype) for layer in linears) and all(
        isinstance(layer, Placeholder) or _can_fuse(layer, kind) for layer in layers
    )


def _can_fuse(layer: Any, kind: LayerKind) -> bool:
    """Return whether a layer's heads are small enough, and linear layers with the same input can be joined."""
    mixed, output, gates, down = linears_of(layer, kind)
    last = _runs(mixed)[-1]
    reorders = any(getattr(one, "inputs", None) is not None for one in (*mixed, *output, *gates, *down))
    return not reorders and bool(
        gates[0].out_features % _GATES == 0
        and (not hasattr(layer, "self_attn") or layer.self_attn.head_dim <= MAX_DIM)
        and _are_alike(gates)
        and (len(last) == 1 or _are_alike(last))
        and not any(one.out_features % WIDTH for one in mixed[: -len(last)] if isinstance(one, QuantizedLinear))
    )


def _are_alike(layers: Sequence[Any]) -> bool:
    """Return whether all layers are stored as codes of one format, or none."""
    has_codes = {isinstance(one, QuantizedLinear) for one in layers}
    formats = {one.call.panels.format for one in layers if isinstance(one, QuantizedLinear) and one.call is not None}
    return len(has_codes) == 1 and len(formats) <= 1


def _runs(parts: Sequence[Any]) -> list[list[Any]]:
    """Return the layers one by one, but those that do not fill whole panels, and what follows them, together."""
    first = next((i for i, one in enumerate(parts) if one.out_features % WIDTH), len(parts) - 1)
    return [*([one] for one in parts[:first]), list(parts[first:])]


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
    for run in _runs(parts):
        if isinstance(run[0], QuantizedLinear):
            weight = QuantizedWeight.joined([one.quantized for one in run]) if len(run) > 1 else None
            call = run[0].call if weight is None else LinearCall(Panels.of_codes(weight, _bias(run, interleaved=False)))
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
    return torch.stack([tensor.unflatten(0, (-1, _GATES)) for tensor in tensors], dim=1).flatten(0, 2)


def _is_bfloat16(weight: Tensor) -> bool:
    """Return whether all weights are float32 numbers that bfloat16 can represent: the lower half of their bits is 0."""
    parts = weight.split(_ROWS_AT_ONCE)
    return weight.dtype == torch.float32 and not any((part.view(torch.int32) & 0xFFFF).any() for part in parts)

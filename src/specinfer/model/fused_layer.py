"""Fused decoder layers: a layer of a kind in `layer_kind.py`, computed in one native call.

Products with the same input are computed together (queries, keys and values; gates and values). Hidden states stay
float32 from layer to layer.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from specinfer.model.batch import KVStore
from specinfer.model.fused_experts import HALVES, OF_INPUTS, UNGATED, can_fuse_experts, experts_of
from specinfer.model.layer_factors import factors_of
from specinfer.model.layer_families import activation_of, eps_of, kind_of
from specinfer.model.layer_kind import LayerKind, PartKind, find, type_of, window_of
from specinfer.model.linears import ROUTER
from specinfer.model.offload.budget import release_freed_memory
from specinfer.model.offload.meta_weights import origin_of
from specinfer.model.packing import GATES_OF_PANEL, Origin, Packing, are_alike, call_of, can_join
from specinfer.model.rotations import Table
from specinfer.model.sharding.placeholder import Placeholder
from specinfer.ops import (
    GATES,
    Attends,
    AttentionCall,
    LayerCall,
    LinearCall,
    NativePieces,
    Opens,
    PartCall,
    packs_type,
)
from specinfer.ops.cpu.attention import MAX_DIM
from specinfer.ops.cpu.layer_part import Adds, Between, Mixer, Sum
from specinfer.ops.cpu.recurrent_layer import RecurrentCall, RecurrentParts

_OPENINGS = {"halves": HALVES, "squares": UNGATED, "inputs": OF_INPUTS}  # by what lies between
_SUMS = {None: Sum.ALONE, "first": Sum.FIRST, "last": Sum.LAST}


class Layer:
    """One decoder layer.

    Attributes:
        rotation: Arguments that select this layer's rotation in the model's rotary embedding, or None for no rotation.
        recurrent: The module without attention, which keeps all but its linear layers, or None.
        recurrence: What it computes between its linear layers, or None.
        names, shapes: Names, and inputs and outputs, of the linear layers that each of its calls computes.
        origins: What each of these calls is made of.
        routers: The same of routers of experts.
    """

    def __init__(self, layer: Any, kind: LayerKind, config: Any, packing: Packing) -> None:
        self.recurrent: Any = None
        self.recurrence: RecurrentParts | None = None
        self.rotation: tuple[str, ...] | None = ()
        self.window: int | None = None
        self.eps, self._activation = eps_of(config), activation_of(config)
        self.names: list[tuple[str, ...]] = []
        self.shapes: list[list[tuple[int, int]]] = []
        self.origins: list[Origin] = []
        self.routers: list[Origin] = []
        self.kinds = kind.parts_of(layer)
        self.call = LayerCall([self._part(layer, part, kind, packing) for part in self.kinds])
        self._mixers: WeakKeyDictionary[KVStore, list[Mixer]] = WeakKeyDictionary()
        self._keys_and_values: LinearCall | None = None  # a part of the first call, see `read`

    def _part(self, layer: Any, part: PartKind, kind: LayerKind, packing: Packing) -> PartCall:
        """Return a part's call; the linear layers of a recurrence are taken away from its module."""
        norm = None if part.norm is None or part.reads_again else _weight(layer, part.norm, kind)
        adds = self._adds(layer, part, kind)
        columns, factor = factors_of(layer, part)
        if part.between == "experts":
            router, experts = experts_of(layer, part, self._activation, factor, packing.bits)
            source = origin_of(layer.get_submodule(part.first[0])._parameters.get("weight"))
            self.routers.append(Origin(router, (source,), interleaved=False))
            return PartCall([router], experts, norm, self.eps, adds=adds)
        between = self._between(layer, part, kind)
        calls = [self._linear(layer, part, names, packing) for names in part.linear_names]
        for names in part.linear_names if part.between == "recurrence" else ():
            for name in names:
                delattr(self.recurrent, name.rpartition(".")[2])
        gate = calls[2] if part.gate is not None else None
        return PartCall(
            calls[:2], between, norm, self.eps, skips_norm=part.norm is None, scales=columns, factor=factor, gate=gate,
            adds=adds,
        )  # fmt: skip

    def _adds(self, layer: Any, part: PartKind, kind: LayerKind) -> Adds:
        post_norm, sum_norm = (
            None if name is None else _weight(layer, name, kind) for name in (part.post_norm, part.sum_norm)
        )
        factor = 1.0
        if kind.layer_factor is not None and part is self.kinds[-1]:
            number = getattr(layer, kind.layer_factor)
            factor = 1.0 if number.is_meta else float(number)  # that of another layer is not read
        return Adds(post_norm, _SUMS[part.sum], sum_norm, factor)

    def _between(self, layer: Any, part: PartKind, kind: LayerKind) -> Between:
        module = find(layer, part.module)
        if part.between == "attention":
            self._take_attention(module, layer.get_submodule(part.second), kind)
            self.num_stored = 2 - part.num_missing
            return Attends()
        if part.between == "recurrence":
            self.recurrent, self.recurrence = module, module.parts()
            return self.recurrence
        if part.between == "mlp":
            return Opens(ending=GATES[self._activation])
        column = 0
        if part.between == "inputs":
            column = layer.layer_idx * layer.get_submodule(part.first[0]).out_features
        return Opens(_OPENINGS[part.between][self._activation], column=column)

    def _linear(self, layer: Any, part: PartKind, names: tuple[str, ...], packing: Packing) -> LinearCall:
        linears = [layer.get_submodule(name) for name in names]
        interleaved = part.between == "mlp" and names == part.first
        packing = replace(packing, bits=None) if any(ROUTER.search(name) for name in names) else packing
        call = call_of(linears, packing, interleaved=interleaved)
        sources = tuple(origin_of(one._parameters.get("weight")) for one in linears)
        self.names.append(names)
        self.shapes.append([(one.in_features, one.out_features) for one in linears])
        self.origins.append(Origin(call, sources, interleaved=interleaved))
        return call

    def _take_attention(self, attention: Any, output: Any, kind: LayerKind) -> None:
        self.is_gated, self.scale, self.window = kind.is_gated, attention.scaling, window_of(attention)
        self.rotates_pairs, self.heads = kind.rotates_pairs, output.in_features // attention.head_dim
        if not kind.rotates(attention):
            self.rotation = None
        elif kind.rotates_by_type:
            self.rotation = (type_of(attention),)
        self.head_norms = [
            norm_weight(one, kind) if (one := getattr(attention, name, None)) is not None else None
            for name in kind.head_norms
        ]
        has_norm = kind.value_norm is not None and hasattr(attention, kind.value_norm)
        self.value_norm = torch.ones(attention.head_dim) if has_norm else None

    def mixers(self, store: KVStore, index: int, table: Table) -> list[Mixer]:
        """Return the attention or recurrence of each part over what the store has, made once for each store."""
        calls = self._mixers.get(store)
        if calls is None:
            calls = self._mixers[store] = [self._mixer(part, store, index, table) for part in self.kinds]
        return calls

    def _mixer(self, part: PartKind, store: KVStore, index: int, table: Table) -> Mixer:
        if part.between == "attention":
            return self._attend(store, index, self.heads, table)
        if part.between != "recurrence":
            return None
        assert self.recurrence is not None
        place = self.recurrent.layer_idx  # that of attention is the layer's number, beside which it may be
        return RecurrentCall(self.recurrence, store.keys[place], store.values[place], store.states.pools.get(place))

    def read(self, store: KVStore, index: int, pieces: NativePieces, table: Table, inputs: Tensor) -> None:
        """Store the keys and values of contiguous float32 `inputs` [tokens, inputs], and compute nothing else."""
        attend = self._attend(store, index, 0, table)
        if self._keys_and_values is None:
            first = self.heads * store.keys[index].shape[2] * (2 if self.is_gated else 1)
            self._keys_and_values = self.call.linears[0].outputs_from(first)
        attend.rotate(pieces, *table, self._keys_and_values(inputs))

    def _attend(self, store: KVStore, index: int, num_heads: int, table: Table) -> AttentionCall:
        query_norm, key_norm = self.head_norms
        return AttentionCall(
            store.keys[index],
            store.values[index],
            num_heads,
            self.scale,
            window=self.window,
            query_norm=query_norm,
            key_norm=key_norm,
            value_norm=self.value_norm,
            num_stored=self.num_stored,
            eps=self.eps,
            rotated=table[0].shape[1],
            is_gated=self.is_gated,
            rotates_pairs=self.rotates_pairs,
            kv_scales=store.scales[index],
        )


def can_fuse_layers(layers: nn.ModuleList, config: Any) -> bool:
    """Return whether decoder layers are of a known kind, and native kernels run them faster on a CPU."""
    if (kind := kind_of(config)) is None:
        return False
    linears = [module for module in layers.modules() if isinstance(module, nn.Linear)]
    return all(type(layer) is nn.Linear and packs_type(layer.weight.dtype) for layer in linears) and all(
        isinstance(layer, Placeholder) or _can_fuse(layer, kind, activation_of(config)) for layer in layers
    )


def _can_fuse(layer: Any, kind: LayerKind, activation: str) -> bool:
    parts = kind.parts_of(layer)
    return bool(parts) and all(
        can_fuse_experts(layer, part, activation)
        if part.between == "experts"
        else _can_fuse_part(layer, part, activation)
        for part in parts
    )


def _can_fuse_part(layer: Any, part: PartKind, activation: str) -> bool:
    """Return whether heads are small enough, and linear layers with the same input can be joined."""
    module, first = find(layer, part.module), [layer.get_submodule(name) for name in part.first]
    linears = [layer.get_submodule(name) for names in part.linear_names for name in names]
    if any(getattr(one, "inputs", None) is not None for one in linears):  # their columns are in another order
        return False
    if not factors_of(layer, part).are_one and any(one.bias is not None for one in linears):
        return False
    if part.between == "attention":
        return bool(module.head_dim <= MAX_DIM and can_join(first))
    if part.between == "recurrence":
        return bool(module.can_fuse and can_join(first))
    if part.between == "mlp":
        return activation in GATES and first[0].out_features % GATES_OF_PANEL == 0 and are_alike(first)
    return activation in _OPENINGS[part.between] and can_join(first)


def taken_apart(layers: nn.ModuleList) -> Iterator[nn.Module]:
    """Yield the layers one after the other and remove each, so that its weights are not in memory twice for long."""
    while len(layers):
        yield layers[0]
        del layers[0]
        release_freed_memory()  # else half of the weights are in memory once more in the end


def norm_weight(norm: Any, kind: LayerKind) -> Tensor:
    """Return the [size] float32 weight of a norm."""
    weight: Tensor = norm.weight.float() + kind.norm_offset
    return weight


def _weight(layer: Any, name: str, kind: LayerKind) -> Tensor:
    found = layer.get_submodule(name)
    # EAGLE-1 heads have no norm before attention; their calls have inputs.
    return torch.ones(_width(layer, kind)) if isinstance(found, nn.Identity) else norm_weight(found, kind)


def _width(layer: Any, kind: LayerKind) -> int:
    last = layer.get_submodule(kind.parts_of(layer)[-1].second)
    return int(last.out_features)

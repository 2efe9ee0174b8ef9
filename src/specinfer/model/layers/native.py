"""Decoder layers in native code, made of their plans: a layer in one call, or all of them.

Products with the same input are computed together (queries, keys and values; gates and values). Hidden states stay
float32 from layer to layer.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from specinfer.model.batch import ForwardBatch, KVStore
from specinfer.model.layers.families import layer_kind
from specinfer.model.layers.packing import GATES_OF_PANEL, Packing, are_alike, call_of, can_join
from specinfer.model.layers.plan import (
    AttentionPlan,
    JoinedLinears,
    LayerKind,
    LayerPlan,
    PartKind,
    PartPlan,
    taken_apart,
)
from specinfer.model.layers.routing import HALVES, OF_INPUTS, UNGATED, can_fuse_experts, experts_of
from specinfer.model.linears import ROUTER
from specinfer.model.offload.meta_weights import origin_of
from specinfer.model.offload.streamed_layer import LayerStream
from specinfer.model.recurrent.scan import Scan
from specinfer.model.sharding.joined_norm import JoinedHeadNorms, JoinedNorm
from specinfer.model.sharding.placeholder import Placeholder
from specinfer.ops import (
    GATES,
    Attends,
    AttentionCall,
    LayerCall,
    LayersCall,
    LinearCall,
    NativePieces,
    Opens,
    PartCall,
    packs_type,
)
from specinfer.ops.cpu.attention import MAX_DIM
from specinfer.ops.cpu.layer_part import Adds, Between, Mixer, Sum
from specinfer.ops.cpu.recurrent_layer import RecurrentCall, RecurrentParts
from specinfer.ops.quantization import BITS
from specinfer.parallel.group import Alone, Group

# Callback with the number of computed layers and the hidden states after them, which it may modify.
Watch = Callable[[int, Tensor], None]
Table = tuple[Tensor, Tensor]  # [positions, rotated] cosines and sines
_OPENINGS = {"halves": HALVES, "ungated": UNGATED, "inputs": OF_INPUTS}  # by what lies between
_SUMS = {None: Sum.ALONE, "first": Sum.FIRST, "last": Sum.LAST}


class NativeLayer:
    """One decoder layer, without the modules that it was made of.

    Attributes:
        recurrent: The module without attention, which keeps all but its linear layers, or None.
        recurrence: What it computes between its linear layers, or None.
        linears: What each of its calls computes.
        routers: The same of routers of experts.
    """

    def __init__(self, plan: LayerPlan, packing: Packing) -> None:
        self.recurrent: Any = None
        self.recurrence: RecurrentParts | None = None
        self.attention: AttentionPlan | None = None
        self.head_norms: list[Tensor | None] = [None, None]
        self._joined_norms: JoinedHeadNorms | None = None
        self.eps = plan.eps
        self.linears: list[JoinedLinears] = []
        self.routers: list[JoinedLinears] = []
        self.kinds = [part.kind for part in plan.parts]
        self.call = LayerCall([self._part(plan, part, packing) for part in plan.parts])
        self._mixers: WeakKeyDictionary[KVStore, list[Mixer]] = WeakKeyDictionary()
        self._keys_and_values: LinearCall | None = None  # a part of the first call, see `read`

    @property
    def rotation(self) -> tuple[str, ...] | None:
        """Arguments that select this layer's rotation in the model's rotary embedding, or None for no rotation."""
        return () if self.attention is None else self.attention.rotation

    def connect(self, name: str, sums: Collection[str]) -> None:
        """Compute a rank's shard from now on.

        Args:
            name: Name of the layer in the definition.
            sums: Names of the definition's modules whose results are added up over the ranks.
        """
        for kind, part in zip(self.kinds, self.call.parts, strict=True):
            part.is_split = f"{name}.{kind.output}" in sums
            if kind.between == "attention" and self._joined_norms is not None:
                part.norm_over_ranks, self.head_norms = self._joined_norms, [None, None]

    def _part(self, plan: LayerPlan, part: PartPlan, packing: Packing) -> PartCall:
        """Return a part's call; the linear layers of a recurrence are taken away from its module."""
        kind = part.kind
        norm = None if kind.reads_again else _weight(plan, part.norm)
        adds = Adds(_weight(plan, part.post_norm), _SUMS[kind.sum], _weight(plan, part.sum_norm), part.hidden_factor)
        if kind.between == "experts":
            router, experts = experts_of(plan, part, packing.bits)
            weight = plan.layer.get_submodule(kind.inputs[0])._parameters.get("weight")
            self.routers.append(JoinedLinears(kind.inputs, (), router, (origin_of(weight),)))
            return PartCall([router], experts, norm, plan.eps, adds=adds)
        between = self._between(plan, part)
        pairs = zip(kind.linear_names, part.linears, strict=True)
        calls = [self._linear(kind, names, linears, packing) for names, linears in pairs]
        for names in kind.linear_names if kind.between == "recurrence" else ():
            for name in names:
                delattr(self.recurrent, name.rpartition(".")[2])
        gate = calls[2] if kind.gate is not None else None
        return PartCall(
            calls[:2], between, norm, plan.eps, skips_norm=part.norm is None, scales=part.columns, factor=part.factor,
            gate=gate, adds=adds,
        )  # fmt: skip

    def _between(self, plan: LayerPlan, part: PartPlan) -> Between:
        between = part.kind.between
        if between == "attention":
            self.attention = part.attention
            self.head_norms = [None if one is None else plan.kind.norm_weight(one) for one in part.head_norms]
            joined = [norm for norm in part.head_norms if isinstance(norm, JoinedNorm)]
            self._joined_norms = JoinedHeadNorms(joined) if joined else None
            return Attends()
        if between == "recurrence":
            self.recurrent, self.recurrence = part.module, part.module.parts()
            return self.recurrence
        if between == "mlp":
            return Opens(ending=GATES[plan.activation])
        column = plan.layer.layer_idx * part.linears[0][0].out_features if between == "inputs" else 0
        return Opens(_OPENINGS[between][plan.activation], column=column)

    def _linear(self, part: PartKind, names: tuple[str, ...], linears: tuple[Any, ...], packing: Packing) -> LinearCall:
        interleaved = part.between == "mlp" and names == part.inputs
        packing = replace(packing, bits=None) if any(ROUTER.search(name) for name in names) else packing
        call = call_of(linears, packing, interleaved=interleaved)
        self.linears.append(JoinedLinears.from_linears(names, linears, call, interleaved=interleaved))
        return call

    def mixers(self, store: KVStore, index: int, table: Table) -> list[Mixer]:
        """Return the attention or recurrence of each part over what the store has, made once for each store."""
        calls = self._mixers.get(store)
        if calls is None:
            calls = self._mixers[store] = [self._mixer(part, store, index, table) for part in self.kinds]
        return calls

    def _mixer(self, part: PartKind, store: KVStore, index: int, table: Table) -> Mixer:
        if part.between == "attention":
            return self._attend(store, index, table)
        if part.between != "recurrence":
            return None
        assert self.recurrence is not None
        place = self.recurrent.layer_idx  # that of attention is the layer's number, beside which it may be
        return RecurrentCall(self.recurrence, store.keys[place], store.values[place], store.states.pools.get(place))

    def read(self, store: KVStore, index: int, pieces: NativePieces, table: Table, inputs: Tensor) -> None:
        """Store the keys and values of contiguous float32 `inputs` [tokens, inputs], and compute nothing else."""
        assert self.attention is not None
        if self._keys_and_values is None:
            queries = self.attention.num_heads * self.attention.head_dim * (2 if self.attention.is_gated else 1)
            call = self.call.linears[0]
            self._keys_and_values = call.part([range(queries, call.outputs)])
        self._attend(store, index, table, num_heads=0).rotate(pieces, *table, self._keys_and_values(inputs))

    def _attend(self, store: KVStore, index: int, table: Table, num_heads: int | None = None) -> AttentionCall:
        plan = self.attention
        assert plan is not None
        query_norm, key_norm = self.head_norms
        return AttentionCall(
            store.keys[index],
            store.values[index],
            plan.num_heads if num_heads is None else num_heads,
            plan.scale,
            window=plan.window,
            query_norm=query_norm,
            key_norm=key_norm,
            value_norm=torch.ones(plan.head_dim) if plan.has_value_norm else None,
            num_stored=plan.num_stored,
            eps=self.eps,
            rotated=table[0].shape[1],
            is_gated=plan.is_gated,
            rotates_pairs=plan.rotates_pairs,
            kv_scales=store.scales[index],
        )


def _weight(plan: LayerPlan, norm: Any) -> Tensor | None:
    """Return the float32 weight of a norm, if there is one."""
    if isinstance(norm, nn.Identity):  # EAGLE-1 heads have no norm before attention; their calls have inputs
        return torch.ones(plan.parts[-1].linears[1][0].out_features)
    return None if norm is None else plan.kind.norm_weight(norm)


class NativeLayers(nn.Module):
    """Decoder layers of a model or of a head, one after the other, on a store.

    Args:
        layers: Loaded layers, each of which may be dropped once the next one is taken.
        rotary: The rotary embedding, or None if the layers have none.
        config: The model's configuration.

    Attributes:
        stream: Brings in the layers, if they are not in memory, or None.
        group: The ranks with shards of the same layers.
    """

    def __init__(
        self, layers: Iterable[Any], rotary: nn.Module | None, kind: LayerKind, config: Any, packing: Packing
    ) -> None:
        super().__init__()
        self.layers = [NativeLayer(LayerPlan.from_layer(layer, kind, config), packing) for layer in layers]
        self.recurrent = nn.ModuleList(layer.recurrent for layer in self.layers if layer.recurrent is not None)
        self.stream: LayerStream | None = None
        self.group: Group = Alone()
        recurrences = [layer.recurrence for layer in self.layers if layer.recurrence is not None]
        taps = {one.convolution.num_taps for one in recurrences}
        assert len(taps) <= 1
        self.num_taps = max(taps, default=0)
        self._recurs = any(one.recurrence is not None for one in recurrences)
        self.scan_floats = max(layer.call.scan_floats for layer in self.layers)  # for each token of a scan
        self._rotary, self._tables = (rotary,), dict[tuple[str, ...] | None, Table]()  # no module of its own
        self.calls: WeakKeyDictionary[KVStore, LayersCall] = WeakKeyDictionary()

    def forward(
        self,
        batch: ForwardBatch,
        hidden: Tensor,
        inputs: Tensor | None = None,
        windowed: ForwardBatch | None = None,
        watch: Watch | None = None,
    ) -> Tensor:
        """Run the layers on `hidden` [tokens, width] in place, and return it; both tensors are contiguous float32.

        Args:
            inputs: What the first layer's attention reads in place of the norm of `hidden`, or None.
            windowed: The batch as layers with a window see it, or None for the same.
            watch: Callback after the embedding and after each layer.
        """
        pieces, positions = batch.native, int(batch.positions.max()) + 1
        assert pieces is not None
        sum_over_ranks = self.group.all_reduce if self.group.size > 1 else None
        scan = self._scan(batch)
        if scan is not None:
            pieces.follow(scan.native, scan.paths(self.num_taps))
        scratch = None
        if sum_over_ranks is None:  # allocated once for all layers
            scratch = torch.empty(len(hidden) * self.scratch_floats + pieces.num_scanned * self.scan_floats)
        if scratch is not None and all(one is None for one in (inputs, windowed, watch, self.stream)):
            self.call_on(batch.store, positions)(pieces, hidden, scratch, batch.adapters)
            self._wrote(scan)
            return hidden
        if watch is not None:
            watch(0, hidden)
        for i, layer in enumerate(self.layers):
            if self.stream is not None:
                self.stream.acquire(i)
            has_window = layer.attention is not None and layer.attention.window is not None
            seen = pieces if windowed is None or not has_window else windowed.native
            table = self._table(layer.rotation, positions)
            assert seen is not None
            layer.call(
                layer.mixers(batch.store, i, table), seen, *table, hidden, scratch, sum_over_ranks, batch.adapters,
                None if i else inputs,
            )  # fmt: skip
            if self.stream is not None:
                self.stream.release(i)
            if watch is not None:
                watch(i + 1, hidden)
        self._wrote(scan)
        return hidden

    def _scan(self, batch: ForwardBatch) -> Scan | None:
        """Return the scan of layers without attention, or None if there are none."""
        if not self.num_taps:
            return None
        if not self._recurs:
            return Scan(batch.pieces, batch.store.states, batch.slots.device, recomputes=False)
        assert isinstance(batch.scan, Scan)
        return batch.scan

    def _wrote(self, scan: Scan | None) -> None:
        """Record that the states of all layers are written."""
        for layer in self.layers:
            if scan is not None and layer.recurrent is not None:
                scan.wrote(layer.recurrent.layer_idx)

    def read(self, batch: ForwardBatch, inputs: Tensor) -> None:
        """Store the keys and values that each layer makes of contiguous float32 `inputs` [tokens, inputs]."""
        pieces, positions = batch.native, int(batch.positions.max()) + 1
        assert pieces is not None
        for i, layer in enumerate(self.layers):
            layer.read(batch.store, i, pieces, self._table(layer.rotation, positions), inputs)

    def call_on(self, store: KVStore, positions: int) -> LayersCall:
        """Return the call of all layers on a store, made anew when tables of rotations have become longer."""
        tables = [self._table(layer.rotation, positions) for layer in self.layers]
        call = self.calls.get(store)
        if call is None or not call.has_tables(tables):
            mixers = [
                layer.mixers(store, i, table) for i, (layer, table) in enumerate(zip(self.layers, tables, strict=True))
            ]
            call = self.calls[store] = LayersCall([layer.call for layer in self.layers], mixers, tables)
        return call

    @property
    def scratch_floats(self) -> int:
        """Floats per token that layers need in a pass."""
        return max(layer.call.scratch_floats for layer in self.layers)

    def _table(self, rotation: tuple[str, ...] | None, positions: int) -> Table:
        """Return a rotation's table for at least this many positions; a table too short is replaced by a longer one."""
        table = self._tables.get(rotation)
        if table is None or positions > len(table[0]):
            places = torch.arange(max(2 * positions, 512), device="cpu").unsqueeze(0)
            cosines = sines = torch.empty(1, places.shape[1], 0)
            (rotary,) = self._rotary
            if hasattr(rotary, "mrope_section"):  # transformers 5.17 does not repeat them for the axes of images
                places = places.expand(3, 1, -1)
            if rotary is not None and rotation is not None:
                cosines, sines = rotary(torch.empty(0), places, *rotation)
            table = self._tables[rotation] = cosines[0].contiguous(), sines[0].contiguous()
        return table

    @property
    def linear_calls(self) -> list[LinearCall]:
        return [call for layer in self.layers for call in layer.call.calls]

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights, which are not parameters of this module."""
        return sum(call.num_bytes for call in self.linear_calls)


def native_layers(
    layers: nn.ModuleList, rotary: nn.Module, config: Any, quantization: str | None
) -> NativeLayers | None:
    """Take the layers of a head apart; return None, with the layers untouched, if native code cannot run them."""
    kind = layer_kind(config)
    if quantization not in (None, *BITS) or kind is None or not can_fuse_layers(layers, kind, config):
        return None
    packing = Packing(None if quantization is None else BITS[quantization], narrows=True)
    return NativeLayers(taken_apart(layers), rotary, kind, config, packing)


def can_fuse_layers(layers: nn.ModuleList, kind: LayerKind, config: Any) -> bool:
    """Return whether native code runs decoder layers of a kind."""
    linears = [module for module in layers.modules() if isinstance(module, nn.Linear)]
    return all(type(layer) is nn.Linear and packs_type(layer.weight.dtype) for layer in linears) and all(
        isinstance(layer, Placeholder) or _can_fuse(LayerPlan.from_layer(layer, kind, config)) for layer in layers
    )


def _can_fuse(plan: LayerPlan) -> bool:
    return bool(plan.parts) and all(_can_fuse_part(plan, part) for part in plan.parts)


def _can_fuse_part(plan: LayerPlan, part: PartPlan) -> bool:
    """Return whether heads are small enough, and linear layers with the same input can be joined."""
    between, linears = part.kind.between, [one for group in part.linears for one in group]
    if between == "experts":
        return can_fuse_experts(plan, part)
    if any(getattr(one, "inputs", None) is not None for one in linears):  # their columns are in another order
        return False
    if part.has_factors and any(one.bias is not None for one in linears):
        return False
    first = part.linears[0]
    if part.attention is not None:
        return part.attention.head_dim <= MAX_DIM and can_join(first)
    if between == "recurrence":
        return bool(part.module.can_fuse and can_join(first))
    if between == "mlp":
        return plan.activation in GATES and first[0].out_features % GATES_OF_PANEL == 0 and are_alike(first)
    return plan.activation in _OPENINGS[between] and can_join(first)

"""Decoders whose layers are of a kind in `layer_kind.py`, computed in one native call.

Products with the same input are computed together (queries, keys and values; gates and values). Hidden states stay
float32 from layer to layer. Models of other kinds run as transformers defines them.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from specinfer.model.batch import ForwardBatch, KVStore
from specinfer.model.fused_layer import Layer, can_fuse_layers, norm_weight, taken_apart
from specinfer.model.fused_layers import call_of_layers, scratch_floats
from specinfer.model.layer_families import eps_of, kind_of, trunk_of
from specinfer.model.layer_inputs import can_take_inputs, inputs_of
from specinfer.model.linears import HEAD_BITS
from specinfer.model.offload.layer_stream import LayerStream
from specinfer.model.packing import Packing, call_of
from specinfer.model.recurrent.scan import Scan
from specinfer.model.rotations import Rotations
from specinfer.model.sharding.placeholder import EmbeddingPlaceholder, Placeholder
from specinfer.ops import LayersCall, LinearCall, QuantizedEmbedding, norm, packs_type
from specinfer.ops.cpu.draft import DecoderParts
from specinfer.ops.quantization import BITS
from specinfer.parallel.group import Alone, Group

# Callback with the number of computed layers and the hidden states after them, which it may modify.
Watch = Callable[[int, Tensor], None]
_HEAD_STATES = 3  # hidden states kept where the head begins: all, those of the logit rows, and these normed


class FusedDecoder(nn.Module):
    """A loaded model that `can_fuse` accepts; its definition is taken apart, layer by layer.

    Args:
        quantization: "int8" or "int4" to round the linear layers to, or None; see `linears.quantize_linears`.
        narrows: Whether to store float32 weights as bfloat16 if that loses nothing, as in most checkpoints.
    """

    def __init__(self, model: Any, quantization: str | None = None, *, narrows: bool = False) -> None:
        super().__init__()
        packing = Packing(None if quantization is None else BITS[quantization], narrows)
        kind, config = kind_of(model.config), model.config.get_text_config()
        assert kind is not None
        trunk = trunk_of(model)
        self.width = int(config.hidden_size)
        self._numbers = [i for i, layer in enumerate(trunk.layers) if not isinstance(layer, Placeholder)]
        parts = (layer for layer in taken_apart(trunk.layers) if not isinstance(layer, Placeholder))
        self.layers = [Layer(layer, kind, config, packing) for layer in parts]
        self.recurrent = nn.ModuleList(layer.recurrent for layer in self.layers if layer.recurrent is not None)
        taps = {one.recurrence.convolution.num_taps for one in self.layers if one.recurrence is not None}
        assert len(taps) <= 1
        self._taps = max(taps, default=0)
        self.stream: LayerStream | None = None  # brings in the layers, if they are not in memory
        embedding = getattr(trunk, kind.embedding)
        self.is_first = not isinstance(embedding, EmbeddingPlaceholder)
        self.layers_name = f"{kind.trunk}.layers"
        self.head = None
        if not isinstance(model.lm_head, Placeholder):
            last_norm = norm_weight(getattr(trunk, kind.last_norm), kind) * kind.head_scale(config)
            self.head = _Head(last_norm, eps_of(config), model.lm_head, packing, kind.cap_of(config))
        self.embedding: Tensor | QuantizedEmbedding | None = None
        self.embedding_scale = 1.0
        if self.is_first:
            self._take_embedding(embedding, model.lm_head, packing)
            if kind.embedding_factor is not None:
                self.embedding_scale = float(getattr(config, kind.embedding_factor))
        self.layer_inputs = inputs_of(trunk, config, eps_of(config), packing)
        self.group: Group = Alone()  # the ranks with shards of the same layers
        self._rotations = Rotations(getattr(trunk, kind.rotary, None))
        self._calls: WeakKeyDictionary[KVStore, LayersCall] = WeakKeyDictionary()

    def _take_embedding(self, embedding: Any, head: Any, packing: Packing) -> None:
        dtype = embedding.dtype if isinstance(embedding, QuantizedEmbedding) else embedding.weight.dtype
        if (scale := getattr(embedding, "embed_scale", None)) is not None:
            self.embedding_scale = float(scale.to(dtype))  # rounded as transformers does
        if isinstance(embedding, QuantizedEmbedding):
            self.embedding = embedding
            return
        is_tied = self.head is not None and head._parameters.get("weight") is embedding.weight
        # A tied embedding is read from the packed head, unless the head is rounded, which loses the original.
        if not is_tied or packing.bits is not None:
            weight = embedding.weight.detach()
            # A view of a mapped file would keep all of it resident.
            self.embedding = weight if weight.untyped_storage().resizable() else weight.clone()

    def forward(
        self,
        batch: ForwardBatch,
        hidden: Tensor | None = None,
        watch: Watch | None = None,
    ) -> Tensor:
        """Return [rows, vocab] float32 logits of the tokens that the batch asks for, or hidden states without a head.

        Args:
            hidden: [tokens, width] float32 output of the previous stage, modified in place.
            watch: Callback after the embedding and after each layer, see `Watch`.
        """
        assert (hidden is None) == self.is_first
        assert hidden is None or hidden.dtype == torch.float32
        hidden = self._first_hidden(batch.token_ids) if hidden is None else hidden
        if self.layer_inputs is not None:
            assert batch.native is not None
            batch.native.give(self.layer_inputs(batch.token_ids, hidden))
        hidden = self._computed(batch, hidden, watch)
        if self.head is None:
            return hidden
        rows = batch.logit_rows
        return self.head(hidden if rows.shape[0] == hidden.shape[0] else hidden.index_select(0, rows))

    def _computed(self, batch: ForwardBatch, hidden: Tensor, watch: Watch | None) -> Tensor:
        """Run the layers on `hidden` in place, and return it: [tokens, width]."""
        pieces = batch.native
        assert pieces is not None
        positions = int(batch.positions.max()) + 1
        sum_over_ranks = self.group.all_reduce if self.group.size > 1 else None
        known = self._scratch_floats(hidden.shape[0]) if sum_over_ranks is None else None
        scan = self._scan(batch)
        if scan is not None:
            pieces.follow(scan.native, scan.paths(self._taps))
        scratch = None  # not allocated for each layer
        if known is not None:
            scratch = torch.empty(hidden.shape[0] * known + pieces.num_scanned * self._scan_floats)
        if scratch is not None and watch is None and self.stream is None:
            self._in_one_call(batch.store, positions)(pieces, hidden, scratch, batch.adapters)
            self._wrote(scan)
            return hidden
        if watch is not None:
            watch(0, hidden)
        for i, layer in enumerate(self.layers):
            if self.stream is not None:
                self.stream.acquire(i)
            table = self._rotations.table(layer.rotation, positions)
            layer.call(
                layer.mixers(batch.store, i, table), pieces, *table, hidden, scratch, sum_over_ranks, batch.adapters
            )
            if self.stream is not None:
                self.stream.release(i)
            if watch is not None:
                watch(i + 1, hidden)
        self._wrote(scan)
        return hidden

    def _scan(self, batch: ForwardBatch) -> Scan | None:
        """Return the scan of layers without attention, or None if there are none."""
        if not self._taps:
            return None
        if not any(one.recurrence is not None and one.recurrence.recurrence is not None for one in self.layers):
            return Scan(batch.pieces, batch.store.states, batch.slots.device, recomputes=False)
        assert isinstance(batch.scan, Scan)
        return batch.scan

    def _wrote(self, scan: Scan | None) -> None:
        """Record that the states of all layers are written."""
        for layer in self.layers:
            if scan is not None and layer.recurrent is not None:
                scan.wrote(layer.recurrent.layer_idx)

    def _in_one_call(self, store: KVStore, positions: int) -> LayersCall:
        """Return the call of all layers on a store, made anew when tables have become longer."""
        tables = [self._rotations.table(layer.rotation, positions) for layer in self.layers]
        calls = self._calls.get(store)
        if calls is None or not calls.has_tables(tables):
            calls = self._calls[store] = call_of_layers(self.layers, store, tables)
        return calls

    def parts(self, store: KVStore, positions: int) -> DecoderParts | None:
        """Return the native calls of a whole pass for positions up to a number, or None if it has other parts."""
        embedding, floats = self.table, self._scratch_floats(1)
        if self.head is None or floats is None or self.stream is not None or self.group.size > 1 or embedding is None:
            return None
        if self._taps or store.taps:  # a level of a draft has no scan, and stores no hidden states
            return None
        layers, head = self._in_one_call(store, positions), self.head
        return DecoderParts(
            layers, floats, embedding, self.embedding_scale, head.norm, head.eps, head.call, self.layer_inputs, head.cap
        )  # fmt: skip

    def connect(self, group: Group, sums: Sequence[str]) -> None:
        """Add up results over the ranks with shards of the same layers, where only a part of them is computed.

        Args:
            sums: Names of the definition's modules whose results are added up.
        """
        self.group = group
        for number, layer in zip(self._numbers, self.layers, strict=True):
            for kind, part in zip(layer.kinds, layer.call.parts, strict=True):
                part.is_split = f"{self.layers_name}.{number}.{kind.second}" in sums

    @property
    def table(self) -> LinearCall | Tensor | None:
        """The embedding's rows without its scale, as in `DecoderParts`, or None if native code cannot read them."""
        if isinstance(self.embedding, QuantizedEmbedding):
            return self.embedding.call
        if self.embedding is None and self.is_first and self.head is not None:
            return self.head.call
        return self.embedding

    def embedded(self, token_ids: Tensor) -> Tensor:
        """Return the [tokens, width] float32 rows of the embedding, without its scale."""
        if isinstance(self.embedding, Tensor):
            return self.embedding.index_select(0, token_ids).float()
        if self.embedding is not None:
            return self.embedding.rows(token_ids)
        assert self.head is not None
        return self.head.call.rows(token_ids)

    def _first_hidden(self, token_ids: Tensor) -> Tensor:
        rows = self.embedded(token_ids)
        return rows if self.embedding_scale == 1.0 else rows.mul_(self.embedding_scale)

    def floats_per_token(self, tokens: int) -> int | None:
        """Return the floats that a pass over `tokens` tokens keeps in memory per token, or None if it is unknown."""
        known, hidden = self._scratch_floats(tokens), self.width
        if known is None:
            return None
        given = 0 if self.layer_inputs is None else self.layer_inputs.floats_per_token
        return given + max(hidden + known + self._scan_floats, _HEAD_STATES * hidden)

    @property
    def _scan_floats(self) -> int:
        return max(layer.call.scan_floats for layer in self.layers)

    def _scratch_floats(self, tokens: int) -> int | None:
        """Return the same for a layer, without the hidden states."""
        return scratch_floats(self.layers, tokens)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights, which are not parameters of this module."""
        heads = [] if self.head is None else [self.head.call]
        calls = [*heads, *(call for layer in self.layers for call in layer.call.calls)]
        if isinstance(self.embedding, QuantizedEmbedding) and self.embedding.call is not None:
            calls.append(self.embedding.call)
        embedding = int(self.embedding.nbytes) if isinstance(self.embedding, Tensor) else 0
        embedding += 0 if self.layer_inputs is None else self.layer_inputs.num_bytes
        return embedding + sum(call.num_bytes for call in {id(one.panels): one for one in calls}.values())


class _Head:
    """The last norm and the output head, which compute logits from hidden states."""

    def __init__(self, weight: Tensor, eps: float, head: nn.Linear, packing: Packing, cap: float | None) -> None:
        self.norm, self.eps, self.cap = weight, eps, cap
        self.call = call_of([head], packing if packing.bits is None else replace(packing, bits=HEAD_BITS))

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return [rows, vocab] float32 logits of [rows, width] hidden states."""
        return capped(self.call(norm(hidden, self.norm, self.eps)), self.cap)


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """Apply a soft cap to logits in place, and return them."""
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def has_sums(model: Any) -> bool:
    """Return whether layers have parts whose results are normed and added up before they are added."""
    kind = kind_of(model.config)
    return kind is not None and any(
        part.sum is not None for layer in trunk_of(model).layers for part in kind.parts_of(layer)
    )


def can_fuse(model: Any) -> bool:
    """Return whether the model's layers are of a known kind, and native kernels run it faster on a CPU."""
    if kind_of(model.config) is None:
        return False
    trunk, config = trunk_of(model), model.config.get_text_config()
    linears = [one for one in (*trunk.modules(), *model.lm_head.modules()) if isinstance(one, nn.Linear)]
    return (
        can_take_inputs(trunk, config)
        and can_fuse_layers(trunk.layers, config)
        and all(type(layer) is nn.Linear and packs_type(layer.weight.dtype) for layer in linears)
    )

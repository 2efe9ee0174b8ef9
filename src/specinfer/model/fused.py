"""Decoders whose layers are of a kind in `layer_kind.py`, computed in one native call per layer.

Products with the same input are computed together (queries, keys and values; gates and values). Hidden states stay
float32 from layer to layer. Models of other kinds run as transformers defines them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
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
    Panels,
    QuantizedEmbedding,
    QuantizedLinear,
    QuantizedWeight,
    choose,
    norm,
    packs_type,
    quantize,
)
from specinfer.kernels.attention import MAX_DIM
from specinfer.kernels.quantization import BITS, Bits
from specinfer.model.batch import ForwardBatch, KVStore
from specinfer.model.cut import Cut
from specinfer.model.layer_kind import LayerKind, activation_of, kind_of, linears_of, window_of
from specinfer.model.linears import HEAD_BITS
from specinfer.model.offload.layer_stream import LayerStream
from specinfer.model.offload.meta_weights import origin_of
from specinfer.model.sharding.placeholder import EmbeddingPlaceholder, Placeholder
from specinfer.parallel.group import Alone, Group

# Callback with the number of computed layers and the hidden states after them, which it may modify.
Watch = Callable[[int, Tensor], None]
_HEAD_STATES = 3  # hidden states kept where the head begins: all, those of the logit rows, and these normed
_GATES = 16  # gates per panel; as many values follow them
_ROWS_AT_ONCE = 1024  # rows of a weight checked at a time
_Table = tuple[Tensor, Tensor]  # [positions, rotated] cosines and sines


class FusedDecoder(nn.Module):
    """A loaded model that `can_fuse` accepts; its definition is taken apart, layer by layer.

    Args:
        quantization: "int8" or "int4" to round the linear layers to, or None; see `linears.quantize_linears`.
        narrows: Whether to store float32 weights as bfloat16 if that loses nothing, as in most checkpoints.
    """

    def __init__(self, model: Any, quantization: str | None = None, *, narrows: bool = False) -> None:
        super().__init__()
        packing = _Packing(None if quantization is None else BITS[quantization], narrows)
        trunk, kind = model.model, kind_of(model.config)
        assert kind is not None
        self.width = int(model.config.hidden_size)
        parts = (layer for layer in taken_apart(trunk.layers) if not isinstance(layer, Placeholder))
        self.layers = [_Layer(layer, kind, model.config, packing) for layer in parts]
        self.stream: LayerStream | None = None  # brings in the layers, if they are not in memory
        self.is_first = not isinstance(trunk.embed_tokens, EmbeddingPlaceholder)
        self.head = None
        if not isinstance(model.lm_head, Placeholder):
            self.head = _Head(_weight(trunk.norm, kind), float(model.config.rms_norm_eps), model.lm_head, packing)
        self.embedding: Tensor | QuantizedEmbedding | None = None
        self.embedding_scale = 1.0
        if self.is_first:
            self._take_embedding(trunk.embed_tokens, model.lm_head, packing)
        self.rotary = trunk.rotary_emb
        self.group: Group = Alone()  # the ranks with shards of the same layers
        self._tables: dict[tuple[str, ...], _Table] = {}

    def _take_embedding(self, embedding: Any, head: Any, packing: "_Packing") -> None:
        dtype = embedding.dtype if isinstance(embedding, QuantizedEmbedding) else embedding.weight.dtype
        if (scale := getattr(embedding, "embed_scale", None)) is not None:
            self.embedding_scale = float(scale.to(dtype))  # rounded as transformers does
        if isinstance(embedding, QuantizedEmbedding):
            self.embedding = embedding
            return
        is_tied = self.head is not None and head._parameters.get("weight") is embedding.weight
        # A tied embedding is read from the packed head, unless the head is rounded, which loses the original.
        self.embedding = None if is_tied and packing.bits is None else embedding.weight.detach()

    def forward(self, batch: ForwardBatch, hidden: Tensor | None = None, watch: Watch | None = None) -> Tensor:
        """Return [rows, vocab] float32 logits of the tokens that the batch asks for, or hidden states without a head.

        Args:
            hidden: [tokens, width] float32 output of the previous stage, modified in place.
            watch: Callback after the embedding and after each layer, see `Watch`.
        """
        assert (hidden is None) == self.is_first
        hidden = self._computed(batch, self._first_hidden(batch.token_ids) if hidden is None else hidden, watch)
        if self.head is None:
            return hidden
        return self.head(hidden if batch.logit_rows.shape[0] == hidden.shape[0] else hidden[batch.logit_rows])

    def _computed(self, batch: ForwardBatch, hidden: Tensor, watch: Watch | None) -> Tensor:
        """Run the layers on `hidden` in place, and return it: [tokens, width]."""
        pieces = batch.native
        assert pieces is not None
        positions = int(batch.positions.max()) + 1
        sum_over_ranks = self.group.all_reduce if self.group.size > 1 else None
        known = self._scratch_floats(hidden.shape[0]) if sum_over_ranks is None else None
        scratch = None if known is None else torch.empty(hidden.shape[0] * known)  # not allocated for each layer
        if watch is not None:
            watch(0, hidden)
        for i, layer in enumerate(self.layers):
            if self.stream is not None:
                self.stream.acquire(i)
            table = self._table(layer.rotation, positions)
            attention = layer.attention(batch.store, i)
            layer.call(attention, pieces, *table, hidden, scratch, sum_over_ranks, batch.adapters)
            if self.stream is not None:
                self.stream.release(i)
            if watch is not None:
                watch(i + 1, hidden)
        return hidden

    def embedded(self, token_ids: Tensor) -> Tensor:
        """Return the [tokens, width] float32 rows of the embedding, without its scale."""
        if isinstance(self.embedding, Tensor):
            return self.embedding[token_ids].float()
        if self.embedding is not None:
            return self.embedding.call.rows(token_ids)
        assert self.head is not None
        return self.head.call.rows(token_ids)

    def _first_hidden(self, token_ids: Tensor) -> Tensor:
        rows = self.embedded(token_ids)
        return rows if self.embedding_scale == 1.0 else rows.mul_(self.embedding_scale)

    def _table(self, rotation: tuple[str, ...], positions: int) -> _Table:
        """Return a rotation's table for at least this many positions; a table too short is replaced by a longer one."""
        table = self._tables.get(rotation)
        if table is None or positions > len(table[0]):
            places = torch.arange(max(2 * positions, 512), device="cpu").unsqueeze(0)
            cosines, sines = self.rotary(torch.empty(0), places, *rotation)
            table = self._tables[rotation] = cosines[0].contiguous(), sines[0].contiguous()
        return table

    def floats_per_token(self, tokens: int) -> int | None:
        """Return the floats that a pass over `tokens` tokens keeps in memory per token, or None if it is unknown."""
        known, hidden = self._scratch_floats(tokens), self.width
        return None if known is None else max(hidden + known, _HEAD_STATES * hidden)

    def _scratch_floats(self, tokens: int) -> int | None:
        """Return the same for a layer, without the hidden states."""
        floats = [layer.call.scratch_floats(tokens) for layer in self.layers]
        known = [count for count in floats if count is not None]
        return max(known) if len(known) == len(floats) else None

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights, which are not parameters of this module."""
        heads = [] if self.head is None else [self.head.call]
        calls = [*heads, *(call for layer in self.layers for call in layer.call.linears)]
        if isinstance(self.embedding, QuantizedEmbedding):
            calls.append(self.embedding.call)
        embedding = int(self.embedding.nbytes) if isinstance(self.embedding, Tensor) else 0
        return embedding + sum(call.num_bytes for call in {id(one.panels): one for one in calls}.values())


@dataclass(frozen=True, slots=True)
class Origin:
    """The checkpoint tensors that a linear layer is made of, see `_call`; None for an unknown one."""

    call: LinearCall
    sources: tuple[tuple[str, Cut | None] | None, ...]
    interleaved: bool


@dataclass(frozen=True, slots=True)
class _Packing:
    """The storage of weights; fields as in `FusedDecoder`."""

    bits: Bits | None
    narrows: bool


class _Head:
    """The last norm and the output head, which compute logits from hidden states."""

    def __init__(self, weight: Tensor, eps: float, head: nn.Linear, packing: _Packing) -> None:
        self.norm, self.eps = weight, eps
        self.call = _call([head], packing if packing.bits is None else replace(packing, bits=HEAD_BITS))

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return [rows, vocab] float32 logits of [rows, width] hidden states."""
        return self.call(norm(hidden, self.norm, self.eps))


class _Layer:
    """One decoder layer.

    Attributes:
        rotation: Arguments that select this layer's rotation in the model's rotary embedding.
        shapes: Inputs and outputs of the linear layers that each of its calls computes.
    """

    def __init__(self, layer: Any, kind: LayerKind, config: Any, packing: _Packing) -> None:
        attention = layer.self_attn
        self.heads, self.scale = attention.q_proj.out_features // attention.head_dim, attention.scaling
        self.window = window_of(attention)
        self.rotation: tuple[str, ...] = (attention.layer_type,) if kind.rotates_by_type else ()
        self.head_norms = [
            _weight(one, kind) if (one := getattr(attention, name, None)) is not None else None
            for name in ("q_norm", "k_norm")
        ]
        made_of = linears_of(layer)
        self.shapes = [[(one.in_features, one.out_features) for one in parts] for parts in made_of]
        qkv, output = (_call(list(linears), packing) for linears in made_of[:2])
        gated, down = _call(list(made_of[2]), packing, interleaved=True), _call(list(made_of[3]), packing)
        norms = _weights(layer, kind.norms, kind)
        post_norms = None if kind.post_norms is None else _weights(layer, kind.post_norms, kind)
        self.eps, gate = float(config.rms_norm_eps), GATES[activation_of(config)]
        self.call = LayerCall((qkv, output, gated, down), norms, self.eps, post_norms=post_norms, gate=gate)
        self.origins = [
            Origin(call, tuple(origin_of(part._parameters.get("weight")) for part in parts), interleaved=call is gated)
            for call, parts in zip(self.call.linears, made_of, strict=True)
        ]
        self._attention: WeakKeyDictionary[KVStore, AttentionCall] = WeakKeyDictionary()

    def attention(self, store: KVStore, index: int) -> AttentionCall:
        """Return the attention over the store's keys and values, made once for each store."""
        call = self._attention.get(store)
        if call is None:
            query_norm, key_norm = self.head_norms
            call = self._attention[store] = AttentionCall(
                store.keys[index],
                store.values[index],
                self.heads,
                self.scale,
                window=self.window,
                query_norm=query_norm,
                key_norm=key_norm,
                eps=self.eps,
                rotated=store.keys[index].shape[2],
            )
        return call


def can_fuse(model: Any) -> bool:
    """Return whether the model's layers are of a known kind, and native kernels run it faster on a CPU."""
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if kind_of(model.config) is None or activation_of(model.config) not in GATES:
        return False
    first = next(layer for layer in model.model.layers if not isinstance(layer, Placeholder))
    return bool(
        all(type(layer) is nn.Linear and packs_type(layer.weight.dtype) for layer in linears)
        and all(_can_join(layer) for layer in model.model.layers)
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


def _weight(norm: Any, kind: LayerKind) -> Tensor:
    """Return the [size] float32 weight of a norm."""
    weight: Tensor = norm.weight.float() + kind.norm_offset
    return weight


def _weights(layer: Any, names: tuple[str, str], kind: LayerKind) -> tuple[Tensor, Tensor]:
    first, second = (_weight(getattr(layer, name), kind) for name in names)
    return first, second


def _call(parts: list[nn.Linear], packing: _Packing, *, interleaved: bool = False) -> LinearCall:
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


def _call_of_codes(parts: Sequence[Any], packing: _Packing, *, interleaved: bool) -> LinearCall:
    """Return a call of layers of which some are stored as codes."""
    if interleaved:
        weights, join = [part.quantized for part in parts], partial(together, interleaved=True)
        return LinearCall(Panels.of_codes(QuantizedWeight.joined(weights, join), _bias(parts, interleaved=True)))
    panels = []
    for part in parts:
        call = part.call if isinstance(part, QuantizedLinear) else _call([part], packing)
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

"""Decoders whose layers are of a kind in `families.py`, computed in one native call on CPUs.

Models of other kinds run as transformers defines them.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from specinfer.model.batch import ForwardBatch, KVStore
from specinfer.model.layers.families import layer_kind, trunk_of
from specinfer.model.layers.native import NativeLayer, NativeLayers, Watch, can_fuse_layers
from specinfer.model.layers.packing import Packing, call_of
from specinfer.model.layers.plan import eps_of, taken_apart
from specinfer.model.linears import HEAD_BITS
from specinfer.model.sharding.placeholder import EmbeddingPlaceholder, Placeholder
from specinfer.ops import LayerInputsCall, LinearCall, QuantizedEmbedding, norm, packs_type
from specinfer.ops.cpu.draft import DecoderParts
from specinfer.ops.quantization import BITS
from specinfer.parallel.group import Group

_HEAD_STATES = 3  # hidden states stored where the head begins: all, those of the logit rows, and these normed


class FusedDecoder(nn.Module):
    """A loaded model that `can_fuse` accepts; its definition is taken apart, layer by layer.

    Args:
        quantization: "int8" or "int4" to round the linear layers to, or None; see `linears.quantize_linears`.
        narrows: Whether to store float32 weights as bfloat16 if that loses nothing, as in most checkpoints.
    """

    def __init__(self, model: Any, quantization: str | None = None, *, narrows: bool = False) -> None:
        super().__init__()
        packing = Packing(None if quantization is None else BITS[quantization], narrows)
        kind, config = layer_kind(model.config), model.config.get_text_config()
        assert kind is not None
        trunk = trunk_of(model)
        self.width = int(config.hidden_size)
        self._numbers = [i for i, layer in enumerate(trunk.layers) if not isinstance(layer, Placeholder)]
        layers = (layer for layer in taken_apart(trunk.layers) if not isinstance(layer, Placeholder))
        self.stack = NativeLayers(layers, getattr(trunk, kind.rotary, None), kind, config, packing)
        embedding = getattr(trunk, kind.embedding)
        self.is_first = not isinstance(embedding, EmbeddingPlaceholder)
        self.layers_name, eps = f"{kind.trunk}.layers", eps_of(config, kind)
        self.head = None
        if not isinstance(model.lm_head, Placeholder):
            last_norm = kind.norm_weight(getattr(trunk, kind.last_norm)) * kind.head_scale(config)
            cap = None if kind.head_cap is None else getattr(config, kind.head_cap)
            self.head = _Head(last_norm, eps, model.lm_head, packing, cap)
        self.embedding: Tensor | QuantizedEmbedding | None = None
        self.embedding_scale = 1.0
        if self.is_first:
            self._take_embedding(embedding, model.lm_head, packing)
            if kind.embedding_factor is not None:
                self.embedding_scale = float(getattr(config, kind.embedding_factor))
        self.layer_inputs = _layer_inputs(trunk, config, eps, packing)

    @property
    def layers(self) -> list[NativeLayer]:
        return self.stack.layers

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

    def forward(self, batch: ForwardBatch, hidden: Tensor | None = None, watch: Watch | None = None) -> Tensor:
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
        hidden = self.stack(batch, hidden, watch=watch)
        if self.head is None:
            return hidden
        rows = batch.logit_rows
        return self.head(hidden if rows.shape[0] == hidden.shape[0] else hidden.index_select(0, rows))

    def parts(self, store: KVStore, positions: int) -> DecoderParts | None:
        """Return the native calls of a whole pass for positions up to a number, or None if it has other parts."""
        stack, embedding, head = self.stack, self.table, self.head
        if head is None or stack.stream is not None or stack.group.size > 1 or embedding is None:
            return None
        if stack.num_taps or store.taps:  # a level of a draft has no scan, and stores no hidden states
            return None
        return DecoderParts(
            stack.call_on(store, positions), stack.scratch_floats, embedding, self.embedding_scale, head.norm,
            head.eps, head.call, self.layer_inputs, head.cap,
        )  # fmt: skip

    def connect(self, group: Group, sums: Sequence[str]) -> None:
        """Add up results over the ranks with shards of the same layers, where only a part of them is computed.

        Args:
            sums: Names of the definition's modules whose results are added up.
        """
        self.stack.group = group
        for number, layer in zip(self._numbers, self.layers, strict=True):
            layer.connect(f"{self.layers_name}.{number}", sums)

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

    def hidden_dtype(self, _dtype: torch.dtype) -> torch.dtype:
        """Return the type of hidden states between stages, of a model of another type."""
        return torch.float32

    @property
    def floats_per_token(self) -> int:
        """Floats that a pass stores per token."""
        given, hidden = (0 if self.layer_inputs is None else self.layer_inputs.floats_per_token), self.width
        return given + max(hidden + self.stack.scratch_floats + self.stack.scan_floats, _HEAD_STATES * hidden)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights, which are not parameters of this module."""
        calls = [*([] if self.head is None else [self.head.call]), *self.stack.linear_calls]
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


def _has_layer_inputs(config: Any) -> bool:
    """Return whether layers read inputs in addition to hidden states, as those of Gemma 4 do."""
    return bool(getattr(config, "hidden_size_per_layer_input", None))


def _layer_inputs(trunk: Any, config: Any, eps: float, packing: Packing) -> LayerInputsCall | None:
    """Return the call that computes the inputs of all layers, or None if they read hidden states alone.

    What is outside of layers is not rounded.
    """
    if not _has_layer_inputs(config):
        return None
    table, mean = trunk.embed_tokens_per_layer, float(trunk.per_layer_input_scale)  # of the rows and the projection
    is_quantized = isinstance(table, QuantizedEmbedding)
    dtype = table.dtype if is_quantized else table.weight.dtype
    return LayerInputsCall(
        table.call if is_quantized else table.weight.detach(),
        float(table.embed_scale.to(dtype)) * mean,  # rounded as transformers does
        call_of([trunk.per_layer_model_projection], replace(packing, bits=None)),
        trunk.per_layer_projection_norm.weight.detach().float() * mean,
        # The definition multiplies what it norms by this number first.
        eps / float(trunk.per_layer_model_projection_scale) ** 2,
    )


def has_sums(model: Any) -> bool:
    """Return whether layers have parts whose results are normed and added up before they are added."""
    kind = layer_kind(model.config)
    return kind is not None and any(
        part.sum is not None for layer in trunk_of(model).layers for part in kind.parts_of(layer)
    )


def can_fuse(model: Any) -> bool:
    """Return whether the model's layers are of a known kind, which native kernels run."""
    if (kind := layer_kind(model.config)) is None:
        return False
    trunk, config = trunk_of(model), model.config.get_text_config()
    if _has_layer_inputs(config):
        table = trunk.embed_tokens_per_layer
        if isinstance(table, EmbeddingPlaceholder):
            return False
        if not (table.call is not None if isinstance(table, QuantizedEmbedding) else packs_type(table.weight.dtype)):
            return False
    linears = [one for one in (*trunk.modules(), *model.lm_head.modules()) if isinstance(one, nn.Linear)]
    return can_fuse_layers(trunk.layers, kind, config) and all(
        type(layer) is nn.Linear and packs_type(layer.weight.dtype) for layer in linears
    )

"""Decoder of Llama-like models on GPUs: few launches per layer, all of fixed shapes, so that passes can be captured.

It supports the families of the kind `LLAMA` (`layer_families.py`): whole models, the shards of ranks, and the layers of
heads. Products with the same input are computed together (queries, keys and values; gates and values). Each of these is
one launch: the residual sum with the norm; head norms, rotation and the store of keys and values; SiLU with its
product. Nothing is read back from the device. Rotations are looked up by position in a table made at load. On a CPU the
same code runs with the plain versions in `ops/layer_ops.py`.
"""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from specinfer.core.tree_shape import MAX_TREE_NODES
from specinfer.model.attention import AttentionFeatures, attend_stored
from specinfer.model.batch import ForwardBatch
from specinfer.model.fused import Watch
from specinfer.model.fused_layer import taken_apart
from specinfer.model.layer_families import LLAMA, activation_of, kind_of
from specinfer.model.layer_kind import linears_of, window_of
from specinfer.model.linears import can_join, joined
from specinfer.model.sharding.placeholder import EmbeddingPlaceholder, Placeholder
from specinfer.ops.layer_ops import (
    add_norm,
    few_rows_product,
    gate,
    gated_product,
    has_few_rows_kernel,
    rotate_and_store,
)
from specinfer.ops.plain_layer import rotation_table, sum_parts
from specinfer.parallel.group import Group
from specinfer.parallel.rank_sums import RankSums


class DeviceDecoder(nn.Module):
    """A loaded model that `can_fuse_on_device` accepts, on its device; its definition is taken apart, layer by layer.

    Args:
        max_position: Length of the longest text. Guesses after its end may have positions beyond.
    """

    rotations: Tensor  # [positions, dim] float32

    def __init__(self, model: Any, max_position: int) -> None:
        super().__init__()
        trunk = model.model
        self.width = int(model.config.hidden_size)
        self.is_first = not isinstance(trunk.embed_tokens, EmbeddingPlaceholder)
        self.embedding = trunk.embed_tokens if self.is_first else None
        has_head = not isinstance(model.lm_head, Placeholder)
        self.norm = DeviceNorm(trunk.norm) if has_head else None
        self.head = model.lm_head if has_head else None
        layers = (layer for layer in taken_apart(trunk.layers) if not isinstance(layer, Placeholder))
        self.layers = nn.ModuleList(_Layer(layer, i) for i, layer in enumerate(layers))
        device = next(self.layers.parameters()).device
        self.register_buffer("rotations", _rotations(trunk.rotary_emb, max_position, device), persistent=False)
        self.rank_sums: RankSums | None = None  # over the ranks that have the other heads and the other gates

    @property
    def attends_at_any_distance(self) -> bool:
        """True if no layer has a window, so that keys need no positions."""
        return all(isinstance(layer, _Layer) and layer.window is None for layer in self.layers)

    def connect(self, group: Group, sums: Sequence[str]) -> None:
        """Add up results over the ranks with shards of the same layers, where each computes a part of them.

        Args:
            sums: Names of the definition's modules whose results are added up.
        """
        if not sums:
            return
        assert len(sums) == 2 * len(self.layers)
        self.rank_sums = RankSums(group)
        for layer in self.layers:
            assert isinstance(layer, _Layer)
            layer.sums = self.rank_sums

    def embedded(self, token_ids: Tensor) -> Tensor:
        """Return the [tokens, width] rows of the embedding; not of later stages."""
        assert self.embedding is not None
        rows: Tensor = self.embedding(token_ids)
        return rows

    def forward(self, batch: ForwardBatch, hidden: Tensor | None = None, watch: Watch | None = None) -> Tensor:
        """Return [rows, vocab] float32 logits of the tokens that the batch asks for, or hidden states without a head.

        Args:
            hidden: [tokens, width] output of the previous stage, modified in place.
            watch: Callback after the embedding and after each layer.
        """
        assert (hidden is None) == self.is_first
        hidden = self.embedded(batch.token_ids) if hidden is None else hidden
        added: Tensor | None = None
        if watch is not None:
            watch(0, hidden)
        for i, layer in enumerate(self.layers):
            added = layer(batch, hidden, added, self.rotations)
            if watch is not None and (not batch.store.taps or i + 1 in batch.store.taps):  # a sum costs two launches
                watch(i + 1, hidden.add_(sum_parts(added, hidden.dtype)))
                added.zero_()
        assert added is not None
        if self.norm is None or self.head is None:
            return hidden.add_(sum_parts(added, hidden.dtype))
        hidden, added = hidden[batch.logit_rows], added[..., batch.logit_rows, :]  # the head is the widest product
        logits: Tensor = self.head(self.norm(hidden, added))
        return logits.float()


class DeviceLayers(nn.Module):
    """The decoder layers of a head of Llama's kind, on their device; they are taken apart, layer by layer.

    Args:
        max_position: As for `DeviceDecoder`.
    """

    rotations: Tensor  # [positions, dim] float32

    def __init__(self, layers: nn.ModuleList, rotary: nn.Module, max_position: int) -> None:
        super().__init__()
        device = next(layers.parameters()).device
        self.register_buffer("rotations", _rotations(rotary, max_position, device), persistent=False)
        self.layers = nn.ModuleList(_Layer(layer, i) for i, layer in enumerate(taken_apart(layers)))

    @classmethod
    def of(cls, layers: nn.ModuleList, rotary: nn.Module, config: Any, max_position: int) -> Self | None:
        """Take layers apart; return None, with the layers untouched, if they are of another kind."""
        return cls(layers, rotary, max_position) if _is_llama(config) and all(map(_is_plain, layers)) else None

    @property
    def first_norm(self) -> Tensor:
        """The [width] weight of the norm before the first attention."""
        first: Any = self.layers[0]
        weight: Tensor = first.attention_norm.weight
        return weight

    def forward(
        self, batch: ForwardBatch, hidden: Tensor, inputs: Tensor | None = None, windowed: ForwardBatch | None = None
    ) -> Tensor:
        """Update `hidden` [tokens, width] in place, and return what `add_norm` adds to it.

        Args:
            inputs: What the first layer's attention reads in place of the norm of `hidden`, or None.
            windowed: The batch as layers with a window see it, or None for the same.
        """
        added: Tensor | None = None
        for layer in self.layers:
            seen = batch if windowed is None or layer.window is None else windowed
            added, inputs = layer(seen, hidden, added, self.rotations, inputs), None
        assert added is not None
        return added

    def read(self, batch: ForwardBatch, inputs: Tensor) -> None:
        """Store the keys and values that each layer makes of `inputs` [tokens, width], and compute nothing else."""
        for layer in self.layers:
            assert isinstance(layer, _Layer)
            layer.read(batch, inputs, self.rotations)


class DeviceNorm(nn.Module):
    """An RMS norm of transformers in one launch."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, float(norm.variance_epsilon)

    def forward(self, hidden: Tensor, added: Tensor | None = None) -> Tensor:
        return add_norm(hidden, added, self.weight, self.eps)


class _Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, layer: Any, index: int) -> None:
        super().__init__()
        attention = layer.self_attn
        self.index, self.scale, self.window = index, float(attention.scaling), window_of(attention)
        has_norm = hasattr(layer.input_layernorm, "weight")  # the first layer of EAGLE-1 heads has none
        self.attention_norm: Any = DeviceNorm(layer.input_layernorm) if has_norm else None
        self.mlp_norm = DeviceNorm(layer.post_attention_layernorm)
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        self.query_norm, self.key_norm = (one and DeviceNorm(one) for one in norms)
        self.names, made_of = LLAMA.linear_names(layer), linears_of(layer, LLAMA)
        self.shapes = [[(one.in_features, one.out_features) for one in parts] for parts in made_of]
        self.qkv, self.output, self.gated, self.down = map(joined, made_of)
        self.sums: RankSums | None = None

    def forward(
        self,
        batch: ForwardBatch,
        hidden: Tensor,
        added: Tensor | None,
        rotations: Tensor,
        inputs: Tensor | None = None,
    ) -> Tensor:
        """Return what the caller adds to `hidden`: [tokens, width], or the parts that `few_rows_product` returns.

        Args:
            hidden: [tokens, width] residual stream, updated in place.
            added: Result of the previous layer, not yet added to `hidden`.
            inputs: [tokens, inputs] what attention reads in place of the norm of `hidden`, or None.
        """
        inputs = self.attention_norm(hidden, added) if inputs is None else inputs
        query = self.rotate_and_store(batch, _product(batch, self.qkv, inputs), rotations, hidden.dtype)
        seen = attend_stored(batch, self.index, query, AttentionFeatures(self.scale, self.window))
        attended = self._summed(batch, self.output, seen.flatten(1))
        gated = self._gated_rows(batch, self.mlp_norm(hidden, attended))
        return self._summed(batch, self.down, gated)

    def _gated_rows(self, batch: ForwardBatch, rows: Tensor) -> Tensor:
        gated: Any = self.gated
        if _has_few_rows_kernel(batch, rows, gated):
            return gated_product(rows, gated.weight, gated.bias)
        return gate(gated(rows))

    def _summed(self, batch: ForwardBatch, linear: nn.Module, rows: Tensor) -> Tensor:
        return _product(batch, linear, rows) if self.sums is None else self.sums.all_reduce(linear(rows))

    def read(self, batch: ForwardBatch, inputs: Tensor, rotations: Tensor) -> None:
        """Store the keys and values of `inputs` [tokens, width]."""
        linear: Any = self.qkv
        if type(linear) is nn.Linear:  # the last rows of its weight
            count = 2 * batch.store.keys[self.index][0].numel()
            bias = None if linear.bias is None else linear.bias[-count:]
            self.rotate_and_store(batch, functional.linear(inputs, linear.weight[-count:], bias), rotations)
        else:
            self.rotate_and_store(batch, linear(inputs), rotations)

    def rotate_and_store(
        self, batch: ForwardBatch, qkv: Tensor, rotations: Tensor, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return [tokens, heads, dim] rotated queries in a type, and store keys and values."""
        store = batch.store
        keys, values, scales = store.keys[self.index], store.values[self.index], store.scales[self.index]
        query_norm, key_norm = self.query_norm, self.key_norm
        norms = None if query_norm is None or key_norm is None else (query_norm.weight, key_norm.weight)
        eps = 0.0 if query_norm is None else query_norm.eps
        rows = qkv, batch.positions, rotations, batch.slots
        return rotate_and_store(*rows, keys, values, norms, eps, scales, dtype=dtype)


def _product(batch: ForwardBatch, linear: Any, rows: Tensor) -> Tensor:
    if _has_few_rows_kernel(batch, rows, linear):
        return few_rows_product(rows, linear.weight, linear.bias)
    result: Tensor = linear(rows)
    return result


def _has_few_rows_kernel(batch: ForwardBatch, rows: Tensor, linear: nn.Module) -> bool:
    # Adapters add to what a linear layer returns, by hooks.
    return batch.adapters is None and batch.adapter_rows is None and has_few_rows_kernel(rows, linear)


def _rotations(rotary: nn.Module, max_position: int, device: torch.device) -> Tensor:
    places = torch.arange(max_position + MAX_TREE_NODES, device=device).unsqueeze(0)
    cosines, sines = rotary(torch.empty(0, device=device), places)
    return rotation_table(cosines[0], sines[0])


def can_fuse_on_device(model: Any, device: torch.device) -> bool:
    """Return whether the device is a GPU and the model is of Llama's kind; its linear layers may be quantized."""
    if device.type != "cuda" or not _is_llama(model.config):
        return False
    layers = [layer for layer in model.model.layers if not isinstance(layer, Placeholder)]
    return all(map(_is_plain, layers)) and (isinstance(model.lm_head, Placeholder) or can_join(model.lm_head))


def _is_llama(config: Any) -> bool:
    return kind_of(config) is LLAMA and activation_of(config) == "silu"


def _is_plain(layer: Any) -> bool:
    return all(
        can_join(one) and getattr(one, "call", None) is None for parts in linears_of(layer, LLAMA) for one in parts
    )

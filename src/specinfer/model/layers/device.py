"""Decoder of Llama-like models on GPUs: few launches per layer, all of fixed shapes, so that passes can be captured.

It runs plans of the kind `LLAMA` (`families.py`): whole models, the shards of ranks, and the layers of heads. Products
with the same input are computed together (queries, keys and values; gates and values). Each of these is one launch: the
residual sum with the norm; head norms, rotation and the store of keys and values; SiLU with its product. Nothing is
read back from the device. Rotations are looked up by position in a table made at load.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from specinfer.core.tree_shape import MAX_TREE_NODES
from specinfer.model.attention import AttentionFeatures, attend_stored
from specinfer.model.batch import ForwardBatch
from specinfer.model.layers.families import LLAMA, layer_kind
from specinfer.model.layers.fused import FusedDecoder
from specinfer.model.layers.native import Watch
from specinfer.model.layers.plan import JoinedLinears, LayerPlan, activation_of, taken_apart
from specinfer.model.linears import can_join, joined
from specinfer.model.sharding.placeholder import EmbeddingPlaceholder, Placeholder
from specinfer.ops.layer_ops import (
    add_norm,
    few_rows_product,
    gate,
    gated_product,
    has_few_rows_kernel,
    rotate_and_store,
    rotation_table,
    sum_parts,
)
from specinfer.parallel.group import Group
from specinfer.parallel.rank_sums import RankSums


class DeviceNorm(nn.Module):
    """An RMS norm of transformers in one launch."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, float(norm.variance_epsilon)

    def forward(self, hidden: Tensor, added: Tensor | None = None) -> Tensor:
        return add_norm(hidden, added, self.weight, self.eps)


class DeviceLayer(nn.Module):
    """One decoder layer."""

    def __init__(self, plan: LayerPlan, index: int) -> None:
        super().__init__()
        attention, mlp = plan.parts
        assert attention.attention is not None
        self.index, self.scale, self.window = index, attention.attention.scale, attention.attention.window
        has_norm = hasattr(attention.norm, "weight")  # the first layer of EAGLE-1 heads has none
        self.attention_norm: Any = DeviceNorm(attention.norm) if has_norm else None
        self.mlp_norm = DeviceNorm(mlp.norm)
        self.query_norm, self.key_norm = (one and DeviceNorm(one) for one in attention.head_norms)
        groups = [
            (names, linears)
            for part in plan.parts
            for names, linears in zip(part.kind.linear_names, part.linears, strict=True)
        ]
        self.qkv, self.output, self.gated, self.down = (joined(linears) for _, linears in groups)
        computed = (self.qkv, self.output, self.gated, self.down)
        self.linears = [JoinedLinears.from_linears(*group, own) for group, own in zip(groups, computed, strict=True)]
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


class DeviceLayers(nn.Module):
    """Decoder layers of Llama's kind on their device, one after the other.

    Args:
        layers: Loaded layers, each of which may be dropped once the next one is taken.
        max_position: Length of the longest text. Guesses after its end may have positions beyond.
    """

    rotations: Tensor  # [positions, dim] float32

    def __init__(self, layers: Iterable[Any], rotary: nn.Module, config: Any, max_position: int) -> None:
        super().__init__()
        plans = (LayerPlan.from_layer(layer, LLAMA, config) for layer in layers)
        self.layers = nn.ModuleList(DeviceLayer(plan, i) for i, plan in enumerate(plans))
        device = next(self.layers.parameters()).device
        places = torch.arange(max_position + MAX_TREE_NODES, device=device).unsqueeze(0)
        cosines, sines = rotary(torch.empty(0, device=device), places)
        self.register_buffer("rotations", rotation_table(cosines[0], sines[0]), persistent=False)

    @property
    def first_norm(self) -> Tensor:
        """The [width] weight of the norm before the first attention."""
        first: Any = self.layers[0]
        weight: Tensor = first.attention_norm.weight
        return weight

    def forward(
        self,
        batch: ForwardBatch,
        hidden: Tensor,
        inputs: Tensor | None = None,
        windowed: ForwardBatch | None = None,
        watch: Watch | None = None,
    ) -> Tensor:
        """Update `hidden` [tokens, width] in place, and return what `add_norm` adds to it; see `NativeLayers`."""
        added: Tensor | None = None
        if watch is not None:
            watch(0, hidden)
        for i, layer in enumerate(self.layers):
            seen = batch if windowed is None or layer.window is None else windowed
            added, inputs = layer(seen, hidden, added, self.rotations, inputs), None
            assert added is not None
            if watch is not None and (not batch.store.taps or i + 1 in batch.store.taps):  # a sum costs two launches
                watch(i + 1, hidden.add_(sum_parts(added, hidden.dtype)))
                added.zero_()
        assert added is not None
        return added

    def read(self, batch: ForwardBatch, inputs: Tensor) -> None:
        """Store the keys and values that each layer makes of `inputs` [tokens, width], and compute nothing else."""
        for layer in self.layers:
            assert isinstance(layer, DeviceLayer)
            layer.read(batch, inputs, self.rotations)


class DeviceDecoder(nn.Module):
    """A loaded model that `can_fuse_on_device` accepts, on its device; its definition is taken apart, layer by layer.

    Args:
        max_position: As for `DeviceLayers`.
    """

    layers_name = "model.layers"

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
        self.stack = DeviceLayers(layers, trunk.rotary_emb, model.config, max_position)
        self.rank_sums: RankSums | None = None  # over the ranks that have the other heads and the other gates

    @property
    def layers(self) -> list[DeviceLayer]:
        return [layer for layer in self.stack.layers if isinstance(layer, DeviceLayer)]

    @property
    def attends_at_any_distance(self) -> bool:
        """True if no layer has a window, so that keys need no positions."""
        return all(layer.window is None for layer in self.layers)

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
            layer.sums = self.rank_sums

    def embedded(self, token_ids: Tensor) -> Tensor:
        """Return the [tokens, width] rows of the embedding; not of later stages."""
        assert self.embedding is not None
        rows: Tensor = self.embedding(token_ids)
        return rows

    def hidden_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type of hidden states between stages, that of the model."""
        return dtype

    def forward(self, batch: ForwardBatch, hidden: Tensor | None = None, watch: Watch | None = None) -> Tensor:
        """Return [rows, vocab] float32 logits of the tokens that the batch asks for, or hidden states without a head.

        Args:
            hidden: [tokens, width] output of the previous stage, modified in place.
            watch: Callback after the embedding and after each layer.
        """
        assert (hidden is None) == self.is_first
        hidden = self.embedded(batch.token_ids) if hidden is None else hidden
        added: Tensor = self.stack(batch, hidden, watch=watch)
        if self.norm is None or self.head is None:
            return hidden.add_(sum_parts(added, hidden.dtype))
        hidden, added = hidden[batch.logit_rows], added[..., batch.logit_rows, :]  # the head is the widest product
        logits: Tensor = self.head(self.norm(hidden, added))
        return logits.float()


Decoder = FusedDecoder | DeviceDecoder  # a model whose layers were taken apart


def device_layers(layers: nn.ModuleList, rotary: nn.Module, config: Any, max_position: int) -> DeviceLayers | None:
    """Take the layers of a head apart; return None, with the layers untouched, if they are of another kind."""
    if not _is_llama(config) or not all(map(_is_plain, layers)):
        return None
    return DeviceLayers(taken_apart(layers), rotary, config, max_position)


def can_fuse_on_device(model: Any, device: torch.device) -> bool:
    """Return whether the device is a GPU and the model is of Llama's kind; its linear layers may be quantized."""
    if device.type != "cuda" or not _is_llama(model.config):
        return False
    layers = [layer for layer in model.model.layers if not isinstance(layer, Placeholder)]
    return all(map(_is_plain, layers)) and (isinstance(model.lm_head, Placeholder) or can_join(model.lm_head))


def _is_llama(config: Any) -> bool:
    return layer_kind(config) is LLAMA and activation_of(config) == "silu"


def _is_plain(layer: Any) -> bool:
    names = [name for part in LLAMA.parts for group in part.linear_names for name in group]
    return all(can_join(one) and getattr(one, "call", None) is None for one in map(layer.get_submodule, names))

"""Tree attention, as the one attention function registered with transformers.

Any model whose layers use `AttentionInterface` runs unchanged. Its definition computes query, key and value, already
rotated. This function writes key and value to the cache's slots, and lets every token see its request's prefix and its
own ancestors. The batch arrives as the keyword `forward_batch`.
"""

from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from specinfer.model.batch import AttentionGroup, ForwardBatch
from specinfer.model.past import PACKED, PACKED_WITH_PAST, PackedMask, register_masks
from specinfer.model.reach import Reach
from specinfer.ops import AttentionCall, attends, tree_ops
from specinfer.ops.kv_types import rows_of

# Keywords that models pass on and that do not affect attention here.
_HARMLESS = {
    "position_ids", "use_cache", "output_attentions", "output_hidden_states", "is_causal", "cache_position",
    "output_router_logits",
}  # fmt: skip


class UnsupportedAttentionError(Exception):
    """Error for an attention feature that a model needs and this function does not support."""


class AttentionFeatures(NamedTuple):
    """The attention features of a layer; see `tree_attention`."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None  # [heads]
    key_bias: Tensor | None = None  # [heads, positions]
    value_scale: float = 1.0  # of stored values
    reach: Reach | None = None  # in place of a window

    @property
    def is_plain(self) -> bool:
        """True if nothing but what a token sees differs from ordinary attention."""
        return self.softcap is None and self.sinks is None and self.key_bias is None


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: PackedMask | None,
    *,
    forward_batch: ForwardBatch | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    key_bias: Tensor | None = None,
    dropout: float = 0.0,
    **unknown: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of all packed tokens of a pass in one layer, and store their keys and values.

    Args:
        query: [1, heads, tokens, key_dim].
        key: [1, kv_heads, tokens, key_dim].
        value: [1, kv_heads, tokens, value_dim].
        attention_mask: What a definition chose for this kind of layer, and the batch. None if it is not asked:
            `forward_batch` defines what a token sees.
        sliding_window: A token sees keys less than this many positions back.
        softcap: Scores become softcap * tanh(scores / softcap).
        s_aux: [heads] attention sinks: logits that take part in the softmax and have no value.
        key_bias: [heads, positions] added to the scores by key position (ALiBi).

    Returns:
        [1, tokens, heads, value_dim], and None in place of attention weights.

    Raises:
        UnsupportedAttentionError: The model asks for an attention feature not listed here. Ignoring it would be
            silently wrong. The probe at load raises it.
    """
    if forward_batch is None and isinstance(attention_mask, PackedMask):
        forward_batch = attention_mask.batch
    _check_features(module, forward_batch, attention_mask, unknown)
    assert forward_batch is not None
    assert dropout == 0.0
    layer = module.layer_idx
    assert isinstance(layer, int)
    forward_batch.windows[layer] = sliding_window
    store_new(forward_batch, layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    # With a window, the mask is that window.
    reach = None if attention_mask is None or sliding_window is not None else attention_mask.reach
    features = AttentionFeatures(scale, sliding_window, softcap, s_aux, key_bias, reach=reach)
    found = attend_stored(forward_batch, layer, query[0].transpose(0, 1), features)
    return found.contiguous().unsqueeze(0), None  # some definitions view it as a matrix


def store_new(batch: ForwardBatch, layer: int, key: Tensor, value: Tensor) -> None:
    """Store the [tokens, kv_heads, dim] keys and values of all new tokens in one layer."""
    store = batch.store
    if not len(key):  # of layers that read what others have stored
        return
    if batch.layout is None:
        store.store(layer, batch.slots, key, value)
    else:  # padding has no slot
        pools = store.keys[layer], store.values[layer]
        tree_ops.store(*pools, batch.slots, key, value, scales=store.scales[layer])


def attend_stored(batch: ForwardBatch, layer: int, query: Tensor, features: AttentionFeatures) -> Tensor:
    """Compute attention in one layer, after its new keys and values are stored.

    Args:
        query: [tokens, heads, key_dim].

    Returns:
        [tokens, heads, value_dim].
    """
    keys, values, scales = batch.store.keys[layer], batch.store.values[layer], batch.store.scales[layer]
    if features.is_plain and features.reach is None and batch.native is not None and attends(keys, values):
        call = AttentionCall(keys, values, query.shape[1], features.scale, window=features.window, kv_scales=scales)
        return call.attend(batch.native, query.flatten(1).float()).to(query.dtype).view(query.shape)
    features = features._replace(scale=features.scale * scales.key, value_scale=scales.value)
    if batch.layout is not None:
        options = features._asdict()
        if options.pop("reach") is not None:
            raise UnsupportedAttentionError("chunks, which passes of fixed shapes do not know")
        return tree_ops.attend(query, keys, values, batch.layout, **options)
    dtype = torch.float64 if batch.in_double else query.dtype
    result = None
    for group in batch.groups:
        out = _attend(query, keys, values, group, features, dtype)
        if group.is_whole:
            return out.flatten(0, 1)
        if result is None:
            result = out.new_empty((query.shape[0], *out.shape[2:]))
        result[group.packed_rows] = out.flatten(0, 1)[group.out_rows]
    assert result is not None
    return result


def _check_features(
    module: nn.Module, forward_batch: ForwardBatch | None, attention_mask: object, unknown: dict[str, Any]
) -> None:
    if unknown and (features := {k for k, v in unknown.items() if v is not None} - _HARMLESS):
        raise UnsupportedAttentionError(f"attention features not supported: {', '.join(sorted(features))}")
    if getattr(module, "is_causal", True) is False:
        raise UnsupportedAttentionError("tokens that see later ones")
    if forward_batch is None:
        raise UnsupportedAttentionError("layers that do not hand keywords through to attention")
    if attention_mask is not None and not isinstance(attention_mask, PackedMask):
        raise UnsupportedAttentionError("a mask of the model's own")


def _attend(
    packed: Tensor, keys: Tensor, values: Tensor, group: AttentionGroup, features: AttentionFeatures, dtype: torch.dtype
) -> Tensor:
    """Return [requests, new, heads, value_dim] of one padded group, computed in `dtype`, in the type of `packed`."""
    requests, new = group.rows.shape
    context, kv_heads = group.kv_slots.shape[1], keys.shape[1]
    repeats = packed.shape[1] // kv_heads
    chosen = group.kv_slots.flatten()
    k = rows_of(keys, chosen).view(requests, context, kv_heads, -1).transpose(1, 2)
    v = rows_of(values, chosen).view(requests, context, kv_heads, -1).transpose(1, 2)
    q = packed.unsqueeze(0) if group.is_whole else packed[group.rows]
    # Query heads of one KV head are stacked as extra rows, so that keys are never repeated.
    q = q.unflatten(2, (kv_heads, repeats)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    bias, q, k, v = group.bias(features.window, repeats, dtype, features.reach), q.to(dtype), k.to(dtype), v.to(dtype)
    if features.is_plain:
        out = scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=features.scale)
    else:
        out = _attend_explicitly(q, k, v, bias, group, features)
    out = out if features.value_scale == 1 else out * features.value_scale
    by_token: Tensor = out.to(packed.dtype).unflatten(2, (repeats, new)).permute(0, 3, 1, 2, 4).flatten(2, 3)
    return by_token


def _attend_explicitly(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, group: AttentionGroup, features: AttentionFeatures
) -> Tensor:
    """Compute attention without the fused function, which lacks some features. All [requests, kv_heads, rows, dim]."""
    kv_heads, rows = q.shape[1:3]
    new = group.rows.shape[1]
    scores = q @ k.transpose(-1, -2)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * features.scale
    if features.softcap is not None:
        scores = torch.tanh(scores / features.softcap) * features.softcap
    if features.key_bias is not None:
        by_key = features.key_bias[:, group.key_positions]  # [heads, requests, context]
        by_key = by_key.transpose(0, 1).unflatten(1, (kv_heads, -1))
        scores = scores + by_key.repeat_interleave(new, dim=2)
    scores = scores + bias
    if features.sinks is None:
        return scores.softmax(dim=-1).to(v.dtype) @ v
    column = features.sinks.to(scores.dtype).view(1, kv_heads, -1, 1).repeat_interleave(new, dim=2)
    column = column.expand(q.shape[0], -1, rows, -1)
    return torch.cat([scores, column], dim=-1).softmax(dim=-1)[..., :-1].to(v.dtype) @ v


def register() -> None:
    """Register the attention function and the masks of every way with transformers. Safe to call twice."""
    for way in (PACKED, PACKED_WITH_PAST):
        transformers.AttentionInterface.register(way, tree_attention)
    register_masks()

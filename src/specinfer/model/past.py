"""Caches and masks that transformers' definitions ask for, which follow token trees.

A definition decides which keys a token sees by functions of two positions, such as causal, windows or chunks. A node of
a tree sees the keys that such a function allows, among its request's prefix, its ancestors and itself. Each definition
runs in the first of `WAYS` that computes what its own pass does.
"""

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

from specinfer.model.batch import AttentionGroup, ForwardBatch
from specinfer.model.reach import MaskFunction, Reach
from specinfer.ops.kv_types import rows_of

PACKED = "specinfer"  # all tokens in one row; attention by the interface
PACKED_WITH_PAST = "specinfer_with_past"  # the same; the definition counts positions and chooses masks by its cache
OWN = "eager"  # a row for each request; the definition attends by itself to what its cache returns
WAYS = (PACKED, PACKED_WITH_PAST, OWN)


def way_of(model: Any) -> str:
    """Return the one of `WAYS` in which a definition runs."""
    return str(model.config._attn_implementation)


def set_way(model: Any, way: str) -> None:
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    for config in configs.values():
        config._attn_implementation = way


@dataclass(frozen=True, slots=True)
class PackedMask:
    """The mask that a definition hands to attention. Some hand on no keywords beside it, so it has the batch.

    Attributes:
        reach: What tokens see of what is before them, or None for all.
    """

    batch: ForwardBatch
    reach: Reach | None


class PackedPast:
    """The stand-in for the cache of a definition that attends by the interface, where keys and values are stored.

    It has as many tokens before each token as the token's position.
    """

    is_compileable = False

    def __init__(self, batch: ForwardBatch) -> None:
        self.batch = batch

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        """Return [tokens] what, added to each token's place in the pass, is its position."""
        del layer_idx
        positions = self.batch.positions
        return positions - torch.arange(len(positions), device=positions.device)

    def get_query_offset(self, layer_idx: int = 0) -> "PackedPast":
        """Return itself, by which a mask's function knows what it is asked for."""
        del layer_idx
        return self

    def get_mask_sizes(self, num_new: int, layer_idx: int = 0) -> tuple[int, int]:
        del layer_idx
        return num_new, 0

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        del layer_idx
        return key, value


class GroupPast:
    """The stand-in for the cache of a group of requests: it stores what is new, and returns all that each has."""

    is_compileable = False

    def __init__(self, batch: ForwardBatch, group: AttentionGroup) -> None:
        self.group = group
        self._batch, self._slots = batch, batch.slots[group.packed_rows]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the most tokens that a request has before those of this pass: what sizes depend on, not positions."""
        del layer_idx
        return self.group.kv_slots.shape[1] - self.group.rows.shape[1]

    def get_query_offset(self, layer_idx: int = 0) -> "GroupPast":
        """Return itself, by which a mask's function knows what it is asked for."""
        del layer_idx
        return self

    def get_mask_sizes(self, num_new: int, layer_idx: int = 0) -> tuple[int, int]:
        del num_new, layer_idx
        return self.group.kv_slots.shape[1], 0

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store [requests, heads, new, dim] keys and values, and return those of [requests, heads, context, dim]."""
        new = (self._packed(x.transpose(1, 2)) for x in (key, value))
        self._batch.windows[layer_idx] = None
        self._batch.store.store(layer_idx, self._slots, *new)
        scales = self._batch.store.scales[layer_idx]
        pools = self._batch.store.keys[layer_idx], self._batch.store.values[layer_idx]
        keys, values = (self._whole(pool, key.dtype).transpose(1, 2).contiguous() for pool in pools)
        return keys * scales.key, values * scales.value

    def update_indexer(self, key: Tensor, layer_idx: int) -> Tensor:
        """Store [requests, new, dim] keys of an indexer, and return those of [requests, context, dim]."""
        place = len(self._batch.store.keys) // 2 + layer_idx
        new = self._packed(key.unsqueeze(2))
        self._batch.store.store(place, self._slots, new, new[..., :0])
        return self._whole(self._batch.store.keys[place], key.dtype).squeeze(2)

    def _packed(self, new: Tensor) -> Tensor:
        return new.flatten(0, 1)[self.group.out_rows]

    def _whole(self, pool: Tensor, dtype: torch.dtype) -> Tensor:
        slots = self.group.kv_slots
        return rows_of(pool, slots.flatten()).view(*slots.shape, *pool.shape[1:]).to(dtype)


def _packed_mask_of(*, mask_function: MaskFunction, q_offset: Any, **_: Any) -> PackedMask:
    assert isinstance(q_offset, PackedPast)
    sees_all = mask_function is transformers.masking_utils.causal_mask_function
    return PackedMask(q_offset.batch, None if sees_all else Reach(mask_function))


def _mask_of(
    *, mask_function: MaskFunction, q_offset: Any = 0, dtype: torch.dtype = torch.float32, **options: Any
) -> Any:
    """Return a mask [requests, 1, new, context] for a group; other masks are made as transformers does."""
    if not isinstance(q_offset, GroupPast):
        options |= {"mask_function": mask_function, "q_offset": q_offset, "dtype": dtype}
        return transformers.masking_utils.eager_mask(**options)
    return q_offset.group.bias(None, 1, dtype, Reach(mask_function))


def register_masks() -> None:
    """Register the masks of each way with transformers. Safe to call twice.

    None is registered for `PACKED`, so definitions make none.
    """
    transformers.AttentionMaskInterface.register(PACKED_WITH_PAST, _packed_mask_of)
    transformers.AttentionMaskInterface.register(OWN, _mask_of)

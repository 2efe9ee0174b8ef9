"""Store of new keys and values in their slots: one program per token."""

import triton
import triton.language as tl
from torch import Tensor

from specinfer.ops.kv_types import NO_SCALES, KVScales
from specinfer.ops.triton.float8 import as_stored, kind_of, to_stored


@triton.jit
def store_program(
    keys, values, slots, key, value, key_inverse, value_inverse,
    stride_keys, stride_keys_head, stride_values, stride_values_head,
    stride_key, stride_key_head, stride_value, stride_value_head,
    HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_KEY: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Store one token's keys and values. Grid: [tokens]."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    dim = tl.arange(0, BLOCK_KEY)[None, :]
    mask = (head < HEADS) & (dim < KEY_DIM)
    new = tl.load(key + token * stride_key + head * stride_key_head + dim, mask)
    stored = to_stored(new, key_inverse, keys.dtype.element_ty, KIND)
    tl.store(keys + slot * stride_keys + head * stride_keys_head + dim, stored, mask)
    dim = tl.arange(0, BLOCK_VALUE)[None, :]
    mask = (head < HEADS) & (dim < VALUE_DIM)
    new = tl.load(value + token * stride_value + head * stride_value_head + dim, mask)
    stored = to_stored(new, value_inverse, values.dtype.element_ty, KIND)
    tl.store(values + slot * stride_values + head * stride_values_head + dim, stored, mask)


def store(
    keys: Tensor, values: Tensor, slots: Tensor, key: Tensor, value: Tensor, scales: KVScales = NO_SCALES
) -> None:
    """Write the new tokens' keys and values to their slots.

    Args:
        keys, values: [slots, kv_heads, dim], written to.
        slots: [tokens]; rows with a slot below 0 are skipped.
        key, value: [tokens, kv_heads, dim].
        scales: What they are stored as multiples of, in 8 bits.
    """
    tokens, kv_heads, key_dim = key.shape
    value_dim = value.shape[2]
    assert keys.stride(2) == values.stride(2) == key.stride(2) == value.stride(2) == 1
    blocks = [triton.next_power_of_2(size) for size in (kv_heads, key_dim, value_dim)]
    store_program[(tokens,)](
        as_stored(keys), as_stored(values), slots, key, value, *scales.inverses,
        keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        HEADS=kv_heads, KEY_DIM=key_dim, VALUE_DIM=value_dim,
        BLOCK_HEADS=blocks[0], BLOCK_KEY=blocks[1], BLOCK_VALUE=blocks[2], KIND=kind_of(keys),
        num_warps=8 if blocks[0] * max(blocks[1:]) > 2048 else 4, enable_fp_fusion=True,
    )  # fmt: skip

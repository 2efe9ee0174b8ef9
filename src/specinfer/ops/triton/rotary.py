"""The operations between a layer's first product and its attention in one launch: head norms, rotation and store."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specinfer.ops.kv_types import NO_SCALES, KVScales
from specinfer.ops.triton.dependent_launch import launch_options, wait_for_inputs
from specinfer.ops.triton.float8 import as_stored, kind_of, to_stored
from specinfer.ops.triton.norm import load_sum


@triton.jit
def rotate_program(
    qkv, positions, rotations, slots, query_norm, key_norm, query, keys, values,
    key_inverse, value_inverse, eps, heads, kv_heads, size,
    DIM: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, HAS_NORMS: tl.constexpr, KIND: tl.constexpr,
    PARTS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Compute one head of a token; heads of queries come first, then keys, then values."""
    wait_for_inputs(DEPENDENT)
    dtype: tl.constexpr = query.dtype.element_ty
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.arange(0, BLOCK)
    inside = place < HALF
    start = qkv + (token * (heads + 2 * kv_heads) + head) * DIM
    left = load_sum(start + place, size, inside, dtype, PARTS).to(dtype)
    right = load_sum(start + HALF + place, size, inside, dtype, PARTS).to(dtype)
    slot = tl.load(slots + token).to(tl.int64)
    if head >= heads + kv_heads:
        if slot >= 0:
            to = values + (slot * kv_heads + head - heads - kv_heads) * DIM
            tl.store(to + place, to_stored(left, value_inverse, values.dtype.element_ty, KIND), mask=inside)
            tl.store(to + HALF + place, to_stored(right, value_inverse, values.dtype.element_ty, KIND), mask=inside)
    else:
        x, y = left.to(tl.float32), right.to(tl.float32)
        if HAS_NORMS:
            norm = key_norm
            if head < heads:
                norm = query_norm
            scale = tl.rsqrt((tl.sum(x * x, axis=0) + tl.sum(y * y, axis=0)) / DIM + eps)
            x = (x * scale).to(left.dtype).to(tl.float32) * tl.load(norm + place, mask=inside, other=0.0).to(tl.float32)
            y = (y * scale).to(left.dtype).to(tl.float32) * tl.load(norm + HALF + place, mask=inside, other=0.0).to(
                tl.float32
            )
            x, y = x.to(left.dtype).to(tl.float32), y.to(left.dtype).to(tl.float32)
        turn = rotations + tl.load(positions + token).to(tl.int64) * DIM
        cosine = tl.load(turn + place, mask=inside, other=0.0)
        sine = tl.load(turn + HALF + place, mask=inside, other=0.0)
        first, second = x * cosine - y * sine, y * cosine + x * sine
        if head < heads:
            to = query + (token * heads + head) * DIM
            tl.store(to + place, first.to(dtype), mask=inside)
            tl.store(to + HALF + place, second.to(dtype), mask=inside)
        elif slot >= 0:
            to = keys + (slot * kv_heads + head - heads) * DIM
            x, y = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
            tl.store(to + place, to_stored(x, key_inverse, keys.dtype.element_ty, KIND), mask=inside)
            tl.store(to + HALF + place, to_stored(y, key_inverse, keys.dtype.element_ty, KIND), mask=inside)


def rotate_and_store(
    qkv: Tensor,
    positions: Tensor,
    rotations: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    scales: KVScales = NO_SCALES,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return [tokens, heads, dim] rotated queries, and store rotated keys and values in their slots.

    Args:
        qkv: [tokens, (heads + 2 * kv_heads) * dim] queries, keys and values, contiguous, or their parts as
            `few_rows_product` returns them.
        positions: [tokens].
        rotations: [positions, dim], see `rotation_table`.
        slots: [tokens] slots for keys and values; rows with a slot below 0 are skipped.
        keys: [slots, kv_heads, dim], written to.
        values: [slots, kv_heads, dim], written to.
        norms: [dim] each, weights of the RMS norms of each head of queries and keys before rotation, or None.
        scales: What keys and values are stored as multiples of, in 8 bits.
        dtype: Type of the queries and of summed parts, or None for that of `qkv`.
    """
    kv_heads, dim = keys.shape[1:]
    parts = 1 if qkv.dim() == 2 else len(qkv)
    tokens, heads = qkv.shape[-2], qkv.shape[-1] // dim - 2 * kv_heads
    assert values.shape[1:] == keys.shape[1:]
    assert rotations.shape[1] == dim
    assert dim % 2 == 0
    assert all(tensor.is_contiguous() for tensor in (qkv, positions, rotations, slots, keys, values))
    query = qkv.new_empty(tokens, heads, dim, dtype=dtype) if out is None else out
    if tokens:
        query_norm, key_norm = norms or (rotations, rotations)
        rotate_program[(tokens, heads + 2 * kv_heads)](
            qkv, positions, rotations, slots, query_norm, key_norm, query, as_stored(keys), as_stored(values),
            *scales.inverses, eps, heads, kv_heads, qkv.numel() // parts,
            DIM=dim, HALF=dim // 2, BLOCK=triton.next_power_of_2(dim // 2), HAS_NORMS=norms is not None,
            KIND=kind_of(keys), PARTS=parts, num_warps=1, enable_fp_fusion=True, **launch_options(qkv.device),
        )  # fmt: skip
    return query

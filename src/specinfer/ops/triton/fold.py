"""Parts of the kernels of attention: its running softmax (FlashAttention, arXiv 2205.14135), queries, padding."""

import triton
import triton.language as tl

from specinfer.ops.triton.float8 import AS_STORED, widened

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def fold(
    q, slots, valid, seen, bias, scale, m, total, acc,
    keys, values, stride_key, stride_value, key_dims, value_dims,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, SOFTCAP: tl.constexpr,
    KIND: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Fold one block of keys and values into the running softmax; scores are in powers of 2."""
    at = slots.to(tl.int64)[:, None]
    k = tl.load(keys + at * stride_key + key_dims[None, :], valid[:, None] & (key_dims < KEY_DIM)[None, :], other=0)
    v = tl.load(
        values + at * stride_value + value_dims[None, :], valid[:, None] & (value_dims < VALUE_DIM)[None, :], other=0
    )
    k, v = widened(k, q.dtype, KIND, NATIVE), widened(v, q.dtype, KIND, NATIVE)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if SOFTCAP > 0:
        scores = SOFTCAP * (2 * tl.sigmoid(scores * (2 / SOFTCAP)) - 1)
    scores = tl.where(seen, (scores + bias) * LOG2E, float("-inf"))
    highest = tl.maximum(m, tl.max(scores, 1))
    base = tl.where(highest == float("-inf"), 0.0, highest)  # a row that sees nothing yet
    weights = tl.exp2(scores - base[:, None])
    factor = tl.exp2(m - base)
    acc = acc * factor[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return highest, total * factor + tl.sum(weights, 1), acc


@triton.jit
def load_query(
    query, token, head, is_row, key_dims, stride_token, stride_head, keys, KEY_DIM: tl.constexpr, KIND: tl.constexpr
):
    """Return the queries of a block of rows, in the type of the keys where those are as stored."""
    q = tl.load(
        query + token[:, None] * stride_token + head[:, None] * stride_head + key_dims[None, :],
        is_row[:, None] & (key_dims < KEY_DIM)[None, :], other=0.0,
    )  # fmt: skip
    if KIND == AS_STORED:
        q = q.to(keys.dtype.element_ty)
    return q


@triton.jit
def store_zeros(
    out, start, num_tokens, rows, value_dims, kv_head, stride_out, stride_out_head,
    REPEATS: tl.constexpr, ROWS: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_VALUE: tl.constexpr,
):  # fmt: skip
    """Write zeros to the rows of padding."""
    for first in range(start * REPEATS + tl.program_id(0) * ROWS, num_tokens * REPEATS, tl.num_programs(0) * ROWS):
        row = first + rows
        place = (row // REPEATS).to(tl.int64) * stride_out + (kv_head * REPEATS + row % REPEATS) * stride_out_head
        mask = (row < num_tokens * REPEATS)[:, None] & (value_dims < VALUE_DIM)[None, :]
        zeros = tl.zeros((ROWS, BLOCK_VALUE), out.dtype.element_ty)
        tl.store(out + place[:, None] + value_dims[None, :], zeros, mask)

"""Tree attention in one launch: one kernel for prefix and tree part, and for prompts, plain decoding and trees.

A program has a block of query rows of one request and one KV head. The query heads of that KV head are adjacent rows,
so that keys are read once for all of them. It iterates over the prefix, which needs no mask, then over the tree part,
whose mask bits it unpacks in registers. The softmax is computed online as in FlashAttention (arXiv 2205.14135). If
requests and heads are too few to fill the device, the keys are split among programs, and a second small launch combines
their parts, as in Flash-Decoding. Slots are single rows of the cache: there are no pages.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specinfer.ops.fixed_order import is_fixed
from specinfer.ops.tree_layout import TreeLayout
from specinfer.ops.triton.blocks import MAX_SPLITS, Blocks, choose_blocks, device_of, padded
from specinfer.ops.triton.dependent_launch import launch_options, wait_for_inputs
from specinfer.ops.triton.fixed_attention import attend_in_order
from specinfer.ops.triton.float8 import AS_STORED, as_stored, has_float8_instructions, kind_of
from specinfer.ops.triton.fold import LOG2E, fold, load_query, store_zeros

# With this many, Triton loads slots two iterations ahead of the product, keys and values one.
_STAGES = 5
_LEAST_KEYS = tl.constexpr(128)  # of a split: with fewer, combining the splits takes longer than reading the keys


@triton.jit(do_not_specialize=["num_requests", "num_tokens", "splits"])
def attend_program(
    query, keys, values, out, parts, sinks, key_bias,
    slot_table, prefix_lens, starts, node_slots, node_positions, node_lens, visible, positions,
    num_requests, num_tokens, splits, scale, value_scale,
    stride_token, stride_head, stride_key, stride_key_head, stride_value, stride_value_head,
    stride_out, stride_out_head, stride_bias, stride_table, stride_nodes, stride_words,
    REPEATS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK_KEY: tl.constexpr, BLOCK_VALUE: tl.constexpr, IS_SPLIT: tl.constexpr,
    IS_CHAIN: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_BIAS: tl.constexpr, KIND: tl.constexpr, NATIVE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Compute attention of a block of rows. Grid: [blocks of rows, requests, kv_heads * splits].

    Without splits there is one request more, for the padding; with splits `combine_program` writes that.
    """
    wait_for_inputs(DEPENDENT)
    block, request = tl.program_id(0), tl.program_id(1)
    kv_head, split = tl.program_id(2) // splits, tl.program_id(2) % splits
    kv_heads = tl.num_programs(2) // splits
    rows = block * ROWS + tl.arange(0, ROWS)
    value_dims = tl.arange(0, BLOCK_VALUE)
    start = tl.load(starts + request)
    if request == num_requests:
        store_zeros(
            out, start, num_tokens, tl.arange(0, ROWS), value_dims, kv_head, stride_out, stride_out_head,
            REPEATS, ROWS, VALUE_DIM, BLOCK_VALUE,
        )  # fmt: skip
        return
    num_new = tl.load(starts + request + 1) - start
    if block * ROWS >= num_new * REPEATS:
        return
    new, head = rows // REPEATS, kv_head * REPEATS + rows % REPEATS
    is_row = new < num_new
    token = (start + new).to(tl.int64)
    key_dims = tl.arange(0, BLOCK_KEY)
    q = load_query(query, token, head, is_row, key_dims, stride_token, stride_head, keys, KEY_DIM, KIND)
    position = tl.load(positions + token, is_row, other=2**30)
    prefix, num_nodes = tl.load(prefix_lens + request), tl.load(node_lens + request)
    before = num_nodes - num_new  # nodes of previous passes
    if IS_CHAIN:
        num_nodes = tl.minimum(num_nodes, before + (block * ROWS + ROWS - 1) // REPEATS + 1)
    # Blocks of keys: [first, prefix_blocks) of the prefix, [prefix_blocks, last) of the tree part.
    prefix_blocks = tl.cdiv(prefix, KEYS)
    last = prefix_blocks + tl.cdiv(num_nodes, KEYS)
    first = 0
    if WINDOW > 0:
        first = tl.minimum(tl.maximum(tl.min(position, 0) - WINDOW + 1, 0) // KEYS, prefix_blocks)
    each = tl.maximum(tl.cdiv(last - first, splits), _LEAST_KEYS // KEYS)
    low = first + split * each
    high = tl.minimum(low + each, last)
    split_row = (split.to(tl.int64) * num_tokens + token) * (kv_heads * REPEATS) + head
    log_totals = parts + (tl.num_programs(2) * REPEATS).to(tl.int64) * num_tokens * VALUE_DIM + split_row
    if IS_SPLIT and (split > 0) & (low >= last):
        tl.store(log_totals, tl.full((ROWS,), float("-inf"), tl.float32), is_row)
        return

    m = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if HAS_SINKS and split == 0:
        m = tl.load(sinks + head).to(tl.float32) * LOG2E
        total += 1.0
    acc = tl.zeros((ROWS, BLOCK_VALUE), tl.float32)
    keys += kv_head * stride_key_head
    values += kv_head * stride_value_head
    slot_table += request.to(tl.int64) * stride_table
    for at in range(low, tl.minimum(high, prefix_blocks)):
        number = at * KEYS + tl.arange(0, KEYS)
        valid = number < prefix
        slots = tl.load(slot_table + number, valid, other=0)
        seen = valid[None, :] & is_row[:, None]
        if WINDOW > 0:
            seen &= position[:, None] - number[None, :] < WINDOW
        bias = tl.zeros((1, 1), tl.float32)
        if HAS_BIAS:
            bias = tl.load(key_bias + head[:, None] * stride_bias + number[None, :], seen, other=0.0)
        m, total, acc = fold(
            q, slots, valid, seen, bias, scale, m, total, acc,
            keys, values, stride_key, stride_value, key_dims, value_dims, KEY_DIM, VALUE_DIM, SOFTCAP,
            KIND, NATIVE,
        )  # fmt: skip
    node_slots += request * stride_nodes
    node_positions += request * stride_nodes
    # A tree part is short: only a prompt's is loaded ahead.
    for at in tl.range(tl.maximum(low, prefix_blocks), high, num_stages=None if IS_CHAIN else 1):
        number = (at - prefix_blocks) * KEYS + tl.arange(0, KEYS)
        valid = number < num_nodes
        slots = tl.load(node_slots + number, valid, other=0)
        seen = valid[None, :] & is_row[:, None]
        if IS_CHAIN:
            seen &= number[None, :] <= (before + new)[:, None]
        else:
            words = tl.load(visible + token[:, None] * stride_words + (number // 32)[None, :], seen, other=0)
            seen &= ((words >> (number % 32)[None, :]) & 1) != 0
        bias = tl.zeros((1, 1), tl.float32)
        if WINDOW > 0 or HAS_BIAS:
            key_position = tl.load(node_positions + number, valid, other=0)
            if WINDOW > 0:
                seen &= position[:, None] - key_position[None, :] < WINDOW
            if HAS_BIAS:
                bias = tl.load(key_bias + head[:, None] * stride_bias + key_position[None, :], seen, other=0.0)
        m, total, acc = fold(
            q, slots, valid, seen, bias, scale, m, total, acc,
            keys, values, stride_key, stride_value, key_dims, value_dims, KEY_DIM, VALUE_DIM, SOFTCAP,
            KIND, NATIVE,
        )  # fmt: skip

    result = acc / tl.where(total == 0, 1.0, total)[:, None]
    if KIND != AS_STORED:
        result *= value_scale
    mask = is_row[:, None] & (value_dims < VALUE_DIM)[None, :]
    if not IS_SPLIT:
        place = out + token[:, None] * stride_out + head[:, None] * stride_out_head + value_dims[None, :]
        tl.store(place, result.to(out.dtype.element_ty), mask)
    else:
        tl.store(parts + split_row[:, None] * VALUE_DIM + value_dims[None, :], result, mask)
        tl.store(log_totals, m + tl.log2(tl.where(total == 0, 1.0, total)), is_row)


@triton.jit(do_not_specialize=["num_requests", "splits"])
def combine_program(
    parts, out, starts, num_requests, splits, stride_out, stride_out_head,
    VALUE_DIM: tl.constexpr, BLOCK_VALUE: tl.constexpr, MOST_SPLITS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Combine the parts of one token and head, one variant for all numbers of parts. Grid: [tokens, heads]."""
    wait_for_inputs(DEPENDENT)
    token, head = tl.program_id(0), tl.program_id(1)
    tokens, heads = tl.num_programs(0), tl.num_programs(1)
    value_dims = tl.arange(0, BLOCK_VALUE)
    place = out + token.to(tl.int64) * stride_out + head * stride_out_head + value_dims
    if token >= tl.load(starts + num_requests):
        tl.store(place, tl.zeros((BLOCK_VALUE,), out.dtype.element_ty), value_dims < VALUE_DIM)
        return
    split = tl.arange(0, MOST_SPLITS)
    is_part = split < splits
    rows = (split.to(tl.int64) * tokens + token) * heads + head
    log_totals = parts + tokens.to(tl.int64) * heads * splits * VALUE_DIM
    log_totals = tl.load(log_totals + rows, is_part, other=float("-inf"))
    # A part that saw nothing has weight 0, and may be missing. NaN in a part must reach the result.
    highest = tl.max(log_totals, 0)
    weights = tl.exp2(log_totals - tl.where(highest == float("-inf"), 0.0, highest))
    inside = (log_totals != float("-inf"))[:, None] & (value_dims < VALUE_DIM)[None, :]
    of_parts = tl.load(parts + rows[:, None] * VALUE_DIM + value_dims[None, :], inside, 0.0)
    result = tl.sum(of_parts * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(place, result.to(out.dtype.element_ty), value_dims < VALUE_DIM)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: TreeLayout,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    key_bias: Tensor | None = None,
    value_scale: float = 1.0,
    out: Tensor | None = None,
    blocks: Blocks | None = None,
    has_float8: bool | None = None,
) -> Tensor:
    """Compute the attention of all new tokens over the slots that the layout lets them see.

    Args:
        blocks: How to divide the work, or None for `choose_blocks` on this device.
        has_float8: Whether the device has instructions for e4m3, or None to find out.

    Args:
        query: [tokens, heads, dim].
        keys: [slots, kv_heads, dim].
        values: [slots, kv_heads, value_dim].
        scale: What scores are multiplied by, that of stored keys included.
        window: A token sees keys less than this many positions back.
        softcap: Scores become softcap * tanh(scores / softcap).
        sinks: [heads] logits that take part in the softmax and have no value.
        key_bias: [heads, positions] float32, added to the scores by key position (ALiBi).
        value_scale: What results are multiplied by, for values that are stored as multiples of it.
        out: [tokens, heads, value_dim] to write to.

    Returns:
        [tokens, heads, value_dim] of the query's type; rows of padding are 0.
    """
    (tokens, heads, key_dim), (_, kv_heads, value_dim) = query.shape, values.shape
    assert heads % kv_heads == 0
    assert tokens == layout.num_tokens
    assert query.stride(2) == keys.stride(2) == values.stride(2) == 1
    has_float8 = has_float8_instructions(query.device) if has_float8 is None else has_float8
    device = device_of(query.device)
    if out is None:
        out = query.new_empty((tokens, heads, value_dim))
    assert out.stride(2) == 1
    if is_fixed():
        features = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks, "key_bias": key_bias}
        return attend_in_order(
            query, keys, values, out, layout, features | {"value_scale": value_scale}, device, has_float8=has_float8
        )
    if blocks is None:
        itemsize, by_bits = keys.element_size(), False
        if itemsize == 1:
            itemsize, by_bits = query.element_size(), not has_float8
        blocks = choose_blocks(layout, heads, kv_heads, key_dim, value_dim, itemsize, device, by_bits=by_bits)
    parts = out
    if blocks.splits > 1:
        size = blocks.splits * tokens * heads * (value_dim + 1)
        parts = torch.empty(size, dtype=torch.float32, device=query.device)
    repeats = heads // kv_heads
    padding = int(blocks.splits == 1)
    blocks_of_rows = triton.cdiv(layout.max_new * repeats, blocks.rows)
    grid = (blocks_of_rows, layout.num_requests + padding, kv_heads * blocks.splits)
    options = launch_options(query.device)
    attend_program[grid](
        query, as_stored(keys), as_stored(values), out, parts,
        sinks if sinks is not None else query, key_bias if key_bias is not None else query,
        layout.slot_table, layout.prefix_lens, layout.starts, layout.node_slots, layout.node_positions,
        layout.node_lens, layout.visible, layout.positions,
        layout.num_requests, tokens, blocks.splits, scale, value_scale,
        query.stride(0), query.stride(1), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        out.stride(0), out.stride(1), key_bias.stride(0) if key_bias is not None else 0,
        layout.slot_table.stride(0), layout.node_slots.stride(0), layout.visible.stride(0),
        REPEATS=repeats, KEY_DIM=key_dim, VALUE_DIM=value_dim, ROWS=blocks.rows, KEYS=blocks.keys,
        BLOCK_KEY=padded(key_dim), BLOCK_VALUE=padded(value_dim), IS_SPLIT=blocks.splits > 1, IS_CHAIN=layout.is_chain,
        WINDOW=window or 0, SOFTCAP=softcap or 0.0, HAS_SINKS=sinks is not None, HAS_BIAS=key_bias is not None,
        KIND=kind_of(keys), NATIVE=has_float8,
        num_warps=blocks.num_warps, num_stages=_STAGES, enable_fp_fusion=True, **options,
    )  # fmt: skip
    if blocks.splits > 1:
        combine_program[(tokens, heads)](
            parts, out, layout.starts, layout.num_requests, blocks.splits, out.stride(0), out.stride(1),
            VALUE_DIM=value_dim, BLOCK_VALUE=padded(value_dim), MOST_SPLITS=MAX_SPLITS, num_warps=2,
            enable_fp_fusion=True, **options,
        )  # fmt: skip
    return out

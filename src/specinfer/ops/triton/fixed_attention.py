"""Tree attention whose sums have an order that depends on a token's own path alone.

Order of sums: the context of a token is its prefix, then its ancestors, by position. It is cut into parts of `_PART`
positions from position 0, and these into blocks of `KEYS`. A block is folded into its part, and a part into the result,
in the order of positions. A key has the same place in its block whether it was computed in this pass or long ago, and
in a tree or not. All launches have the tile `ROWS` x `KEYS` and as many warps, so that the same instructions multiply
and the same threads add; these depend on heads, types and the device. Multiplications and additions are not fused, so
that no two variants of a kernel round in other places.

A first launch computes the parts that rows of a request share: all of a chain, and those of a tree's prefix. For few
rows each part is a program, for many a program folds one after the other: that changes no bit. A second launch folds
what the first has stored, and the rest of the path of each node.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specinfer.ops.tree_layout import TreeLayout
from specinfer.ops.triton.blocks import MAX_TILE_BYTES, Device, padded
from specinfer.ops.triton.dependent_launch import launch_options, wait_for_inputs
from specinfer.ops.triton.float8 import AS_STORED, as_stored, kind_of
from specinfer.ops.triton.fold import LOG2E, fold, load_query, store_zeros

_PART = 256  # positions; fewer would have more parts to fold, more leave processors of the device without work
_STAGES = 3
_MOST_BYTES = 2**28  # of stored parts; with more, programs fold them


class Tile(NamedTuple):
    """The shape of the products of all launches for the same heads."""

    rows: int  # of queries
    keys: int  # folded at a time
    num_warps: int


def tile_of(key_dim: int, value_dim: int, itemsize: int, device: Device) -> Tile:
    """Choose the tile by heads, the size of a number that is multiplied, and the device."""
    per_key = (padded(key_dim) + padded(value_dim)) * itemsize
    rows = 32 if itemsize <= 2 and padded(value_dim) <= 128 else 16
    keys = 64 if itemsize <= 2 else 32
    while keys > 16 and 2 * keys * per_key > min(MAX_TILE_BYTES, device.shared_bytes // 2):
        keys //= 2
    return Tile(rows, keys, 4 if padded(value_dim) <= 256 else 8)


@triton.jit
def _merge(m, total, acc, part_m, part_total, part_acc):
    """Fold a part into the running softmax; a part in which a row sees nothing changes no bit of it."""
    highest = tl.maximum(m, part_m)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    factor, part_factor = tl.exp2(m - base), tl.exp2(part_m - base)
    is_seen = part_m != float("-inf")
    total = tl.where(is_seen, total * factor + part_total * part_factor, total)
    acc = tl.where(is_seen[:, None], acc * factor[:, None] + part_acc * part_factor[:, None], acc)
    return highest, total, acc


@triton.jit
def _first_state(sinks, head, ROWS: tl.constexpr, BLOCK_VALUE: tl.constexpr, HAS_SINKS: tl.constexpr):
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if HAS_SINKS:
        m = tl.load(sinks + head).to(tl.float32) * LOG2E
        total += 1.0
    return m, total, tl.zeros((ROWS, BLOCK_VALUE), tl.float32)


@triton.jit
def _seen(number, limit, position, is_row, WINDOW: tl.constexpr):
    """Return which rows see which positions: those before `limit`, and within the window."""
    seen = (number[None, :] < limit[:, None]) & is_row[:, None]
    if WINDOW > 0:
        seen &= position[:, None] - number[None, :] < WINDOW
    return seen


@triton.jit
def _bias(key_bias, head, number, seen, stride_bias, HAS_BIAS: tl.constexpr):
    bias = tl.zeros((1, 1), tl.float32)
    if HAS_BIAS:
        bias = tl.load(key_bias + head[:, None] * stride_bias + number[None, :], seen, other=0.0)
    return bias


@triton.jit(do_not_specialize=["num_requests", "num_tokens", "num_parts", "size"])
def shared_parts_program(
    query, keys, values, out, stored, sinks, key_bias,
    slot_table, prefix_lens, starts, node_slots, node_lens, positions,
    num_requests, num_tokens, num_parts, size, scale, value_scale,
    stride_token, stride_head, stride_key, stride_key_head, stride_value, stride_value_head,
    stride_out, stride_out_head, stride_bias, stride_table, stride_nodes,
    REPEATS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PART: tl.constexpr, BLOCK_KEY: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    IS_SPLIT: tl.constexpr, IS_CHAIN: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_BIAS: tl.constexpr, KIND: tl.constexpr, NATIVE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Compute parts of the context that rows of a request share. Grid: [blocks of rows, requests, kv_heads * programs].

    With `IS_SPLIT` a program has a part, and stores it. Otherwise it folds all of them; then it stores the state for
    the second launch, or in a chain writes the results, for which there is one request more, of the padding.
    """
    wait_for_inputs(DEPENDENT)
    block, request = tl.program_id(0), tl.program_id(1)
    kv_head, first = tl.program_id(2) // num_parts, tl.program_id(2) % num_parts
    kv_heads = tl.num_programs(2) // num_parts
    rows, value_dims = block * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_VALUE)
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
    token, key_dims = (start + new).to(tl.int64), tl.arange(0, BLOCK_KEY)
    position = tl.load(positions + token, is_row, other=2**30)
    prefix = tl.load(prefix_lens + request)
    limit = prefix + tl.zeros((ROWS,), tl.int32)
    parts = prefix // PART
    if IS_CHAIN:
        limit += tl.load(node_lens + request) - num_new + new + 1
    most = tl.max(tl.where(is_row, limit, 0), 0)
    if IS_CHAIN:
        parts = tl.cdiv(most, PART)
    last = parts
    if IS_SPLIT:
        last = tl.minimum(first + 1, parts)
    elif WINDOW > 0:
        first = tl.minimum(tl.maximum(tl.min(position, 0) - WINDOW + 1, 0) // PART, parts)

    q = load_query(query, token, head, is_row, key_dims, stride_token, stride_head, keys, KEY_DIM, KIND)
    keys += kv_head * stride_key_head
    values += kv_head * stride_value_head
    slot_table += request.to(tl.int64) * stride_table
    node_slots += request.to(tl.int64) * stride_nodes
    row_of_all = token * (kv_heads * REPEATS) + head
    m, total, acc = _first_state(sinks, head, ROWS, BLOCK_VALUE, HAS_SINKS and not IS_SPLIT)
    for part in range(first, last):
        part_m, part_total, part_acc = _first_state(sinks, head, ROWS, BLOCK_VALUE, False)
        end = tl.minimum(part * PART + PART, most)
        for at in range(part * PART, end, KEYS):
            number = at + tl.arange(0, KEYS)
            valid = number < end
            slots = tl.load(slot_table + number, valid & (number < prefix), other=0)
            if IS_CHAIN:
                slots += tl.load(node_slots + number - prefix, valid & (number >= prefix), other=0)
            seen = _seen(number, limit, position, is_row, WINDOW)
            part_m, part_total, part_acc = fold(
                q, slots, valid, seen, _bias(key_bias, head, number, seen, stride_bias, HAS_BIAS), scale,
                part_m, part_total, part_acc,
                keys, values, stride_key, stride_value, key_dims, value_dims, KEY_DIM, VALUE_DIM, SOFTCAP, KIND, NATIVE,
            )  # fmt: skip
        if IS_SPLIT:
            m, total, acc = part_m, part_total, part_acc
        else:
            m, total, acc = _merge(m, total, acc, part_m, part_total, part_acc)

    inside = is_row[:, None] & (value_dims < VALUE_DIM)[None, :]
    if IS_CHAIN and not IS_SPLIT:
        result = acc / tl.where(total == 0, 1.0, total)[:, None]
        if KIND != AS_STORED:
            result *= value_scale
        place = out + token[:, None] * stride_out + head[:, None] * stride_out_head + value_dims[None, :]
        tl.store(place, result.to(out.dtype.element_ty), inside)
    elif not IS_SPLIT or first < parts:
        entry = row_of_all
        if IS_SPLIT:
            entry += first.to(tl.int64) * num_tokens * (kv_heads * REPEATS)
        tl.store(stored + entry, m, is_row)
        tl.store(stored + size + entry, total, is_row)
        tl.store(stored + 2 * size + entry[:, None] * VALUE_DIM + value_dims[None, :], acc, inside)


@triton.jit
def _path_slots(
    number, prefix, slot_table, node_slots, visible, num_nodes, KEYS: tl.constexpr
):  # fmt: skip
    """Return the slots of these positions of a path: those of the prefix, then of the nodes that the token sees."""
    slots = tl.load(slot_table + number, number < prefix, other=0)
    if tl.max(number, 0) >= prefix:
        count = tl.zeros((), tl.int32)
        bit = tl.arange(0, 32)
        for word in range(tl.cdiv(num_nodes, 32)):
            is_seen = (tl.load(visible + word) >> bit) & 1 & (word * 32 + bit < num_nodes).to(tl.int32)
            place = prefix + count + tl.cumsum(is_seen, 0) - 1
            slot = tl.load(node_slots + word * 32 + bit, is_seen > 0, other=0)
            is_place = (number[:, None] == place[None, :]) & (is_seen > 0)[None, :]
            slots += tl.sum(tl.where(is_place, slot[None, :], 0), 1)
            count += tl.sum(is_seen, 0)
    return slots


@triton.jit
def _path_length(visible, num_nodes):
    """Return how many nodes of the tree part a token sees, itself included."""
    count = tl.zeros((), tl.int32)
    bit = tl.arange(0, 32)
    for word in range(tl.cdiv(num_nodes, 32)):
        is_seen = (tl.load(visible + word) >> bit) & 1 & (word * 32 + bit < num_nodes).to(tl.int32)
        count += tl.sum(is_seen, 0)
    return count


@triton.jit(do_not_specialize=["num_requests", "num_tokens", "size"])
def finish_program(
    query, keys, values, out, stored, sinks, key_bias,
    slot_table, prefix_lens, starts, node_slots, node_lens, visible, positions,
    num_requests, num_tokens, size, scale, value_scale,
    stride_token, stride_head, stride_key, stride_key_head, stride_value, stride_value_head,
    stride_out, stride_out_head, stride_bias, stride_table, stride_nodes, stride_words,
    REPEATS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PART: tl.constexpr, BLOCK_KEY: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    IS_SPLIT: tl.constexpr, IS_CHAIN: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_BIAS: tl.constexpr, KIND: tl.constexpr, NATIVE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Fold the stored parts of a token, then the rest of its path. Grid: [new tokens, requests + 1, kv_heads * blocks].

    A block has heads of one KV head.
    """
    wait_for_inputs(DEPENDENT)
    new, request = tl.program_id(0), tl.program_id(1)
    blocks: tl.constexpr = (REPEATS + ROWS - 1) // ROWS
    kv_head, heads = tl.program_id(2) // blocks, (tl.num_programs(2) // blocks) * REPEATS
    place = tl.program_id(2) % blocks * ROWS + tl.arange(0, ROWS)
    head, value_dims = kv_head * REPEATS + place, tl.arange(0, BLOCK_VALUE)
    start = tl.load(starts + request)
    if request == num_requests:
        if tl.program_id(2) % blocks == 0:
            store_zeros(
                out, start, num_tokens, tl.arange(0, ROWS), value_dims, kv_head, stride_out, stride_out_head,
                REPEATS, ROWS, VALUE_DIM, BLOCK_VALUE,
            )  # fmt: skip
        return
    num_new = tl.load(starts + request + 1) - start
    if new >= num_new:
        return
    is_row = place < REPEATS
    token = (start + new).to(tl.int64)
    tokens, key_dims = token + tl.zeros((ROWS,), tl.int64), tl.arange(0, BLOCK_KEY)
    one_position = tl.load(positions + token)
    position = one_position + tl.zeros((ROWS,), tl.int32)
    prefix, num_nodes = tl.load(prefix_lens + request), tl.load(node_lens + request)
    visible += token * stride_words
    parts, end = prefix // PART, prefix
    if IS_CHAIN:
        end += num_nodes - num_new + new + 1
        parts = tl.cdiv(end, PART)
    else:
        end += _path_length(visible, num_nodes)
    entries = 1
    if IS_SPLIT:
        entries = parts
    m, total, acc = _first_state(sinks, tl.where(is_row, head, 0), ROWS, BLOCK_VALUE, HAS_SINKS and IS_SPLIT)
    inside = is_row[:, None] & (value_dims < VALUE_DIM)[None, :]
    entry = token * heads + head
    for _ in range(entries):
        part_m = tl.load(stored + entry, is_row, other=float("-inf"))
        part_total = tl.load(stored + size + entry, is_row, other=0.0)
        at = stored + 2 * size + entry[:, None] * VALUE_DIM + value_dims[None, :]
        m, total, acc = _merge(m, total, acc, part_m, part_total, tl.load(at, inside, other=0.0))
        entry += num_tokens * heads
    if not IS_CHAIN:
        q = load_query(query, tokens, head, is_row, key_dims, stride_token, stride_head, keys, KEY_DIM, KIND)
        keys += kv_head * stride_key_head
        values += kv_head * stride_value_head
        slot_table += request.to(tl.int64) * stride_table
        node_slots += request.to(tl.int64) * stride_nodes
        first, limit = parts, end + tl.zeros((ROWS,), tl.int32)
        if WINDOW > 0:
            first = tl.maximum(tl.maximum(one_position - WINDOW + 1, 0) // PART, first)
        for part in range(first, tl.cdiv(end, PART)):
            part_m, part_total, part_acc = _first_state(sinks, head, ROWS, BLOCK_VALUE, False)
            for at in range(part * PART, tl.minimum(part * PART + PART, end), KEYS):
                number = at + tl.arange(0, KEYS)
                slots = _path_slots(number, prefix, slot_table, node_slots, visible, num_nodes, KEYS)
                seen = _seen(number, limit, position, is_row, WINDOW)
                part_m, part_total, part_acc = fold(
                    q, slots, number < end, seen, _bias(key_bias, head, number, seen, stride_bias, HAS_BIAS), scale,
                    part_m, part_total, part_acc,
                    keys, values, stride_key, stride_value, key_dims, value_dims, KEY_DIM, VALUE_DIM, SOFTCAP,
                    KIND, NATIVE,
                )  # fmt: skip
            m, total, acc = _merge(m, total, acc, part_m, part_total, part_acc)
    result = acc / tl.where(total == 0, 1.0, total)[:, None]
    if KIND != AS_STORED:
        result *= value_scale
    to = out + token * stride_out + head[:, None] * stride_out_head + value_dims[None, :]
    tl.store(to, result.to(out.dtype.element_ty), inside)


def attend_in_order(
    query: Tensor, keys: Tensor, values: Tensor, out: Tensor, layout: TreeLayout, features: dict[str, Any],
    device: Device, *, has_float8: bool, is_split: bool | None = None,
) -> Tensor:  # fmt: skip
    """Compute `attend`.

    Args:
        features: `scale`, `window`, `softcap`, `sinks`, `key_bias` and `value_scale` of `attend`.
        is_split: Whether each part is a program, or None to choose; it changes no bit.
    """
    (tokens, heads, key_dim), (_, kv_heads, value_dim) = query.shape, values.shape
    repeats, itemsize = heads // kv_heads, query.element_size()
    tile = tile_of(key_dim, value_dim, itemsize, device)
    assert _PART % tile.keys == 0
    capacity = layout.slot_table.shape[1] + (layout.node_slots.shape[1] if layout.is_chain else 0)
    num_parts = triton.cdiv(capacity, _PART)
    size = num_parts * tokens * heads
    blocks = triton.cdiv(layout.max_new * repeats, tile.rows)
    if is_split is None:
        is_few = blocks * layout.num_requests * kv_heads < 4 * device.num_cores
        is_split = is_few and size * (value_dim + 2) * 4 <= _MOST_BYTES
    num_programs = num_parts if is_split else 1
    has_more = is_split or not layout.is_chain  # than one launch
    size = size if is_split else tokens * heads
    stored = torch.empty(size * (value_dim + 2), dtype=torch.float32, device=query.device) if has_more else out
    sinks, key_bias = features["sinks"], features["key_bias"]
    given = (
        query, as_stored(keys), as_stored(values), out, stored,
        query if sinks is None else sinks, query if key_bias is None else key_bias,
        layout.slot_table, layout.prefix_lens, layout.starts, layout.node_slots, layout.node_lens,
    )  # fmt: skip
    strides = (
        query.stride(0), query.stride(1), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        out.stride(0), out.stride(1), key_bias.stride(0) if key_bias is not None else 0,
        layout.slot_table.stride(0), layout.node_slots.stride(0),
    )  # fmt: skip
    constants: dict[str, Any] = {
        "REPEATS": repeats, "KEY_DIM": key_dim, "VALUE_DIM": value_dim, "ROWS": tile.rows, "KEYS": tile.keys,
        "PART": _PART, "BLOCK_KEY": padded(key_dim), "BLOCK_VALUE": padded(value_dim),
        "IS_SPLIT": is_split, "IS_CHAIN": layout.is_chain, "WINDOW": features["window"] or 0,
        "SOFTCAP": features["softcap"] or 0.0, "HAS_SINKS": sinks is not None, "HAS_BIAS": key_bias is not None,
        "KIND": kind_of(keys), "NATIVE": has_float8, "num_warps": tile.num_warps, "num_stages": _STAGES,
        "enable_fp_fusion": False, **launch_options(query.device),
    }  # fmt: skip
    scales = features["scale"], features["value_scale"]
    shared_parts_program[(blocks, layout.num_requests + (not has_more), kv_heads * num_programs)](
        *given, layout.positions, layout.num_requests, tokens, num_programs, size, *scales, *strides, **constants
    )
    if has_more:
        finish_program[(layout.max_new, layout.num_requests + 1, kv_heads * triton.cdiv(repeats, tile.rows))](
            *given, layout.visible, layout.positions, layout.num_requests, tokens, size, *scales, *strides,
            layout.visible.stride(0), **constants,
        )  # fmt: skip
    return out

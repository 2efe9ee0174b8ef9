"""The division of an attention launch's work, from shapes and the device alone, so that it can be captured."""

from functools import cache
from typing import Any, NamedTuple

import torch
import triton

from specinfer.ops.tree_layout import TreeLayout

MAX_SPLITS = 32
MAX_TILE_BYTES = 96 * 1024  # two programs then fit into a multiprocessor of Hopper
_GRAPHICS_CARD_BYTES = 99 * 1024  # of shared memory for a program; an A100 has 163 KB


class Blocks(NamedTuple):
    """The division of a launch's work, which depends only on shapes and the device."""

    rows: int  # of queries, in a program
    keys: int  # in an iteration of its loop
    splits: int  # programs that share the keys of the same rows
    num_warps: int


class Device(NamedTuple):
    """The properties of a GPU that the division depends on."""

    num_cores: int  # multiprocessors
    shared_bytes: int  # shared memory available to a program


def choose_blocks(
    layout: TreeLayout,
    heads: int,
    kv_heads: int,
    key_dim: int,
    value_dim: int,
    itemsize: int,
    device: Device,
    *,
    by_bits: bool = False,
) -> Blocks:
    """Choose blocks: two tiles of keys and values in flight, no register spills, work for every multiprocessor.

    Args:
        itemsize: Bytes of a number of the cache; of 8 bits, of what it is widened to in registers.
        by_bits: Whether numbers of 8 bits are widened by bit operations, which take registers too.
    """
    per_key = (padded(key_dim) + padded(value_dim)) * itemsize
    num_rows = layout.max_new * (heads // kv_heads)
    # Products of float32 do not use tensor cores, and take more registers.
    most_rows = 16 if itemsize > 2 else (128 if per_key <= 512 and not by_bits else 64)
    if per_key > 256 and device.shared_bytes <= _GRAPHICS_CARD_BYTES and not layout.is_chain:
        most_rows = min(most_rows, 64)  # with masks, 128 rows take up to 280 bytes of stack on an RTX 5090
    is_wide = itemsize <= 2 and per_key > 1024  # heads of 512 numbers: queries and tiles fill the shared memory
    most_rows = min(most_rows, 32) if is_wide else most_rows
    rows = min(max(triton.next_power_of_2(num_rows), 16), most_rows)
    keys = 32 if itemsize > 2 or (rows == 128 and not layout.is_chain) else 64
    while keys > 16 and 2 * keys * per_key > min(MAX_TILE_BYTES, device.shared_bytes // 2):
        keys //= 2
    programs = triton.cdiv(num_rows, rows) * layout.num_requests * kv_heads
    most_splits = min(MAX_SPLITS, (layout.slot_table.shape[1] + layout.node_slots.shape[1]) // (2 * keys))
    splits = 1
    while 2 * splits <= most_splits and splits * programs < device.num_cores:
        splits *= 2
    is_small = rows < (32 if is_wide else 64) and itemsize <= 2
    return Blocks(rows, keys, splits, 4 if is_small else 8)


def padded(dim: int) -> int:
    """Return the padded size of a block: a power of 2, at least the minimum of tensor cores."""
    return max(int(triton.next_power_of_2(dim)), 16)


@cache
def device_of(device: torch.device) -> Device:
    """Return the properties of a device; a CPU, where kernels are interpreted, has one core."""
    if device.type != "cuda":
        return Device(1, 2**20)
    properties: Any = torch.cuda.get_device_properties(device)
    # ROCm has no other limit than the usual one.
    shared = getattr(properties, "shared_memory_per_block_optin", None) or properties.shared_memory_per_block
    return Device(properties.multi_processor_count, shared)

"""Commit: append the accepted path's slots to each request's prefix."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def commit_program(
    slot_table, prefix_lens, node_slots, path, lengths, stride_table, stride_nodes, max_depth,
    BLOCK_DEPTH: tl.constexpr,
):  # fmt: skip
    """Append the slots of one request. Grid: [requests]."""
    request = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + request)
    if length < 0:
        return
    prefix = tl.load(prefix_lens + request)
    places = tl.arange(0, BLOCK_DEPTH)  # 0 is the root's
    kept = places <= length
    nodes = tl.load(path + request * max_depth + places - 1, kept & (places > 0), other=0)
    slots = tl.load(node_slots + request * stride_nodes + nodes, kept, other=0)
    tl.store(slot_table + request * stride_table + prefix + places, slots, kept)
    tl.store(prefix_lens + request, prefix + 1 + length)


def commit(slot_table: Tensor, prefix_lens: Tensor, node_slots: Tensor, path: Tensor, lengths: Tensor) -> None:
    """Append the slots of root and accepted nodes to each request's prefix; no keys or values are moved.

    Args:
        slot_table: [requests, max_context], written to.
        prefix_lens: [requests], increased by one for the root, and by one for each accepted node.
        node_slots: [requests, max_nodes] of the trees, the root first.
        path, lengths: As `walk` returns them; requests with a length below 0 are skipped.
    """
    requests, max_depth = path.shape
    assert slot_table.stride(1) == node_slots.stride(1) == 1
    assert path.is_contiguous()
    commit_program[(requests,)](
        slot_table, prefix_lens, node_slots, path, lengths,
        slot_table.stride(0), node_slots.stride(0), max_depth,
        BLOCK_DEPTH=triton.next_power_of_2(max_depth + 1), num_warps=1, enable_fp_fusion=True,
    )  # fmt: skip

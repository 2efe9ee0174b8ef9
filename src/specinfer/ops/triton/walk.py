"""The walk of the coupled rule: one program per request, with the whole tree in its registers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specinfer.ops.trees import NO_VALID_TOKEN, Walk

_NO_VALID_TOKEN = tl.constexpr(NO_VALID_TOKEN)


@triton.jit
def walk_program(
    chosen, starts, tokens, parents, sizes, path, lengths, following, stride, max_depth,
    BLOCK_NODES: tl.constexpr,
):  # fmt: skip
    """Walk one request's tree. Grid: [requests]."""
    request = tl.program_id(0)
    size = tl.load(sizes + request)
    path += request * max_depth
    if size <= 0:
        for depth in range(max_depth):
            tl.store(path + depth, -1)
        tl.store(lengths + request, -1)
        tl.store(following + request, tl.full((), _NO_VALID_TOKEN, tl.int64))
        return
    nodes = tl.arange(0, BLOCK_NODES)
    in_use = nodes < size
    token_of = tl.load(tokens + request * stride + nodes, in_use, other=-1).to(tl.int64)
    parent_of = tl.load(parents + request * stride + nodes, in_use & (nodes > 0), other=-2)
    found = tl.load(chosen + tl.load(starts + request) + nodes, in_use, other=0)
    node = 0
    length = 0
    token = tl.sum(tl.where(nodes == 0, found, 0), 0)
    for depth in range(max_depth):
        child = tl.min(tl.where((parent_of == node) & (token_of == token), nodes, BLOCK_NODES), 0)
        goes = (length == depth) & (child < BLOCK_NODES)  # a walk that has stopped does not continue
        tl.store(path + depth, tl.where(goes, child, -1))
        node = tl.where(goes, child, node)
        length = tl.where(goes, depth + 1, length)
        token = tl.where(goes, tl.sum(tl.where(nodes == child, found, 0), 0), token)
    tl.store(lengths + request, length)
    tl.store(following + request, token)


def walk(
    chosen: Tensor,
    starts: Tensor,
    tokens: Tensor,
    parents: Tensor,
    sizes: Tensor,
    *,
    max_depth: int,
    out: Walk | None = None,
) -> Walk:
    """Walk down every tree as long as the token chosen at a node is that of one of its children.

    Args:
        chosen: [rows] int64, the tokens that `choose` returns.
        starts: [requests] row of each request's root in `chosen`; its other nodes follow.
        tokens, parents: [requests, max_nodes] of the trees, the root first; parents come before their children.
        sizes: [requests] nodes in use, the root included, or 0 for no tree.
        max_depth: Longest possible path.
        out: Tensors to write to.

    Returns:
        path: [requests, max_depth] int32 numbers of the accepted nodes, without the root; -1 after its end.
        lengths: [requests] int32 lengths of the paths; -1 where there is no tree.
        next: [requests] int64 token that follows, or `NAN` or `NO_VALID_TOKEN`, which is also used for no tree.
    """
    requests, nodes = tokens.shape
    if out is None:
        path = torch.empty((requests, max_depth), dtype=torch.int32, device=tokens.device)
        out = path, torch.empty_like(path[:, 0]), torch.empty(requests, dtype=torch.int64, device=tokens.device)
    assert tokens.stride() == parents.stride() == (nodes, 1)
    assert out[0].shape == (requests, max_depth)
    assert out[0].is_contiguous()
    blocks = triton.next_power_of_2(nodes)
    walk_program[(requests,)](
        chosen, starts, tokens, parents, sizes, *out, nodes, max_depth,
        BLOCK_NODES=blocks, num_warps=1 if blocks <= 256 else 4, enable_fp_fusion=True,
    )  # fmt: skip
    return out

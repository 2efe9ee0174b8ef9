"""The walk of the traversal rule of verify/algorithms.py, one program per request, in double precision.

What the draws of a node leave of the target's distribution are changed values of the tokens of their race, as in
multi_step.py: here a row of scratch memory for each level of the current path.
"""

import torch
import triton
import triton.language as tl

from specinfer.ops.trees import NAN, NO_VALID_TOKEN, Walk, WalkInputs
from specinfer.ops.triton.multi_step import next_uniform, node_softmax, prepare_walk, probs_of, sample

_NAN, _NO_VALID_TOKEN = tl.constexpr(NAN), tl.constexpr(NO_VALID_TOKEN)


@triton.jit
def _at(values, levels, level):
    """Return the value of a level."""
    return tl.sum(tl.where(levels == level, values, tl.zeros_like(values)), 0)


@triton.jit
def traversal_program(
    logits, highest, sums, starts, temperatures, least, tokens, parents, sizes,
    draws, distribution_tokens, distribution_probs, uniforms, path, lengths, following, scratch, kept_rows,
    vocab, stride, num_chunks, stride_tree, num_draws, support, max_depth,
    CHUNK: tl.constexpr, BLOCK_CHUNKS: tl.constexpr, BLOCK_DRAWS: tl.constexpr, BLOCK_SUPPORT: tl.constexpr,
    BLOCK_LEVELS: tl.constexpr,
):  # fmt: skip
    """Walk one request's tree. Grid: [requests]."""
    request = tl.program_id(0).to(tl.int64)
    levels, places, numbers = tl.arange(0, BLOCK_LEVELS), tl.arange(0, BLOCK_SUPPORT), tl.arange(0, BLOCK_DRAWS)
    path += request * max_depth + levels - 1
    on_path = (levels > 0) & (levels <= max_depth)
    if tl.load(sizes + request) <= 0:
        return
    tokens += request * stride_tree
    draws += request * num_draws
    distribution_tokens += request * num_draws * support + places
    distribution_probs += request * num_draws * support + places
    kept_rows += request * max_depth * support + places
    scratch += request * CHUNK
    in_support = places < support
    drawn = tl.load(draws + numbers, numbers < num_draws, other=-1)
    parent_of = tl.load(parents + request * stride_tree + drawn, drawn > 0, other=-1)
    temperature = tl.load(temperatures + request)
    state = tl.load(uniforms + request).to(tl.uint64, bitcast=True)
    first_row = tl.load(starts + request).to(tl.int64)
    # Of the nodes above the current one: the nodes, their draws that are tried, and their weights and totals.
    nodes = tl.zeros((BLOCK_LEVELS,), tl.int32)
    tried = tl.zeros((BLOCK_LEVELS,), tl.int32)
    weights = tl.zeros((BLOCK_LEVELS,), tl.float64)
    totals = tl.zeros((BLOCK_LEVELS,), tl.float64)
    level = tl.full((), 0, tl.int32)
    node = tl.full((), 0, tl.int32)
    last = tl.full((), -1, tl.int32)  # the node's draw that was rejected last
    weight = tl.full((), 1.0, tl.float64)
    total = tl.full((), 1.0, tl.float64)
    length = tl.full((), 0, tl.int32)
    token = tl.full((), _NO_VALID_TOKEN, tl.int64)
    going = tl.full((), 1, tl.int32)
    while going > 0:
        mine = (parent_of == node) & (level < max_depth)
        draw = tl.min(tl.where(mine & (numbers > last), numbers, BLOCK_DRAWS), 0)
        is_tried = draw < BLOCK_DRAWS
        if is_tried & (last < 0):  # the node was entered
            scores = logits + (first_row + node) * stride
            best, has_nan, norm = node_softmax(highest, sums, first_row + node, num_chunks, BLOCK_CHUNKS)
            is_tried = best > float("-inf")
            if has_nan:
                going = tl.full((), 0, tl.int32)
                token = tl.full((), _NAN, tl.int64)
            elif is_tried:
                ids = tl.load(distribution_tokens + draw * support, in_support, other=-1)
                kept = probs_of(scores, ids, ids >= 0, temperature, least, first_row + node, best.to(tl.float64), norm)
                tl.debug_barrier()  # a warp may still read what was there
                tl.store(kept_rows + level * support, kept, ids >= 0)
                tl.debug_barrier()
        is_rejected = tl.full((), 0, tl.int32)
        if going > 0:
            if is_tried:
                child = tl.load(draws + draw)
                ids = tl.load(distribution_tokens + draw * support, in_support, other=-1)
                is_guess = (ids == tl.load(tokens + child)) & (ids >= 0)
                kept = tl.load(kept_rows + level * support, ids >= 0, other=0.0)
                probs = tl.load(distribution_probs + draw * support, ids >= 0, other=0.0)
                p = tl.sum(tl.where(is_guess, kept, 0.0), 0) / total
                enter = weight * p / tl.sum(tl.where(is_guess, probs, 0.0), 0)
                if enter > 0:
                    nodes = tl.where(levels == level, node, nodes)
                    tried = tl.where(levels == level, draw, tried)
                    weights = tl.where(levels == level, weight, weights)
                    totals = tl.where(levels == level, total, totals)
                    level += 1
                    node = child
                    last = tl.full((), -1, tl.int32)
                    weight = tl.minimum(enter, 1.0)
                    total = tl.full((), 1.0, tl.float64)
                else:
                    is_rejected = tl.full((), 1, tl.int32)
            else:
                is_kept = level == 0
                if level > 0:
                    state, uniform = next_uniform(state)
                    is_kept = uniform < weight
                if is_kept:
                    going = tl.full((), 0, tl.int32)
                else:
                    level -= 1
                    node = _at(nodes, levels, level)
                    draw = _at(tried, levels, level)
                    weight = _at(weights, levels, level)
                    total = _at(totals, levels, level)
                    is_rejected = tl.full((), 1, tl.int32)
        if is_rejected > 0:  # at once, or with its whole subtree
            last = draw
            if weight > 0:
                ids = tl.load(distribution_tokens + draw * support, in_support, other=-1)
                kept = tl.load(kept_rows + level * support, ids >= 0, other=0.0)
                probs = tl.load(distribution_probs + draw * support, ids >= 0, other=0.0)
                rest = tl.maximum(kept - probs * (total / weight), 0.0)
                remains = total - tl.sum(kept - rest, 0)
                if remains > 1e-13 * total:
                    tl.debug_barrier()
                    tl.store(kept_rows + level * support, rest, ids >= 0)
                    tl.debug_barrier()
                    mass = weight * remains / total
                    weight = mass / (mass + 1.0 - weight)
                    total = remains
                elif level > 0:  # the root must emit a token: only rounding error is left, so its distribution is kept
                    weight = tl.full((), 0.0, tl.float64)
    if token != _NAN:
        length = level
        best, has_nan, norm = node_softmax(highest, sums, first_row + node, num_chunks, BLOCK_CHUNKS)
        if has_nan:
            token = tl.full((), _NAN, tl.int64)
            length = tl.full((), 0, tl.int32)
        elif best == float("-inf"):
            if level > 0:  # nothing may follow: the path's last token becomes the one that follows
                token = tl.load(tokens + node).to(tl.int64)
                length -= 1
        else:
            draw = tl.min(tl.where((parent_of == node) & (level < max_depth), numbers, BLOCK_DRAWS), 0)
            num_ids = tl.where(draw < BLOCK_DRAWS, support, 0)
            ids = tl.load(distribution_tokens + draw * support, places < num_ids, other=-1)
            kept = tl.load(kept_rows + level * support, ids >= 0, other=0.0)
            scores = logits + (first_row + node) * stride
            state, uniform = next_uniform(state)
            token = sample(
                scores, temperature, least, highest, sums, first_row + node, ids, kept, scratch, uniform, total,
                best.to(tl.float64), norm, vocab, num_chunks, CHUNK, BLOCK_CHUNKS,
            )  # fmt: skip
        nodes = tl.where(levels == level, node, nodes)
    tl.store(path, tl.where(levels <= length, nodes, -1), on_path)
    tl.debug_barrier()  # all warps have read the first state
    tl.store(uniforms + request, state.to(tl.int64, bitcast=True))
    tl.store(lengths + request, length)
    tl.store(following + request, token)


def walk_traversal(inputs: WalkInputs, *, out: Walk) -> None:
    """Go to the first leaf and back towards the root, as `verify.verify_traversal`.

    Decisions are the same unless a random number is within about 1e-13 of the number it is compared with. `out` is as
    for `walk_multi_step`.
    """
    launch, max_depth = prepare_walk(inputs, out), out[0].shape[1]
    requests, _, support = inputs.distribution_tokens.shape
    kept_rows = torch.empty((requests, max_depth, support), dtype=torch.float64, device=inputs.logits.device)
    traversal_program[(requests,)](
        *launch.tensors, kept_rows, *launch.numbers,
        **launch.options, BLOCK_LEVELS=triton.next_power_of_2(max_depth + 1),
    )  # fmt: skip

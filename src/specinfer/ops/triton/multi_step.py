"""The walk of the multi-step rule of verify/algorithms.py, one program per request, in double precision.

What it has in common with the walk of the traversal rule is here, too. A first launch computes the parts of a node's
softmax: the greatest logit of each chunk of the vocabulary, and the sum of the chunk's exponentials. The draws of a
node come from one race over the same tokens, and rejected ones change the target's distribution only there. `kept` has
the changed values of these tokens. The residual distribution is `kept`, and the target's probabilities of all other
tokens, divided by `total`. A token is drawn from it by the masses of chunks, so only the logits of one are read.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specinfer.ops.trees import MOST_TOKENS, NAN, NO_VALID_TOKEN, Walk, WalkInputs
from specinfer.ops.triton.choose import GAMMA, mix

_CHUNK = 2048
_NAN, _NO_VALID_TOKEN = tl.constexpr(NAN), tl.constexpr(NO_VALID_TOKEN)


@triton.jit
def _scores(logits, tokens, valid, temperature, least, row):
    """Return a row's logits of these tokens, over the temperature; -inf for what is not kept."""
    scores = tl.load(logits + tokens, valid, other=float("-inf")).to(tl.float32)
    scores = tl.div_rn(scores, tl.zeros_like(scores) + temperature)
    return scores if least is None else tl.where(scores < tl.load(least + row), float("-inf"), scores)


@triton.jit
def softmax_program(
    logits, starts, temperatures, least, sizes, highest, sums, vocab, stride, num_chunks,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Compute the maximum and the sum of exponentials of a chunk. Grid: [chunks, nodes, requests]."""
    chunk, node, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if node >= tl.load(sizes + request):
        return
    row = tl.load(starts + request).to(tl.int64) + node
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    scores = _scores(logits + row * stride, tokens, tokens < vocab, tl.load(temperatures + request), least, row)
    has_nan = tl.max((scores != scores).to(tl.int32), 0) > 0
    best = tl.max(scores, 0)
    base = tl.where(best == float("-inf"), 0.0, best).to(tl.float64)
    tl.store(highest + row * num_chunks + chunk, tl.where(has_nan, float("nan"), best))
    tl.store(sums + row * num_chunks + chunk, tl.sum(tl.exp(scores.to(tl.float64) - base), 0))


@triton.jit
def node_softmax(highest, sums, row, num_chunks, BLOCK_CHUNKS: tl.constexpr):
    """Return a node's greatest score, -inf if no token may follow; whether a score is NaN; and the divisor."""
    chunks = tl.arange(0, BLOCK_CHUNKS)
    of_chunks = tl.load(highest + row * num_chunks + chunks, chunks < num_chunks, other=float("-inf"))
    best = tl.max(of_chunks, 0)
    of_sums = tl.load(sums + row * num_chunks + chunks, chunks < num_chunks, other=0.0)
    base = tl.where(best == float("-inf"), 0.0, best).to(tl.float64)
    norm = tl.sum(of_sums * tl.exp(of_chunks.to(tl.float64) - base), 0)
    return best, tl.max((of_chunks != of_chunks).to(tl.int32), 0) > 0, norm


@triton.jit
def probs_of(logits, tokens, valid, temperature, least, row, highest, norm):
    """Return the probabilities of these tokens in a row, float64."""
    scores = _scores(logits, tokens, valid, temperature, least, row)
    return tl.exp(scores.to(tl.float64) - highest) / norm


@triton.jit
def next_uniform(state):
    """Return the next state of a random stream, and its uniform number: `next_uniform` of noise.py."""
    state += tl.full((), GAMMA, tl.uint64)
    return state, (mix(state) >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def sample(
    logits, temperature, least, highest, sums, row, ids, kept, scratch, uniform, total, top, norm, vocab, num_chunks,
    CHUNK: tl.constexpr, BLOCK_CHUNKS: tl.constexpr,
):  # fmt: skip
    """Return the token that a uniform number chooses from a residual distribution.

    `ids` are tokens with other values, `kept`, and -1 for padding; `scratch` is the request's.
    """
    chunks, places = tl.arange(0, BLOCK_CHUNKS), tl.arange(0, CHUNK)
    of_chunks = tl.load(highest + row * num_chunks + chunks, chunks < num_chunks, other=float("-inf")).to(tl.float64)
    of_sums = tl.load(sums + row * num_chunks + chunks, chunks < num_chunks, other=0.0)
    change = tl.where(ids >= 0, kept - probs_of(logits, ids, ids >= 0, temperature, least, row, top, norm), 0.0)
    changes = tl.sum(tl.where((ids // CHUNK)[None, :] == chunks[:, None], change[None, :], 0.0), 1)
    masses = of_sums * tl.exp(of_chunks - top) / norm + changes
    wanted = uniform * total
    ends = tl.cumsum(masses, 0)
    chunk = tl.min(tl.where((ends > wanted) & (masses > 0), chunks, BLOCK_CHUNKS), 0)
    if chunk == BLOCK_CHUNKS:  # rounding leaves none
        chunk = tl.min(tl.where(masses == tl.max(masses, 0), chunks, BLOCK_CHUNKS), 0)
    before = tl.sum(tl.where(chunks < chunk, masses, 0.0), 0)
    tl.store(scratch + places, tl.full((CHUNK,), -1.0, tl.float64))
    tl.debug_barrier()
    tl.store(scratch + ids - chunk * CHUNK, kept, (ids >= 0) & (ids // CHUNK == chunk))
    tl.debug_barrier()
    tokens = chunk * CHUNK + places
    changed = tl.load(scratch + places)
    probs = probs_of(logits, tokens, tokens < vocab, temperature, least, row, top, norm)
    probs = tl.where(changed < 0, probs, changed)
    # Only tokens with nonzero probability: the mass of another equals that of the token before it.
    found = tl.min(tl.where((before + tl.cumsum(probs, 0) > wanted) & (probs > 0), tokens, vocab), 0)
    last = tl.max(tl.where(probs > 0, tokens, 0), 0)  # in case rounding leaves none
    return tl.where(found < vocab, found, last).to(tl.int64)


@triton.jit
def multi_step_program(
    logits, highest, sums, starts, temperatures, least, tokens, parents, sizes,
    draws, distribution_tokens, distribution_probs, uniforms, path, lengths, following, scratch,
    vocab, stride, num_chunks, stride_tree, num_draws, support, max_depth,
    CHUNK: tl.constexpr, BLOCK_CHUNKS: tl.constexpr, BLOCK_DRAWS: tl.constexpr, BLOCK_SUPPORT: tl.constexpr,
):  # fmt: skip
    """Walk one request's tree. Grid: [requests]."""
    request = tl.program_id(0).to(tl.int64)
    size = tl.load(sizes + request)
    if size <= 0:
        return
    path += request * max_depth
    for depth in range(max_depth):
        tl.store(path + depth, -1)
    tokens += request * stride_tree
    draws += request * num_draws
    distribution_tokens += request * num_draws * support
    distribution_probs += request * num_draws * support
    scratch += request * CHUNK
    numbers = tl.arange(0, BLOCK_DRAWS)
    drawn = tl.load(draws + numbers, numbers < num_draws, other=-1)
    parent_of = tl.load(parents + request * stride_tree + drawn, drawn > 0, other=-1)
    places = tl.arange(0, BLOCK_SUPPORT)
    temperature = tl.load(temperatures + request)
    state = tl.load(uniforms + request).to(tl.uint64, bitcast=True)
    node = tl.full((), 0, tl.int32)
    length = tl.full((), 0, tl.int32)
    token = tl.full((), _NO_VALID_TOKEN, tl.int64)
    going = tl.full((), 1, tl.int32)
    while going > 0:
        row = tl.load(starts + request).to(tl.int64) + node
        best, has_nan, norm = node_softmax(highest, sums, row, num_chunks, BLOCK_CHUNKS)
        going = tl.full((), 0, tl.int32)
        if has_nan:
            token = tl.full((), _NAN, tl.int64)
            length = tl.full((), 0, tl.int32)
        elif best == float("-inf"):
            if length > 0:  # nothing may follow: the path's last token becomes the one that follows
                token = tl.load(tokens + node).to(tl.int64)
                length -= 1
        else:
            top = best.to(tl.float64)
            scores = logits + row * stride
            total = tl.full((), 1.0, tl.float64)
            mine = (parent_of == node) & (length < max_depth)
            draw = tl.min(tl.where(mine, numbers, BLOCK_DRAWS), 0)
            num_ids = tl.where(draw < BLOCK_DRAWS, support, 0)
            ids = tl.load(distribution_tokens + draw * support + places, places < num_ids, other=-1)
            kept = probs_of(scores, ids, ids >= 0, temperature, least, row, top, norm)
            while (draw < BLOCK_DRAWS) & (going == 0):
                child = tl.load(draws + draw)
                is_guess = (ids == tl.load(tokens + child)) & (ids >= 0)
                weights = tl.load(distribution_probs + draw * support + places, ids >= 0, other=0.0)
                p = tl.sum(tl.where(is_guess, kept, 0.0), 0) / total
                q = tl.sum(tl.where(is_guess, weights, 0.0), 0)
                state, uniform = next_uniform(state)
                rest = tl.maximum(kept - weights * total, 0.0)
                remains = total - tl.sum(kept - rest, 0)
                # A remainder that is only rounding error counts as certain acceptance.
                if (uniform * q < p) | (remains <= 1e-13 * total):
                    going = tl.full((), 1, tl.int32)
                    node = child
                    tl.store(path + length, child)
                    length += 1
                else:
                    kept = rest
                    total = remains
                    draw = tl.min(tl.where(mine & (numbers > draw), numbers, BLOCK_DRAWS), 0)
            if going == 0:
                state, uniform = next_uniform(state)
                token = sample(
                    scores, temperature, least, highest, sums, row, ids, kept, scratch, uniform, total, top, norm,
                    vocab, num_chunks, CHUNK, BLOCK_CHUNKS,
                )  # fmt: skip
    for depth in range(length, max_depth):  # nodes taken back from the path
        tl.store(path + depth, -1)
    tl.debug_barrier()  # all warps have read the first state
    tl.store(uniforms + request, state.to(tl.int64, bitcast=True))
    tl.store(lengths + request, length)
    tl.store(following + request, token)


def walk_multi_step(inputs: WalkInputs, *, out: Walk) -> None:
    """Try the draws of a node in draw order; each rejected one subtracts its distribution from the target's residual.

    SpecInfer (arXiv 2305.09781), section 4.3, as `verify.verify_multi_step`. The decisions are the same unless a random
    number is within about 1e-13 of the number it is compared with, because sums are computed in another order.

    Args:
        out: The tensors that `walk` returns, written to for the requests that have a tree. The path of one
            whose logits allow no token is empty.
    """
    launch = prepare_walk(inputs, out)
    multi_step_program[(len(inputs.tokens),)](*launch.tensors, *launch.numbers, **launch.options)


class WalkLaunch(NamedTuple):
    """The arguments of a walk's program."""

    tensors: tuple[Tensor | None, ...]
    numbers: tuple[int, ...]
    options: dict[str, Any]


def prepare_walk(inputs: WalkInputs, out: Walk) -> WalkLaunch:
    """Launch the first program, and return what the second one is given."""
    logits, starts, temperatures, *of_trees, uniforms, least = inputs
    tokens, parents, sizes, *distributions = of_trees
    (requests, nodes), (rows, vocab) = tokens.shape, logits.shape
    _, num_draws, support = inputs.distribution_tokens.shape
    assert logits.stride(1) == 1
    assert support <= MOST_TOKENS
    assert tokens.stride() == parents.stride() == (nodes, 1)
    assert all(each.is_contiguous() for each in distributions)
    assert inputs.distribution_probs.dtype == torch.float64
    num_chunks, device = triton.cdiv(vocab, _CHUNK), logits.device
    highest = torch.empty((rows, num_chunks), dtype=torch.float32, device=device)
    sums = torch.empty((rows, num_chunks), dtype=torch.float64, device=device)
    scratch = torch.empty((requests, _CHUNK), dtype=torch.float64, device=device)
    assert all(each.is_contiguous() for each in out)
    softmax_program[(num_chunks, nodes, requests)](
        logits, starts, temperatures, least, sizes, highest, sums, vocab, logits.stride(0), num_chunks,
        CHUNK=_CHUNK, enable_fp_fusion=True,
    )  # fmt: skip
    blocks = {"BLOCK_CHUNKS": num_chunks, "BLOCK_DRAWS": num_draws, "BLOCK_SUPPORT": support}
    options = {name: triton.next_power_of_2(count) for name, count in blocks.items()}
    return WalkLaunch(
        (logits, highest, sums, starts, temperatures, least, *of_trees, uniforms, *out, scratch),
        (vocab, logits.stride(0), num_chunks, nodes, num_draws, support, out[0].shape[1]),
        {**options, "CHUNK": _CHUNK, "num_warps": 8, "enable_fp_fusion": True},
    )  # fmt: skip

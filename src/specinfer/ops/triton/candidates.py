"""Candidates of a draft level: the best tokens after each node under the target's noise, and what they are worth.

This takes two launches, as `choose` does: the first finds the best of each chunk of the vocabulary by noise in
single precision, the second scores these with the noise of noise.py. Confidence is a softmax whose sum is the first
launch's, so it differs from PyTorch's by up to 2e-4 of itself.
"""

from dataclasses import fields

import torch
import triton
import triton.language as tl
from torch import Tensor

from specinfer.ops.trees import Candidates, ChanceTable, Frontier, Limits, Sampling
from specinfer.ops.triton.choose import noise_bits, precise_noise, rough_noise

_CHUNK = 2048


@triton.jit(do_not_specialize=["is_limited", "num_chunks", "num_nodes", "level"])
def chunk_program(
    logits, seeds, positions, temperatures, limits, is_limited, found, highest, sums,
    vocab, stride, num_chunks, num_nodes, level,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Find the best tokens of a chunk, its best score and the sum of exponentials. Grid: [rows, chunks]."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    request = row // num_nodes
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    scores = tl.load(logits + row * stride + tokens, tokens < vocab, other=float("-inf")).to(tl.float32)
    has_nan = tl.max((scores != scores).to(tl.int32), 0) > 0
    scores = tl.where(has_nan, float("-inf"), scores)
    temperature = tl.load(temperatures + request)
    if temperature > 0:
        bits = noise_bits(
            tl.load(seeds + request), tl.load(positions + request).to(tl.int64) + level + 1, tokens.to(tl.int64)
        )
        scores = tl.div_rn(scores, tl.zeros_like(scores) + temperature)
        limit = tl.load(limits + row, is_limited > 0, other=float("-inf"))
        scores = tl.where(scores < limit, float("-inf"), scores + rough_noise(bits))
    top = tl.max(scores, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    tl.store(sums + row * num_chunks + chunk, tl.sum(tl.exp(scores - base), 0))
    tl.store(highest + row * num_chunks + chunk, tl.where(has_nan, float("nan"), top))
    found += (row * num_chunks + chunk) * WIDTH
    for rank in range(WIDTH):
        best = tl.max(scores, 0)
        token = tl.min(tl.where(scores == best, tokens, vocab), 0)
        tl.store(found + rank, tl.where(best > float("-inf"), token, -1))
        scores = tl.where(tokens == token, float("-inf"), scores)


@triton.jit
def chance_of(number, rank, confidence, meets, heights, slopes, num_points, num_ranks):
    """Compute the probability that a candidate is accepted, by the table of this number in a `ChanceTable`.

    `meets` are the table's points, and infinite padding.
    """
    line = tl.sum((meets < confidence).to(tl.int32), 0) + tl.minimum(rank, num_ranks - 1) * (num_points + 1)
    line += number * num_ranks * (num_points + 1)
    return tl.minimum(tl.maximum(tl.load(heights + line) + tl.load(slopes + line) * confidence, 0.0), 1.0)


@triton.jit(
    do_not_specialize=["is_limited", "num_chunks", "num_nodes", "level", "first", "total", "num_levels", "num_points"]
)
def candidates_program(
    logits, seeds, positions, temperatures, limits, is_limited, found, highest, sums,
    points, heights, slopes, max_depth, min_path_prob, widths, above, numbers, accepted,
    out_tokens, out_confidence, out_path_prob, out_parents, out_columns,
    vocab, stride, num_chunks, num_nodes, level, first, total, num_levels, num_points, num_ranks,
    WIDTH: tl.constexpr, BLOCK_CHUNKS: tl.constexpr, BLOCK_FOUND: tl.constexpr, BLOCK_POINTS: tl.constexpr,
    IS_PREDICTED: tl.constexpr,
):  # fmt: skip
    """Rank the candidates of a node and store them. Grid: [rows]."""
    row = tl.program_id(0).to(tl.int64)
    request = row // num_nodes
    chunks = tl.arange(0, BLOCK_CHUNKS)
    of_chunks = tl.load(highest + row * num_chunks + chunks, chunks < num_chunks, other=float("-inf"))
    has_nan = tl.max((of_chunks != of_chunks).to(tl.int32), 0) > 0
    of_chunks = tl.where(has_nan, float("-inf"), of_chunks)
    top = tl.max(of_chunks, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    of_sums = tl.load(sums + row * num_chunks + chunks, chunks < num_chunks, other=0.0)
    norm = tl.maximum(tl.sum(of_sums * tl.exp(of_chunks - base), 0), 1e-30)  # at least 1 unless there is no token
    places = tl.arange(0, BLOCK_FOUND)
    tokens = tl.load(found + row * num_chunks * WIDTH + places, places < num_chunks * WIDTH, other=-1)
    scores = tl.load(logits + row * stride + tokens, tokens >= 0, other=float("-inf")).to(tl.float32)
    temperature = tl.load(temperatures + request)
    is_sampled = temperature > 0
    if is_sampled:
        bits = noise_bits(
            tl.load(seeds + request), tl.load(positions + request).to(tl.int64) + level + 1, tokens.to(tl.int64)
        )
        scores = tl.div_rn(scores, tl.zeros_like(scores) + temperature)
        limit = tl.load(limits + row, is_limited > 0, other=float("-inf"))
        scores = tl.where(scores < limit, float("-inf"), scores + precise_noise(bits))
    scores = tl.where((tokens < 0) | has_nan, float("-inf"), scores)
    numbers_of_points = tl.arange(0, BLOCK_POINTS)
    meets = tl.load(points + numbers_of_points, numbers_of_points < num_points, other=float("inf"))
    above_prob = tl.load(above + row)
    parent = tl.load(numbers + row)
    width = tl.load(widths + request * num_levels + level)
    is_fixed = tl.load(widths + request * num_levels) > 0
    goes_on = (above_prob >= 0) & (level < tl.load(max_depth + request))
    least = tl.load(min_path_prob + request)
    lowest = tl.full((), float("inf"), tl.float32)
    scale = tl.full((), 1.0, tl.float32)
    place = request * total + first + (row % num_nodes) * WIDTH
    for rank in range(WIDTH):
        best = tl.max(scores, 0)
        token = tl.min(tl.where(scores == best, tokens, vocab), 0)
        scores = tl.where(tokens == token, float("-inf"), scores)
        is_token = best > float("-inf")
        confidence = tl.exp(best - base) / norm
        confidence = tl.where(is_token & (confidence == confidence), tl.minimum(confidence, 1.0), 0.0)
        if IS_PREDICTED:
            if rank == 0:
                scale = tl.div_rn(tl.load(accepted + row), tl.maximum(confidence, 1e-9))
            confidence = tl.minimum(confidence * scale, 1.0)
        number = is_sampled.to(tl.int32)  # SAMPLED or GREEDY
        chance = chance_of(number, rank, confidence, meets, heights, slopes, num_points, num_ranks)
        # A later candidate of a node is never taken before an earlier one.
        lowest = tl.minimum(lowest, tl.where(is_fixed, 1.0, chance))
        path_prob = lowest * above_prob
        usable = goes_on & is_token & (path_prob >= least) & ((rank < width) | (is_fixed == 0))
        tl.store(out_tokens + place + rank, tl.where(is_token, token, 0).to(tl.int64))
        tl.store(out_confidence + place + rank, confidence)
        tl.store(out_path_prob + place + rank, tl.where(usable, path_prob, -1.0))
        tl.store(out_parents + place + rank, parent)
        tl.store(out_columns + place + rank, -1)


def add_candidates(
    logits: Tensor,
    frontier: Frontier,
    first: int,
    width: int,
    sampling: Sampling,
    table: ChanceTable,
    limits: Limits,
    candidates: Candidates,
    least: Tensor | None = None,
    accepted: Tensor | None = None,
) -> None:
    """Add the candidates of a level: the best tokens after each node of the frontier, under the target's noise.

    Args:
        logits: [requests * frontier, vocab] of the drafter.
        first: Number of the level's first candidate.
        width: Candidates of each node.
        candidates: Written to, from `first` on.
        least: [requests * frontier] float32 as `least_kept` returns it, or None to keep all tokens.
        accepted: [requests * frontier] float32 confidence of the best candidate, which scales that of the others; None
            for that of the logits.
    """
    rows, vocab = logits.shape
    nodes = frontier.tokens.shape[1]
    assert logits.stride(1) == 1
    assert width <= vocab
    of_request = (sampling.seeds, sampling.positions, sampling.temperatures)
    tables = (table.points, table.heights, table.slopes)
    bounds = (limits.max_depth, limits.min_path_prob, limits.widths)
    outputs = tuple(getattr(candidates, field.name) for field in fields(candidates))
    predicted = frontier.path_prob if accepted is None else accepted  # not read if there are none
    assert_contiguous(*of_request, *tables, *bounds, *outputs, frontier.path_prob, frontier.numbers, predicted)
    num_chunks = triton.cdiv(vocab, _CHUNK)
    found = torch.empty(rows * num_chunks * width, dtype=torch.int32, device=logits.device)
    highest, sums = torch.empty((2, rows * num_chunks), dtype=torch.float32, device=logits.device)
    kept = sampling.temperatures if least is None else least  # not read if there are none
    same = (logits, *of_request, kept, int(least is not None), found, highest, sums)
    sizes = (vocab, logits.stride(0), num_chunks, nodes, frontier.level)
    block = triton.next_power_of_2(num_chunks * width)
    # Without fused operations, so that sums are rounded as in PyTorch.
    chunk_program[(rows, num_chunks)](*same, *sizes, WIDTH=width, CHUNK=_CHUNK, enable_fp_fusion=False)
    candidates_program[(rows,)](
        *same, *tables, *bounds, frontier.path_prob, frontier.numbers, predicted, *outputs,
        *sizes, first, candidates.tokens.shape[1], limits.widths.shape[1], len(table.points), table.num_ranks,
        WIDTH=width, BLOCK_CHUNKS=triton.next_power_of_2(num_chunks), BLOCK_FOUND=block,
        BLOCK_POINTS=triton.next_power_of_2(len(table.points)), IS_PREDICTED=accepted is not None,
        num_warps=min(max(block // 1024, 4), 16), enable_fp_fusion=False,
    )  # fmt: skip


def assert_contiguous(*tensors: Tensor) -> None:
    assert all(tensor.is_contiguous() for tensor in tensors)

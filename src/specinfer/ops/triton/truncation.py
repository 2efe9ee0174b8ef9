"""Truncation: the score of the least probable token that min-p, top-k and top-p keep in each row.

A first launch lists the best tokens of each part of the vocabulary. Parts take turns, 16 tokens each, so that likely
tokens, whose ids are often close, are spread over all of them. The second launch searches the limits among the tokens
listed. If no token that is not listed could matter, these limits are those of the whole row; else it searches the row.
Sums are in double precision over weights in single precision, so a limit may differ from PyTorch's where the
probability up to a token is within 1e-6 of top-p.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specinfer.ops.logits import Truncation

_PART, _RUN, _WIDTH = 1024, 16, 16  # tokens of a part, next to each other, and listed
_MOST_LISTED = 4096  # of a row; a larger vocabulary has larger parts
_LOWEST = tl.constexpr(-2139095041)  # key of -inf


@triton.jit
def _key(scores):
    """Return integers in the order of these numbers."""
    bits = scores.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _score(key):
    """Return the number that belongs to a key."""
    key = key.to(tl.int32)
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _weights(scores, valid, best, least, IS_MASS: tl.constexpr):
    """Return what each token adds to a sum: 1, or its probability relative to the best one's."""
    if IS_MASS:
        return tl.where(valid & (scores >= least), tl.exp(scores - best), 0.0).to(tl.float64)
    else:
        return valid.to(tl.float64)


@triton.jit
def _highest(scores, valid, best, least, wanted, IS_MASS: tl.constexpr):
    """Return the highest score at and above which the listed tokens sum up to `wanted`; -inf if none is."""
    keys, weights = _key(scores), _weights(scores, valid, best, least, IS_MASS)
    low, high = tl.full((), _LOWEST, tl.int64), _key(best).to(tl.int64)
    while low < high:
        middle = (low + high + 1) >> 1
        is_enough = tl.sum(tl.where(keys >= middle, weights, 0.0), 0) >= wanted
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle - 1)
    return _score(low)


@triton.jit
def _sum_of_row(logits, vocab, temperature, best, least, key, IS_MASS: tl.constexpr, PART: tl.constexpr):
    """Return the sum over the tokens of a row with at least this key."""
    sums = tl.zeros((PART,), tl.float64)
    for start in range(0, vocab, PART):
        tokens = start + tl.arange(0, PART)
        scores = _load_scores(logits, tokens, tokens < vocab, temperature)
        weights = _weights(scores, tokens < vocab, best, least, IS_MASS)
        sums += tl.where(_key(scores) >= key, weights, 0.0)
    return tl.sum(sums, 0)


@triton.jit
def _highest_of_row(logits, vocab, temperature, best, least, wanted, IS_MASS: tl.constexpr, PART: tl.constexpr):
    """Return what `_highest` does, for all tokens of a row."""
    low, high = tl.full((), _LOWEST, tl.int64), _key(best).to(tl.int64)
    while low < high:
        middle = (low + high + 1) >> 1
        is_enough = _sum_of_row(logits, vocab, temperature, best, least, middle, IS_MASS, PART) >= wanted
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle - 1)
    return _score(low)


@triton.jit
def _load_scores(logits, tokens, valid, temperature):
    """Return logits over the temperature, with -inf in place of NaN."""
    scores = tl.load(logits + tokens, valid, other=float("-inf")).to(tl.float32)
    scores = tl.div_rn(scores, tl.zeros_like(scores) + temperature)
    return tl.where(scores == scores, scores, float("-inf"))


@triton.jit
def _truncates(temperatures, log_min_p, top_k, top_p, request):
    limits = (tl.load(log_min_p + request) > float("-inf")) | (tl.load(top_k + request) > 0)
    return (tl.load(temperatures + request) > 0) & (limits | (tl.load(top_p + request) < 1.0))


@triton.jit(do_not_specialize=["num_parts", "num_nodes"])
def listing_program(
    logits, temperatures, log_min_p, top_k, top_p, listed, masses, vocab, stride, num_parts, num_nodes,
    WIDTH: tl.constexpr, PART: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """List the best scores of a part of a row, in descending order, and sum up its probabilities. Grid: [rows, parts].

    A score of NaN marks a place without a token.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    request = row // num_nodes
    if _truncates(temperatures, log_min_p, top_k, top_p, request):
        places = tl.arange(0, PART)
        tokens = (places // RUN * num_parts + part) * RUN + places % RUN
        valid = tokens < vocab
        scores = _load_scores(logits + row * stride, tokens, valid, tl.load(temperatures + request))
        top = tl.max(scores, 0)
        base = tl.where(top == float("-inf"), 0.0, top)
        tl.store(masses + row * num_parts + part, tl.sum(tl.exp(scores - base).to(tl.float64), 0))
        listed += (row * num_parts + part) * WIDTH
        for rank in tl.static_range(WIDTH):
            best = tl.max(tl.where(valid, scores, float("-inf")), 0)
            is_best = valid & (scores == best)
            place = tl.min(tl.where(is_best, places, PART), 0)
            tl.store(listed + rank, tl.where(place < PART, best, float("nan")))
            valid = valid & (places != place)


@triton.jit(do_not_specialize=["num_parts", "num_nodes"])
def limits_program(
    logits, temperatures, log_min_p, top_k, top_p, listed, masses, out, vocab, stride, num_parts, num_nodes,
    WIDTH: tl.constexpr, PART: tl.constexpr, BLOCK_PARTS: tl.constexpr, BLOCK_LISTED: tl.constexpr,
):  # fmt: skip
    """Store the limit of a row. Grid: [rows]."""
    row = tl.program_id(0).to(tl.int64)
    request = row // num_nodes
    least = tl.full((), float("-inf"), tl.float32)
    if _truncates(temperatures, log_min_p, top_k, top_p, request):
        logits += row * stride
        temperature = tl.load(temperatures + request)
        places, parts = tl.arange(0, BLOCK_LISTED), tl.arange(0, BLOCK_PARTS)
        of_row = listed + row * num_parts * WIDTH
        scores = tl.load(of_row + places, places < num_parts * WIDTH, other=float("nan"))
        valid = scores == scores
        scores = tl.where(valid, scores, float("-inf"))
        # No token above this score is missing from the list.
        ends = tl.load(of_row + parts * WIDTH + (WIDTH - 1), parts < num_parts, other=float("-inf"))
        bound = tl.max(tl.where(ends == ends, ends, float("-inf")), 0)
        best = tl.max(scores, 0)
        share = tl.load(log_min_p + request)
        if share > float("-inf"):
            least = best + share
        count = tl.load(top_k + request)
        if (count > 0) & (count < vocab):
            wanted = count.to(tl.float64)
            limit = _highest(scores, valid, best, least, wanted, False)
            if limit < bound:
                limit = _highest_of_row(logits, vocab, temperature, best, least, wanted, False, PART)
            least = tl.maximum(least, limit)
        p = tl.load(top_p + request)
        if p < 1.0:
            if least == float("-inf"):
                tops = tl.load(of_row + parts * WIDTH, parts < num_parts, other=float("-inf"))
                tops = tl.where(tops == tops, tops, float("-inf"))
                of_parts = tl.load(masses + row * num_parts + parts, parts < num_parts, other=0.0)
                total = tl.sum(tl.where(tops > float("-inf"), of_parts * tl.exp((tops - best).to(tl.float64)), 0.0), 0)
            elif least >= bound:
                total = tl.sum(_weights(scores, valid, best, least, True), 0)
            else:
                total = _sum_of_row(logits, vocab, temperature, best, least, tl.full((), _LOWEST, tl.int64), True, PART)
            limit = _highest(scores, valid, best, least, p * total, True)
            if limit < bound:
                limit = _highest_of_row(logits, vocab, temperature, best, least, p * total, True, PART)
            least = tl.maximum(least, limit)
    tl.store(out + row, least)


def least_kept(logits: Tensor, truncation: Truncation) -> Tensor:
    """Return the score of the least probable token that min-p, top-k and top-p keep: [rows] float32; -inf keeps all.

    Scores are logits divided by the temperature.

    Args:
        logits: [requests * nodes, vocab].
    """
    rows, vocab = logits.shape
    limits = (truncation.temperatures, truncation.log_min_p, truncation.top_k, truncation.top_p)
    assert logits.stride(1) == 1
    assert rows % len(truncation.top_k) == 0
    assert all(tensor.is_contiguous() for tensor in limits)
    part = _PART
    while triton.cdiv(vocab, part) * _WIDTH > _MOST_LISTED:
        part *= 2
    num_parts = triton.cdiv(vocab, part)
    listed = torch.empty(rows * num_parts * _WIDTH, dtype=torch.float32, device=logits.device)
    masses = torch.empty(rows * num_parts, dtype=torch.float64, device=logits.device)
    out = torch.empty(rows, dtype=torch.float32, device=logits.device)
    sizes = (vocab, logits.stride(0), num_parts, rows // len(truncation.top_k))
    # Without fused operations, so that scores are rounded as in PyTorch.
    listing_program[(rows, num_parts)](
        logits, *limits, listed, masses, *sizes, WIDTH=_WIDTH, PART=part, RUN=_RUN, enable_fp_fusion=False
    )
    limits_program[(rows,)](
        logits, *limits, listed, masses, out, *sizes,
        WIDTH=_WIDTH, PART=part, BLOCK_PARTS=triton.next_power_of_2(num_parts),
        BLOCK_LISTED=triton.next_power_of_2(num_parts * _WIDTH), num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return out

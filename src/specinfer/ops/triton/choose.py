"""Choice of the token at each row: argmax(logits / T + noise), with the noise of specinfer/core/noise.py.

That noise takes two logarithms in double precision per number of the vocabulary, which are slow on GPUs. So a first
launch over all logits computes it in single precision and keeps the best score of each chunk. A second one computes it
as noise.py does, but only for chunks whose best is within `_MARGIN` of the row's best, usually one. Only the second
launch decides which token wins. Its hashes equal noise.py's bit for bit. Its noise can differ where the device's
logarithm of a double differs in the last bit and rounding to single precision does not hide it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specinfer.ops.trees import NAN, NO_VALID_TOKEN

_CHUNK = 2048
GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_NAN, _NO_VALID_TOKEN = tl.constexpr(NAN), tl.constexpr(NO_VALID_TOKEN)
# The error of single-precision noise is below 2e-4, and that of its sum with a logit an ulp of the sum.
_MARGIN, _MARGIN_OF_BEST = tl.constexpr(2.0**-10), tl.constexpr(2.0**-20)


@triton.jit
def mix(x):
    """Compute splitmix64's finaliser on uint64."""
    x = (x ^ (x >> 30)) * tl.full((), _MIX_1, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full((), _MIX_2, tl.uint64)
    return x ^ (x >> 31)


@triton.jit
def noise_bits(seed, position, tokens):
    """Return 52 random bits for each token."""
    gamma = tl.full((), GAMMA, tl.uint64)
    key = mix(mix(seed.to(tl.uint64) + gamma) ^ (position.to(tl.int64).to(tl.uint64) * gamma))
    return mix((tokens + 1).to(tl.uint64) * gamma + key) >> 12


@triton.jit
def precise_noise(bits):
    """Return the noise of noise.py."""
    uniform = (bits.to(tl.float64) + 0.5) * 2.220446049250313e-16
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit
def rough_noise(bits):
    """Return the noise within 2e-4; near 1, the logarithm is a series in the distance of the uniform number from 1."""
    uniform = (bits.to(tl.float32) + 0.5) * 2.220446049250313e-16
    gap = ((4503599627370495 - bits.to(tl.int64)).to(tl.float32) + 0.5) * 2.220446049250313e-16
    series = gap * (1.0 + gap * (0.5 + gap * (1.0 / 3 + gap * 0.25)))
    minus_log = tl.where(gap < 0.03125, series, -tl.log(uniform))
    return -tl.log(minus_log)


@triton.jit(do_not_specialize=["is_limited"])
def rough_program(
    logits, seeds, positions, temperatures, limits, is_limited, best, vocab, stride, num_chunks, CHUNK: tl.constexpr,
):  # fmt: skip
    """Store the best score of a chunk of a row, or NaN if it has one. Grid: [rows, chunks]."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    valid = tokens < vocab
    scores = tl.load(logits + row * stride + tokens, valid, other=float("-inf")).to(tl.float32)
    has_nan = tl.max((scores != scores).to(tl.int32), 0) > 0
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        bits = noise_bits(tl.load(seeds + row), tl.load(positions + row), tokens.to(tl.int64))
        scores = tl.div_rn(scores, tl.zeros_like(scores) + temperature)
        limit = tl.load(limits + row, is_limited > 0, other=float("-inf"))
        scores = tl.where(scores < limit, float("-inf"), scores + rough_noise(bits))
    highest = tl.where(has_nan, float("nan"), tl.max(scores, 0))
    tl.store(best + row * num_chunks + chunk, highest)


@triton.jit(do_not_specialize=["is_limited"])
def choose_program(
    logits, seeds, positions, temperatures, limits, is_limited, best, out, vocab, stride, num_chunks,
    CHUNK: tl.constexpr, BLOCK_CHUNKS: tl.constexpr,
):  # fmt: skip
    """Choose the token of a row. Grid: [rows]."""
    row = tl.program_id(0).to(tl.int64)
    numbers = tl.arange(0, BLOCK_CHUNKS)
    of_chunks = tl.load(best + row * num_chunks + numbers, numbers < num_chunks, other=float("-inf"))
    has_nan = tl.max((of_chunks != of_chunks).to(tl.int32), 0) > 0
    highest = tl.max(of_chunks, 0)
    if has_nan:
        tl.store(out + row, tl.full((), _NAN, tl.int64))
    elif highest == float("-inf"):
        tl.store(out + row, tl.full((), _NO_VALID_TOKEN, tl.int64))
    else:
        temperature = tl.load(temperatures + row)
        limit = tl.load(limits + row, is_limited > 0, other=float("-inf"))
        least = highest
        if (temperature > 0) & (highest < float("inf")):
            least = highest - (_MARGIN + _MARGIN_OF_BEST * tl.abs(highest))
        best_score = tl.full((), float("-inf"), tl.float32)
        best_token = tl.full((), 0, tl.int32)
        wanted = of_chunks >= least
        chunk = tl.min(tl.where(wanted, numbers, BLOCK_CHUNKS), 0)
        while chunk < BLOCK_CHUNKS:
            tokens = chunk * CHUNK + tl.arange(0, CHUNK)
            scores = tl.load(logits + row * stride + tokens, tokens < vocab, other=float("-inf")).to(tl.float32)
            if temperature > 0:
                bits = noise_bits(tl.load(seeds + row), tl.load(positions + row), tokens.to(tl.int64))
                scores = tl.div_rn(scores, tl.zeros_like(scores) + temperature)
                scores = tl.where(scores < limit, float("-inf"), scores + precise_noise(bits))
            score = tl.max(scores, 0)
            token = tl.min(tl.where(scores == score, tokens, vocab), 0)
            if score > best_score:  # the first of equal ones
                best_score = score
                best_token = token
            chunk = tl.min(tl.where(wanted & (numbers > chunk), numbers, BLOCK_CHUNKS), 0)
        tl.store(out + row, best_token.to(tl.int64))


def choose(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperatures: Tensor,
    least: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Choose the token at each row: argmax(logits / temperature + noise of (seed, position, token)).

    Args:
        logits: [rows, vocab].
        seeds: [rows] int64, of the requests.
        positions: [rows], of the tokens to choose.
        temperatures: [rows] float32; 0 is greedy, without noise.
        least: [rows] float32 score below which no token of a sampled row is chosen, or None.
        out: [rows] int64 to write to.

    Returns:
        [rows] int64 tokens; `NAN` where a row has a NaN, `NO_VALID_TOKEN` where all of it is -inf.
    """
    rows, vocab = logits.shape
    assert logits.stride(1) == 1
    num_chunks = triton.cdiv(vocab, _CHUNK)
    if out is None:
        out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    scratch = torch.empty(rows * num_chunks, dtype=torch.float32, device=logits.device)
    limits = temperatures if least is None else least  # not read if there are none
    of_rows = (logits, seeds, positions, temperatures, limits, int(least is not None), scratch)
    same = (vocab, logits.stride(0), num_chunks)
    # Without fused operations, so that sums are rounded as in PyTorch.
    rough_program[(rows, num_chunks)](*of_rows, *same, CHUNK=_CHUNK, enable_fp_fusion=False)
    choose_program[(rows,)](
        *of_rows, out, *same,
        CHUNK=_CHUNK, BLOCK_CHUNKS=triton.next_power_of_2(num_chunks), enable_fp_fusion=False,
    )  # fmt: skip
    return out

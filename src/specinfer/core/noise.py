"""Seeded Gumbel noise that target and drafters share, on which coupled verification is based.

The noise of a token is a pure function of (request seed, position, token id), so it is the same on any
device, in any batch, for any tree, and can be computed for just the tokens that need it. argmax(logits +
noise) is then an exact sample from softmax(logits): the Gumbel-max trick. The hash is splitmix64 (Steele et
al., OOPSLA 2014).

Verification rules that use random accept/reject decisions, and draft tokens drawn for them, take noise from
separate streams: a rule is exact only if its random numbers are independent of the draft tokens.
"""

import hashlib
from functools import lru_cache

import torch
from torch import Tensor


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


_MASK = 2**64 - 1
_GAMMA_U, _MIX_1_U, _MIX_2_U = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_GAMMA, _MIX_1, _MIX_2 = _signed(_GAMMA_U), _signed(_MIX_1_U), _signed(_MIX_2_U)
# Indices of the streams derived from a request's seed; far from the numbers of requests.
_UNIFORMS, _DRAWS = 2**62, 2**62 + 1
_PART = 2**15  # numbers computed at a time


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)  # a logical shift; torch's is arithmetic


def _mix_(x: Tensor) -> Tensor:
    """Apply splitmix64's finalizer to int64 in place; it wraps like two's complement."""
    x.bitwise_xor_(_shift_right(x, 30)).mul_(_MIX_1)
    x.bitwise_xor_(_shift_right(x, 27)).mul_(_MIX_2)
    return x.bitwise_xor_(_shift_right(x, 31))


def _keys(seeds: Tensor, numbers: Tensor) -> Tensor:
    return _mix_(_mix_(seeds + _GAMMA) ^ (numbers * _GAMMA))


def gumbel(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Return standard Gumbel noise for each (row, token).

    Args:
        seeds: [rows] int64, the request's seed.
        positions: [rows] int64, the absolute position of the token to be sampled.
        token_ids: [tokens] int64, or [rows, tokens] if each row has its own.

    Returns:
        [rows, tokens] float32.
    """
    keys = _keys(seeds, positions).unsqueeze(1)
    noise = torch.empty((len(seeds), token_ids.shape[-1]), device=token_ids.device)
    # In parts that stay in a core's cache: a vocabulary of 128,000 takes a third of the time this way.
    num_columns = max(_PART // max(len(seeds), 1), 1024)
    for part in range(0, token_ids.shape[-1], num_columns):
        ids = token_ids[..., part : part + num_columns]
        bits = _mix_((ids + 1).mul_(_GAMMA) + keys)
        # 52 bits into (0, 1): with 53 the largest would round to 1. float64: rare tokens are decided by the tails.
        uniform = _shift_right(bits, 12).double().add_(0.5).mul_(2.0**-52)
        noise[:, part : part + num_columns] = uniform.log_().neg_().log_().neg_()
    return noise


class UniformStream:
    """A sequence of uniform random numbers in [0, 1), from a stream of its own."""

    def __init__(self, seed: int) -> None:
        self.state = derive_seed(seed, _UNIFORMS)  # in [0, 2**64); `next_uniform` computes the next number from it

    def next_uniform(self) -> float:
        self.state, uniform = next_uniform(self.state)
        return uniform


def next_uniform(state: int) -> tuple[int, float]:
    """Return the next state and the uniform number in [0, 1) that belongs to it."""
    state = (state + _GAMMA_U) & _MASK
    return state, (_mixed(state) >> 11) * 2.0**-53


def noise_key(seed: int, position: int) -> int:
    """Return the key in [0, 2**64) that determines the noise of all tokens at one position."""
    return _mixed(_mixed((seed + _GAMMA_U) & _MASK) ^ (position * _GAMMA_U & _MASK))


def _mixed(bits: int) -> int:
    """Apply splitmix64's finalizer to a Python integer, as `_mix_` does."""
    bits = ((bits ^ (bits >> 30)) * _MIX_1_U) & _MASK
    bits = ((bits ^ (bits >> 27)) * _MIX_2_U) & _MASK
    return bits ^ (bits >> 31)


@lru_cache(maxsize=256)
def draws_of(drafter: str) -> int:
    """Return the index of the stream that drafters of this name draw from, for `derive_seed`."""
    digest = hashlib.blake2b(drafter.encode(), digest_size=7).digest()
    return _DRAWS + int.from_bytes(digest)


def derive_seed(seed: int, index: int) -> int:
    """Return a request's own seed, in [0, 2**63), derived from a shared seed and the request's number."""
    return noise_key(seed, index) & (2**63 - 1)

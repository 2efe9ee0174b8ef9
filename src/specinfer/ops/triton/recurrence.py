"""Short convolutions and recurrences over token trees, each one launch.

The columns of a head's state do not depend on each other: a program is some columns of one head of one request, which
stay in registers while its tokens go through them in order. A state that another token than the next continues from is
put down in memory.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specinfer.ops.cpu.recurrence import DECAYS, ConvolutionCall, RecurrenceCall
from specinfer.ops.scan_order import ScanOrder

_CHANNELS = 512  # of a program of a convolution
_NUMBERS = 1024  # of a state, in a program: at most 32 registers of each thread of a warp
_COLUMNS = 64  # of it at most, so that there are enough programs where a state has few keys


@triton.jit
def convolve_program(
    inputs, paths, weight, bias, out, channels, stride,
    TAPS: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATES: tl.constexpr,
):  # fmt: skip
    """Compute some channels of a token."""
    token, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < channels
    total = tl.zeros([BLOCK], tl.float32)
    if HAS_BIAS:
        total = tl.load(bias + place, mask=inside, other=0.0)
    for tap in tl.static_range(TAPS):
        slot = tl.load(paths + token * stride + tap)
        if slot >= 0:
            taken = tl.load(inputs + slot * channels + place, mask=inside, other=0.0).to(tl.float32)
            total += taken * tl.load(weight + tap * channels + place, mask=inside, other=0.0)
    total = _rounded(total, inputs)
    if ACTIVATES:
        total = _rounded(total * _sigmoid(total), inputs)
    tl.store(out + token * channels + place, total, mask=inside)


@triton.jit
def _rounded(x, like):
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _sigmoid(x):
    z = tl.exp(-tl.abs(x))
    return tl.where(x < 0.0, z, 1.0) / (1.0 + z)


@triton.jit
def _softplus(x):
    """log(1 + e^x); log(1 + z) is twice the inverse hyperbolic tangent of z / (2 + z), which is a third at most."""
    z = tl.exp(-tl.abs(x))
    w = z / (2.0 + z)
    square = w * w
    p = square * (2.0 / 13) + 2.0 / 11
    p = p * square + 2.0 / 9
    p = p * square + 2.0 / 7
    p = p * square + 2.0 / 5
    p = p * square + 2.0 / 3
    p = p * square + 2.0
    return tl.maximum(x, 0.0) + w * p


@triton.jit
def recur_program(
    mixed, stored, pool, held, starts, ends, first_rows, first_places, slots, origins, places, rows, results,
    bias, decay, skip, out, heads, channels, query, key, value, least, most, scale,
    REPEATS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    IS_DELTA: tl.constexpr, DECAYS: tl.constexpr, IS_BOUNDED: tl.constexpr, HAS_SKIP: tl.constexpr,
    HAS_POOL: tl.constexpr,
):  # fmt: skip
    """Compute some columns of a head of a request; DECAYS: 0 of a head, 1 of each key, 2 of each number."""
    request, head = tl.program_id(0), tl.program_id(1)
    k, v = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    has_key, has_value = k < KEYS, v < VALUES
    inside = has_key[:, None] & has_value[None, :]
    whole = heads * KEYS * VALUES
    at = head * KEYS * VALUES + k[:, None] * VALUES + v[None, :]
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if HAS_POOL:
        row = tl.load(first_rows + request)
        if row >= 0:
            state = tl.load(pool + row * whole + at, mask=inside, other=0.0)
    place = tl.load(first_places + request)
    if place >= 0:
        tl.store(held + place * whole + at, state, mask=inside)
        tl.debug_barrier()
    if DECAYS == 2:
        rate = tl.load(decay + k[:, None] * VALUES + v[None, :], mask=inside, other=0.0)
    else:
        rate = tl.load(decay + head)
    for token in range(tl.load(starts + request), tl.load(ends + request)):
        origin = tl.load(origins + token)
        if origin >= 0:
            state = tl.load(held + origin * whole + at, mask=inside, other=0.0)
        inputs = mixed + token * channels
        q = tl.load(inputs + query + head // REPEATS * KEYS + k, mask=has_key, other=0.0)
        x = tl.load(inputs + key + head // REPEATS * KEYS + k, mask=has_key, other=0.0)
        change = tl.load(inputs + value + head * VALUES + v, mask=has_value, other=0.0)
        if HAS_SKIP:
            skipped = change * tl.load(skip + head)
        if DECAYS == 2:
            step = tl.load(stored + token * VALUES + v, mask=has_value, other=0.0)
            state = state * tl.exp(rate * step[None, :])
        elif IS_DELTA:
            q = q / tl.sqrt(tl.sum(q * q, axis=0) + 1e-6) * scale
            x = x / tl.sqrt(tl.sum(x * x, axis=0) + 1e-6)
            slot = tl.load(slots + token)
            if DECAYS == 1:
                from_head = stored + slot * heads * (1 + KEYS)
                step = tl.load(from_head + heads + head * KEYS + k, mask=has_key, other=0.0).to(tl.float32)
                step += tl.load(bias + head * KEYS + k, mask=has_key, other=0.0)
            else:
                from_head = stored + slot * heads * 2
                step = tl.load(from_head + heads + head).to(tl.float32) + tl.load(bias + head)
            if IS_BOUNDED:
                kept = tl.exp(least * _sigmoid(-step * rate))
            else:
                kept = tl.exp(_softplus(step) * rate)
            if DECAYS == 1:
                state = state * kept[:, None]
            else:
                state = state * kept
            beta = tl.load(from_head + head).to(tl.float32)
            change -= tl.sum(state * x[:, None], axis=0)
            change *= _rounded(_sigmoid(beta), stored) * most
        else:
            step = tl.load(stored + tl.load(slots + token) * heads + head).to(tl.float32)
            step = _rounded(step + _rounded(tl.load(bias + head), stored), stored)
            step = tl.clamp(_rounded(_softplus(step), stored), least, most, propagate_nan=tl.PropagateNan.ALL)
            state = state * tl.exp(rate * step)
            change *= step
        state += x[:, None] * change[None, :]
        result = tl.load(results + token)
        if result >= 0:
            found = tl.sum(state * q[:, None], axis=0)
            if HAS_SKIP:
                found += skipped
            tl.store(out + (result * heads + head) * VALUES + v, found, mask=has_value)
        place = tl.load(places + token)
        if place >= 0:
            tl.store(held + place * whole + at, state, mask=inside)
            tl.debug_barrier()  # threads may read what others have written
        if HAS_POOL:
            row = tl.load(rows + token)
            if row >= 0:
                tl.store(pool + row * whole + at, state, mask=inside)


def convolve(inputs: Tensor, paths: Tensor, call: ConvolutionCall) -> Tensor:
    """Return the [tokens, channels] float32 results of a convolution with one filter for each channel.

    They are rounded to the type of the inputs.

    Args:
        inputs: [slots, 1, channels] inputs by slot.
        paths: [tokens, taps] slots of the last tokens on each token's path, itself last; -1 before the first.
    """
    taps, channels = call.weight.shape
    assert inputs.shape[1:] == (1, channels)
    assert inputs.is_contiguous()
    assert paths.stride(1) == 1
    assert paths.shape[1] == taps
    result = torch.empty(len(paths), channels, device=paths.device)
    block = min(triton.next_power_of_2(channels), _CHANNELS)
    if len(paths):
        convolve_program[(len(paths), triton.cdiv(channels, block))](
            inputs, paths, call.weight, call.weight if call.bias is None else call.bias, result, channels,
            paths.stride(0),
            TAPS=taps, BLOCK=block, HAS_BIAS=call.bias is not None, ACTIVATES=call.activates, num_warps=4,
            enable_fp_fusion=True,
        )  # fmt: skip
    return result


def recur(mixed: Tensor, call: RecurrenceCall, order: ScanOrder, stored: Tensor, pool: Tensor | None) -> Tensor:
    """Return [results, heads, value_dim] float32, and write states; a row that a request reads is written for no other.

    Args:
        mixed: [tokens, channels] float32 queries, keys and values, in the order of the scan.
        stored: [slots, 1, width] steps before activation; see `RecurrenceCall`.
        pool: [rows, heads, key_dim, value_dim] float32 states, or None for none.
    """
    sizes, pool = call.sizes, pool if pool is not None and len(pool) else None
    heads, keys, values = sizes.num_heads, sizes.key_dim, sizes.value_dim
    block_k = triton.next_power_of_2(keys)
    assert block_k <= _NUMBERS
    assert mixed.is_contiguous()
    assert stored.is_contiguous()
    assert pool is None or pool.is_contiguous()
    block_v = min(triton.next_power_of_2(values), _NUMBERS // block_k, _COLUMNS)
    held = torch.empty(order.num_places, heads, keys, values, device=mixed.device)
    result = torch.zeros(order.num_results, heads, values, device=mixed.device)  # of padding, too
    decay, least = call.decay, call.limits[0]
    recur_program[(len(order.first_rows), heads, triton.cdiv(values, block_v))](
        mixed, stored, held if pool is None else pool, held, order.starts, order.ends, order.first_rows,
        order.first_places, order.slots, order.origins, order.places, order.rows, order.results,
        decay if call.bias is None else call.bias, decay, decay if call.skip is None else call.skip, result,
        heads, sizes.num_channels, sizes.query, sizes.key, sizes.value, *call.limits, keys**-0.5,
        REPEATS=heads // sizes.num_key_heads, KEYS=keys, VALUES=values, BLOCK_K=block_k, BLOCK_V=block_v,
        IS_DELTA=call.is_delta, DECAYS=DECAYS[call.decays], IS_BOUNDED=call.is_delta and least < 0,
        HAS_SKIP=call.skip is not None, HAS_POOL=pool is not None, num_warps=1, enable_fp_fusion=True,
    )  # fmt: skip
    return result

"""Layers of every kind of recurrence at any size, and each computed in double precision, one number after the other."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from specinfer.ops.cpu.recurrence import Decays, HeadSizes, RecurrenceCall

LAYERS = [(1, 1, 1, 1), (2, 1, 8, 6), (1, 3, 7, 33), (2, 2, 16, 64)]


def numbers(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Layer(NamedTuple):
    sizes: HeadSizes
    call: RecurrenceCall
    bias: Tensor
    decay: Tensor
    skip: Tensor | None
    width: int  # of what is stored of a token


Kind = tuple[bool, Decays, float]  # is a delta rule; what has a decay of its own; the least step, or a bound
KINDS: tuple[Kind, ...] = (
    (True, "head", 0.0), (False, "head", 0.01), (True, "key", 0.0), (True, "key", -3.0), (False, "column", 0.0),
)  # fmt: skip


def layer_of(heads: int, repeats: int, key_dim: int, value_dim: int, kind: Kind) -> Layer:
    is_delta, decays, least = kind
    if decays == "column":
        heads, repeats, value_dim = 1, 1, heads * repeats * value_dim
    keys, values, all_heads = heads * key_dim, heads * repeats * value_dim, heads * repeats
    places = (0, keys, 2 * keys) if is_delta else (values + keys, values, 0)
    sizes = HeadSizes(all_heads, heads, key_dim, value_dim, 2 * keys + values, *places)
    steps = all_heads * (key_dim if decays == "key" else 1)
    bias = numbers((steps,), 1)
    decay = -numbers((key_dim, value_dim) if decays == "column" else (all_heads,), 2).exp()
    skip = None if is_delta else numbers((all_heads,), 3)
    call = RecurrenceCall(sizes, bias, decay, skip, (least, 2.0), is_delta=is_delta, decays=decays)
    return Layer(sizes, call, bias, decay, skip, value_dim if decays == "column" else steps + all_heads * is_delta)


def plain_step(layer: Layer, kind: Kind, mixed: Tensor, stored: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """One token, in float64: its result and the state after it. mixed: [channels], stored: [width]."""
    sizes, (is_delta, decays, least) = layer.sizes, kind
    repeats, each = sizes.num_heads // sizes.num_key_heads, sizes.key_dim if decays == "key" else 1
    result, after = torch.empty(sizes.num_heads, sizes.value_dim).double(), states.clone()
    for head in range(sizes.num_heads):
        query, key = (
            mixed[first + head // repeats * sizes.key_dim :][: sizes.key_dim].double()
            for first in (sizes.query, sizes.key)
        )
        value = mixed[sizes.value + head * sizes.value_dim :][: sizes.value_dim].double()
        if decays == "column":
            state, change = states[head] * (layer.decay * stored).double().exp(), value
        else:
            place = sizes.num_heads * is_delta + head * each
            step = (stored[place : place + each] + layer.bias[head * each :][:each]).double()
            size = functional.softplus(step) if is_delta else functional.softplus(step).clamp(least, 2.0)
            bounded = least * (-layer.decay[head] * step).sigmoid()
            state = states[head] * (bounded if least < 0 else layer.decay[head] * size).exp().unsqueeze(1)
            change = value * size[0]
        if is_delta:
            query, key = (one / (one.pow(2).sum() + 1e-6).sqrt() for one in (query, key))
            query = query * sizes.key_dim**-0.5
            change = (value - state.T @ key) * 2.0 * stored[head].double().sigmoid()
        after[head] = state + torch.outer(key, change)
        result[head] = after[head].T @ query
        if layer.skip is not None:
            result[head] += layer.skip[head] * value
    return result, after


def pool_shape(layer: Layer, rows: int) -> tuple[int, ...]:
    return (rows, layer.sizes.num_heads, layer.sizes.key_dim, layer.sizes.value_dim)


def stored_of(layer: Layer, kind: Kind, tokens: int) -> Tensor:
    stored = numbers((tokens, 1, layer.width), 5)
    return functional.softplus(stored) if kind[1] == "column" else stored


def on_paths(
    layer: Layer, kind: Kind, trees: Sequence[Sequence[int]], first_rows: Sequence[int], mixed: Tensor, stored: Tensor,
    pool: Tensor,
) -> tuple[Tensor, dict[int, Tensor]]:  # fmt: skip
    """The results of all tokens, and the state after each; slots are 0, 1, 2, ..."""
    states, results, first = {}, [], 0
    for tree, row in zip(trees, first_rows, strict=True):
        states[-1] = torch.zeros(pool.shape[1:]).double() if row < 0 else pool[row].double()
        for i, parent in enumerate(tree):
            before = states[-1 if parent < 0 else first + parent]
            result, states[first + i] = plain_step(layer, kind, mixed[first + i], stored[first + i, 0], before)
            results.append(result)
        first += len(tree)
    return torch.stack(results), states

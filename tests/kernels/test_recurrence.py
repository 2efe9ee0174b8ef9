"""Native convolutions and recurrences equal plain loops, and a token does not depend on the rest of the pass."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from native import ISAS, each_isa
from specinfer.kernels.recurrence import ConvolutionCall, Decays, HeadSizes, NativeScan, RecurrenceCall
from specinfer.model.recurrent.short_conv import convolve

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
several_isas = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    yield from each_isa(request)


def _random(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@several_isas
@given(
    st.integers(1, 70), st.integers(1, 5), st.integers(1, 9), st.sampled_from(DTYPES), st.booleans(), st.integers(0, 99)
)
@example(32, 4, 3, torch.bfloat16, True, 0)
def test_convolutions_are_those_of_pytorch(
    isa: str, channels: int, taps: int, tokens: int, dtype: torch.dtype, activates: bool, seed: int
) -> None:
    conv = nn.Conv1d(channels, channels, taps, groups=channels, bias=bool(seed % 2)).to(dtype).requires_grad_(False)
    inputs = _random((12, 1, channels), seed).to(dtype)
    inputs[11] = torch.nan  # of no path
    paths = torch.randint(-1, 11, (tokens, taps), generator=torch.Generator().manual_seed(seed))
    found = ConvolutionCall(conv.weight, conv.bias, activates=activates)(inputs, paths)
    wanted = convolve(conv, inputs, paths).to(dtype)
    wanted = (functional.silu(wanted) if activates else wanted).float()
    rtol = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.002}[dtype]
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=rtol / 10)


class Layer(NamedTuple):
    sizes: HeadSizes
    call: RecurrenceCall
    bias: Tensor
    decay: Tensor
    skip: Tensor | None
    width: int  # of what is stored of a token


KINDS: tuple[tuple[bool, Decays, float], ...] = (
    (True, "head", 0.0), (False, "head", 0.01), (True, "key", 0.0), (True, "key", -3.0), (False, "column", 0.0),
)  # fmt: skip


def _layer(heads: int, repeats: int, key_dim: int, value_dim: int, kind: tuple[bool, Decays, float]) -> Layer:
    is_delta, decays, least = kind
    if decays == "column":
        heads, repeats, value_dim = 1, 1, heads * repeats * value_dim
    keys, values, all_heads = heads * key_dim, heads * repeats * value_dim, heads * repeats
    places = (0, keys, 2 * keys) if is_delta else (values + keys, values, 0)
    sizes = HeadSizes(all_heads, heads, key_dim, value_dim, 2 * keys + values, *places)
    steps = all_heads * (key_dim if decays == "key" else 1)
    bias = _random((steps,), 1)
    decay = -_random((key_dim, value_dim) if decays == "column" else (all_heads,), 2).exp()
    skip = None if is_delta else _random((all_heads,), 3)
    call = RecurrenceCall(sizes, bias, decay, skip, (least, 2.0), is_delta=is_delta, decays=decays)
    return Layer(sizes, call, bias, decay, skip, value_dim if decays == "column" else steps + all_heads * is_delta)


def _plain(
    layer: Layer, kind: tuple[bool, Decays, float], mixed: Tensor, stored: Tensor, states: Tensor
) -> tuple[Tensor, Tensor]:
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


def _scan(
    parents: Sequence[Sequence[int]], first_rows: Sequence[int], kept: dict[int, int], slots: np.ndarray | None = None
) -> NativeScan:
    """All tokens have results; `kept`: rows of the pool by token."""
    count = sum(map(len, parents))
    rows = np.full(count, -1)
    rows[list(kept)] = list(kept.values())
    trees = [np.asarray(one, dtype=np.int64) for one in parents]
    slots = np.arange(count) if slots is None else slots
    return NativeScan(slots, trees, first_rows, rows, np.arange(count), count)


LAYERS = [(1, 1, 1, 1), (2, 1, 8, 6), (1, 3, 7, 33), (2, 2, 16, 64)]


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("shape", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recurrences_are_those_of_each_path(
    isa: str, shape: tuple[int, int, int, int], kind: tuple[bool, Decays, float], dtype: torch.dtype
) -> None:
    """Two trees and a chain; each continues from a row that another one writes."""
    layer = _layer(*shape, kind)
    dtype = torch.float32 if kind[1] == "column" else dtype
    trees = [[-1, 0, 0, 1, 1, 3, 2, -1], [-1, 0, 1], [-1, -1, 0, 0]]
    first_rows, kept = [0, -1, 1], {0: 1, 10: 0, 11: 2}
    mixed = _random((15, layer.sizes.num_channels), 4)
    stored = _stored(layer, kind, 15).to(dtype)
    pool = _random(_pool_shape(layer, 3), 6)
    states, wanted, first = {}, [], 0
    for tree, row in zip(trees, first_rows, strict=True):
        states[-1] = torch.zeros(pool.shape[1:]).double() if row < 0 else pool[row].double()
        for i, parent in enumerate(tree):
            before = states[-1 if parent < 0 else first + parent]
            result, states[first + i] = _plain(layer, kind, mixed[first + i], stored[first + i, 0], before)
            wanted.append(result)
        first += len(tree)
    found = layer.call(_scan(trees, first_rows, kept), mixed.clone(), stored, pool)
    tolerance = 1e-4 if dtype == torch.float32 else 0.05  # steps are rounded to the type of what is stored
    torch.testing.assert_close(found.double(), torch.stack(wanted), rtol=tolerance, atol=tolerance)
    for token, row in kept.items():
        torch.testing.assert_close(pool[row].double(), states[token], rtol=tolerance, atol=tolerance)


def _pool_shape(layer: Layer, rows: int) -> tuple[int, ...]:
    return (rows, layer.sizes.num_heads, layer.sizes.key_dim, layer.sizes.value_dim)


def _stored(layer: Layer, kind: tuple[bool, Decays, float], tokens: int) -> Tensor:
    stored = _random((tokens, 1, layer.width), 5)
    return functional.softplus(stored) if kind[1] == "column" else stored


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_token_is_the_same_to_the_bit_in_any_pass(isa: str, kind: tuple[bool, Decays, float]) -> None:
    layer = _layer(2, 2, 16, 40, kind)
    mixed = _random((20, layer.sizes.num_channels), 7)
    stored = _stored(layer, kind, 20)

    def of(tokens: Sequence[int]) -> Tensor:
        """Steps by token instead of by slot."""
        return stored[list(tokens)] if kind[1] == "column" else stored

    whole = layer.call(_scan([range(-1, 19)], [-1], {}), mixed.clone(), stored, None)
    pool = torch.full(_pool_shape(layer, 1), torch.nan)
    chunks = []
    for start, end in ((0, 1), (1, 8), (8, 20)):
        scan = _scan([range(-1, end - start - 1)], [0 if start else -1], {end - start - 1: 0}, np.arange(start, end))
        chunks.append(layer.call(scan, mixed[start:end].clone(), of(range(start, end)), pool))
    assert torch.equal(torch.cat(chunks), whole)
    # The chain as a branch of a tree, next to another request.
    order = [*range(18), 5, 18, 6, 19, 7]
    parents = [*range(-1, 17), 17, 17, 18, 19, 19]
    scan = _scan([[-1, 0, 0], parents], [-1, -1], {}, np.asarray([3, 4, 5, *order]))
    tree = layer.call(scan, mixed[[3, 4, 5, *order]].clone(), of([3, 4, 5, *order]), None)[3:]
    assert torch.equal(tree[[*range(18), 19, 21]], whole)

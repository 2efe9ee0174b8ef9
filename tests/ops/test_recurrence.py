"""Native convolutions and recurrences equal plain loops, and a token does not depend on the rest of the pass."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from reference.layers import convolve
from reference.recurrences import KINDS, LAYERS, Kind, layer_of, numbers, on_paths, pool_shape, stored_of
from specinfer.ops.cpu.recurrence import ConvolutionCall, NativeScan

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
several_isas = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@several_isas
@given(
    st.integers(1, 70), st.integers(1, 5), st.integers(1, 9), st.sampled_from(DTYPES), st.booleans(), st.integers(0, 99)
)
@example(32, 4, 3, torch.bfloat16, True, 0)
def test_convolutions_are_those_of_pytorch(
    isa: str, channels: int, taps: int, tokens: int, dtype: torch.dtype, activates: bool, seed: int
) -> None:
    conv = nn.Conv1d(channels, channels, taps, groups=channels, bias=bool(seed % 2)).to(dtype).requires_grad_(False)
    inputs = numbers((12, 1, channels), seed).to(dtype)
    inputs[11] = torch.nan  # of no path
    paths = torch.randint(-1, 11, (tokens, taps), generator=torch.Generator().manual_seed(seed))
    call = ConvolutionCall(conv.weight, conv.bias, activates=activates)
    found, wanted = call(inputs, paths), convolve(inputs, paths, call)
    rtol = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.002}[dtype]
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=rtol / 10)


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


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("shape", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recurrences_are_those_of_each_path(
    isa: str, shape: tuple[int, int, int, int], kind: Kind, dtype: torch.dtype
) -> None:
    """Two trees and a chain; each continues from a row that another one writes."""
    layer = layer_of(*shape, kind)
    dtype = torch.float32 if kind[1] == "column" else dtype
    trees = [[-1, 0, 0, 1, 1, 3, 2, -1], [-1, 0, 1], [-1, -1, 0, 0]]
    first_rows, kept = [0, -1, 1], {0: 1, 10: 0, 11: 2}
    mixed = numbers((15, layer.sizes.num_channels), 4)
    stored = stored_of(layer, kind, 15).to(dtype)
    pool = numbers(pool_shape(layer, 3), 6)
    wanted, states = on_paths(layer, kind, trees, first_rows, mixed, stored, pool)
    found = layer.call(_scan(trees, first_rows, kept), mixed.clone(), stored, pool)
    tolerance = 1e-4 if dtype == torch.float32 else 0.05  # steps are rounded to the type of what is stored
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)
    for token, row in kept.items():
        torch.testing.assert_close(pool[row].double(), states[token], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_token_is_the_same_to_the_bit_in_any_pass(isa: str, kind: Kind) -> None:
    layer = layer_of(2, 2, 16, 40, kind)
    mixed = numbers((20, layer.sizes.num_channels), 7)
    stored = stored_of(layer, kind, 20)

    def of(tokens: Sequence[int]) -> Tensor:
        """Steps by token instead of by slot."""
        return stored[list(tokens)] if kind[1] == "column" else stored

    whole = layer.call(_scan([range(-1, 19)], [-1], {}), mixed.clone(), stored, None)
    pool = torch.full(pool_shape(layer, 1), torch.nan)
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

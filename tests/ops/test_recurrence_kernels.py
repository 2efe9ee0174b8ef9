"""Kernels of convolutions and recurrences for GPUs, and their plain versions, equal loops in double precision.

Without a GPU kernels run in Triton's interpreter; with one they are compiled, and these tests are marked `gpu`.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from reference import layers
from reference.recurrences import KINDS, LAYERS, Kind, Layer, layer_of, numbers, on_paths, pool_shape, stored_of
from specinfer.ops.cpu.recurrence import ConvolutionCall
from specinfer.ops.scan_order import ScanOrder

pytest.importorskip("triton")
import interpreter as interpreter
from specinfer.ops.triton import recurrence as kernels

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
pytestmark = [pytest.mark.gpu] if HAS_GPU else []
VERSIONS = [layers, kernels]
# Trees in the orders of levels and of depth, a chain, one token, and trees whose roots follow the first state.
TREES = [[-1, 0, 0, 1, 1, 3, 2, -1], [-1, 0, 1], [-1, -1, 0, 0], [-1], [-1, 0, 1, 1, 0, 4, 5]]
FIRST_ROWS = [0, -1, 2, 3, 1]
KEPT = {0: 0, 10: 4, 12: 2, 22: 1}  # rows by token, each of the request that reads it or of none

Version = Any  # a module


def _order(trees: Sequence[Sequence[int]], first_rows: Sequence[int], kept: dict[int, int]) -> ScanOrder:
    count = sum(map(len, trees))
    rows = np.full(count, -1)
    rows[list(kept)] = list(kept.values())
    parents = [np.asarray(one, dtype=np.int64) for one in trees]
    return ScanOrder.from_arrays(np.arange(count), parents, first_rows, rows, np.arange(count), count, DEVICE)


def _there(layer: Layer) -> Layer:
    """With its vectors on the device."""
    for name in ("bias", "decay", "skip"):
        vector = getattr(layer.call, name)
        setattr(layer.call, name, None if vector is None else vector.to(DEVICE))
    return layer


def test_tensors_of_an_order_begin_where_kernels_want_them() -> None:
    """At multiples of 16 bytes for any number of tokens; kernels are compiled once more for others."""
    order = _order([[-1, 0, 0]], [-1], {})
    tensors = [getattr(order, field.name) for field in fields(order)[2:]]
    starts = [one.data_ptr() - order.starts.data_ptr() for one in tensors]
    assert {start % 16 for start in starts} == {0}


@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: version.__name__.rpartition(".")[2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("channels", "taps", "activates"), [(1, 1, False), (70, 4, True), (600, 3, True)])
def test_convolutions_are_those_of_paths(
    version: Version, channels: int, taps: int, activates: bool, dtype: torch.dtype
) -> None:
    conv = nn.Conv1d(channels, channels, taps, groups=channels, bias=taps > 3).to(DEVICE, dtype).requires_grad_(False)
    inputs = numbers((12, 1, channels), 1).to(DEVICE, dtype)
    inputs[11] = torch.nan  # of no path
    paths = torch.randint(-1, 11, (5, taps), generator=torch.Generator().manual_seed(2))
    found = version.convolve(inputs, paths.to(DEVICE), ConvolutionCall(conv.weight, conv.bias, activates=activates))
    taken = torch.where((paths < 0).unsqueeze(2).to(DEVICE), 0.0, inputs[paths.clamp(min=0).to(DEVICE), 0].float())
    wanted = (taken * conv.weight.squeeze(1).T.float()).sum(1) + (0.0 if conv.bias is None else conv.bias.float())
    wanted = wanted.to(dtype)
    wanted = (functional.silu(wanted) if activates else wanted).float()
    rtol = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.002}[dtype]
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=rtol / 10)


@pytest.mark.covering(2)
@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: version.__name__.rpartition(".")[2])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("shape", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recurrences_are_those_of_each_path(
    version: Version, shape: tuple[int, int, int, int], kind: Kind, dtype: torch.dtype
) -> None:
    layer = _there(layer_of(*shape, kind))
    dtype = torch.float32 if kind[1] == "column" else dtype
    mixed, pool = numbers((23, layer.sizes.num_channels), 4), numbers(pool_shape(layer, 5), 6)
    stored = stored_of(layer, kind, 23).to(dtype)
    wanted, states = on_paths(layer, kind, TREES, FIRST_ROWS, mixed, stored, pool)
    pool, untouched = pool.to(DEVICE), pool[3].to(DEVICE)
    found = version.recur(mixed.to(DEVICE), layer.call, _order(TREES, FIRST_ROWS, KEPT), stored.to(DEVICE), pool)
    tolerance = 1e-4 if dtype == torch.float32 else 0.05  # steps are rounded to the type of what is stored
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=tolerance, atol=tolerance)
    for token, row in KEPT.items():
        torch.testing.assert_close(pool[row].cpu().double(), states[token], rtol=tolerance, atol=tolerance)
    assert torch.equal(pool[3], untouched)


@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: version.__name__.rpartition(".")[2])
def test_a_step_that_is_no_number_reaches_the_result(version: Version) -> None:
    """Limits of steps do not hide it, as maxima and minima of a GPU would."""
    layer = _there(layer_of(1, 1, 8, 6, KINDS[1]))
    mixed, stored = numbers((1, layer.sizes.num_channels), 4), torch.full((1, 1, layer.width), torch.nan)
    found = version.recur(mixed.to(DEVICE), layer.call, _order([[-1]], [-1], {}), stored.to(DEVICE), None)
    assert found.isnan().all()


@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: version.__name__.rpartition(".")[2])
def test_a_state_of_another_branch_is_noticed(version: Version) -> None:
    """The known-wrong arm: each token continues from the one before."""
    kind = KINDS[0]
    layer = _there(layer_of(2, 1, 8, 6, kind))
    mixed, stored = numbers((23, layer.sizes.num_channels), 4), stored_of(layer, kind, 23)
    pool = numbers(pool_shape(layer, 5), 6)
    wanted, _ = on_paths(layer, kind, TREES, FIRST_ROWS, mixed, stored, pool)
    order = _order(TREES, FIRST_ROWS, {})
    order = replace(order, origins=torch.full_like(order.origins, -1))
    found = version.recur(mixed.to(DEVICE), layer.call, order, stored.to(DEVICE), pool.to(DEVICE))
    different = (found.cpu().double() - wanted).abs().amax(dim=(1, 2)) > 1e-3
    follows = torch.tensor([parent == i - 1 for tree in TREES for i, parent in enumerate(tree)])
    assert different[~follows].all()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_token_is_the_same_to_the_bit_in_a_chain_and_in_a_tree(kind: Kind) -> None:
    """And in chunks, each of which continues from the state that the one before kept."""
    layer = _there(layer_of(1, 2, 8, 20, kind))
    mixed, stored = numbers((6, layer.sizes.num_channels), 7).to(DEVICE), stored_of(layer, kind, 6).to(DEVICE)
    whole = kernels.recur(mixed, layer.call, _order([range(-1, 5)], [-1], {}), stored, None)
    pool = torch.full(pool_shape(layer, 1), torch.nan, device=DEVICE)
    chunks = []
    for start, end in ((0, 1), (1, 3), (3, 6)):
        order = _order([range(-1, end - start - 1)], [0 if start else -1], {end - start - 1: 0})
        of = torch.arange(start, end, device=DEVICE)
        chunks.append(kernels.recur(mixed[of], layer.call, order, stored[of], pool))
    assert torch.equal(torch.cat(chunks), whole)
    tree = torch.tensor([0, 1, 5, 2, 0, 3, 2, 4], device=DEVICE)  # the chain is a branch
    order = _order([[-1, 0, 1, 1, 0, 3, 5, 5]], [-1], {})
    found = kernels.recur(mixed[tree], layer.call, order, stored[tree], None)
    assert torch.equal(found[[0, 1, 3, 5, 7]], whole[:5])

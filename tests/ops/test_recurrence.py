"""Convolutions and recurrences of every back end equal loops over paths, and a token does not depend on its pass.

Without a GPU Triton's kernels run in its interpreter; with one they are compiled, and their tests are marked `gpu`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from native import ISAS, using
from reference import layers
from reference.recurrences import KINDS, LAYERS, Kind, Layer, layer_of, numbers, on_paths, pool_shape, stored_of
from specinfer.ops.cpu.recurrence import ConvolutionCall, NativeScan
from specinfer.ops.scan_order import ScanOrder

if HAS_TRITON := find_spec("triton") is not None:
    import interpreter as interpreter
    from specinfer.ops.triton import recurrence as kernels

HAS_GPU = torch.cuda.is_available()
CPU, DEVICE = torch.device("cpu"), torch.device("cuda" if HAS_GPU else "cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MARKS = [pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed"), *[pytest.mark.gpu] * HAS_GPU]
TRITON = pytest.param("Triton", marks=_MARKS)


class Pass(NamedTuple):
    """The tokens of a pass, all of which have results.

    Attributes:
        trees: Parents of each request's tokens.
        kept: Rows of the pool by token.
        slots: Slots of the tokens, or None for their numbers.
    """

    trees: Sequence[Sequence[int]]
    first_rows: Sequence[int]
    kept: dict[int, int]
    slots: Sequence[int] | None = None

    def arguments(self) -> tuple[Any, ...]:
        """Arguments of a `NativeScan` and of a `ScanOrder`."""
        count = sum(map(len, self.trees))
        rows = np.full(count, -1)
        rows[list(self.kept)] = list(self.kept.values())
        slots = np.arange(count) if self.slots is None else np.asarray(self.slots)
        trees = [np.asarray(one, dtype=np.int64) for one in self.trees]
        return slots, trees, self.first_rows, rows, np.arange(count), count


# Trees in the orders of levels and of depth, a chain, one token, and trees whose roots follow the first state. Rows are
# kept of the request that reads them or of none.
OWN_ROWS = Pass(
    [[-1, 0, 0, 1, 1, 3, 2, -1], [-1, 0, 1], [-1, -1, 0, 0], [-1], [-1, 0, 1, 1, 0, 4, 5]],
    [0, -1, 2, 3, 1], {0: 0, 10: 4, 12: 2, 22: 1},
)  # fmt: skip
# Requests continue from rows that others write, which native code allows.
CROSSED = Pass(OWN_ROWS.trees, [0, -1, 1, -1, -1], {0: 1, 10: 0, 11: 2})


@dataclass(frozen=True)
class BackEnd:
    """A version of the operations: "reference", "Triton", or an instruction set of the native code."""

    name: str

    @property
    def is_native(self) -> bool:
        return self.name in ISAS

    @property
    def device(self) -> torch.device:
        return DEVICE if self.name == "Triton" else CPU

    def layer(self, *sizes: Any) -> Layer:
        """A layer with its vectors on the device."""
        layer = layer_of(*sizes)
        for name in ("bias", "decay", "skip"):
            vector = getattr(layer.call, name)
            setattr(layer.call, name, None if vector is None else vector.to(self.device))
        return layer

    def convolve(self, inputs: Tensor, paths: Tensor, call: ConvolutionCall) -> Tensor:
        if self.is_native:
            return call(inputs, paths)
        module: Any = kernels if self.name == "Triton" else layers
        found: Tensor = module.convolve(inputs, paths, call)
        return found

    def recur(
        self, layer: Layer, tokens: Pass | ScanOrder, mixed: Tensor, stored: Tensor, pool: Tensor | None
    ) -> Tensor:
        mixed, stored = mixed.to(self.device).clone(), stored.to(self.device)
        if self.is_native:
            assert isinstance(tokens, Pass)
            return layer.call(NativeScan(*tokens.arguments()), mixed, stored, pool)
        order = ScanOrder.from_arrays(*tokens.arguments(), self.device) if isinstance(tokens, Pass) else tokens
        module: Any = kernels if self.name == "Triton" else layers
        found: Tensor = module.recur(mixed, layer.call, order, stored, pool)
        return found


@pytest.fixture(params=["reference", TRITON, *ISAS])
def back_end(request: pytest.FixtureRequest) -> Iterator[BackEnd]:
    if request.param not in ISAS:
        yield BackEnd(request.param)
        return
    for isa in using(request.param):
        yield BackEnd(isa)


to_the_bit = pytest.mark.parametrize("back_end", [TRITON, *ISAS], indirect=True)
on_devices = pytest.mark.parametrize("back_end", ["reference", TRITON], indirect=True)


def test_tensors_of_an_order_begin_where_kernels_want_them() -> None:
    """At multiples of 16 bytes for any number of tokens; kernels are compiled once more for others."""
    order = ScanOrder.from_arrays(*Pass([[-1, 0, 0]], [-1], {}).arguments(), DEVICE)
    tensors = [getattr(order, field.name) for field in fields(order)[2:]]
    starts = [one.data_ptr() - order.starts.data_ptr() for one in tensors]
    assert {start % 16 for start in starts} == {0}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("channels", "taps", "activates"),
    [(1, 1, False), (15, 2, True), (16, 5, False), (33, 3, True), (70, 4, True), (600, 3, True)],
)
def test_convolutions_are_those_of_paths(
    back_end: BackEnd, channels: int, taps: int, activates: bool, dtype: torch.dtype
) -> None:
    device = back_end.device
    conv = nn.Conv1d(channels, channels, taps, groups=channels, bias=taps > 3).to(device, dtype).requires_grad_(False)
    inputs = numbers((12, 1, channels), 1).to(device, dtype)
    inputs[11] = torch.nan  # of no path
    paths = torch.randint(-1, 11, (9, taps), generator=torch.Generator().manual_seed(2)).to(device)
    found = back_end.convolve(inputs, paths, ConvolutionCall(conv.weight, conv.bias, activates=activates))
    taken = torch.where((paths < 0).unsqueeze(2), 0.0, inputs[paths.clamp(min=0), 0].float())
    wanted = (taken * conv.weight.squeeze(1).T.float()).sum(1) + (0.0 if conv.bias is None else conv.bias.float())
    wanted = wanted.to(dtype)
    wanted = (functional.silu(wanted) if activates else wanted).float()
    rtol = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.002}[dtype]
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=rtol / 10)


@pytest.mark.covering(2)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("shape", LAYERS)
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_recurrences_are_those_of_each_path(
    back_end: BackEnd, shape: tuple[int, int, int, int], kind: Kind, dtype: torch.dtype
) -> None:
    layer = back_end.layer(*shape, kind)
    dtype = torch.float32 if kind[1] == "column" else dtype
    mixed, states_before = numbers((23, layer.sizes.num_channels), 4), numbers(pool_shape(layer, 5), 6)
    stored = stored_of(layer_of(*shape, kind), kind, 23).to(dtype)
    tolerance = 1e-4 if dtype == torch.float32 else 0.05  # steps are rounded to the type of what is stored
    for tokens in (OWN_ROWS, CROSSED) if back_end.is_native else (OWN_ROWS,):
        wanted, states = on_paths(
            layer_of(*shape, kind), kind, tokens.trees, tokens.first_rows, mixed, stored, states_before
        )
        pool = states_before.to(back_end.device, copy=True)
        found = back_end.recur(layer, tokens, mixed, stored, pool)
        torch.testing.assert_close(found.cpu().double(), wanted, rtol=tolerance, atol=tolerance)
        for token, row in tokens.kept.items():
            torch.testing.assert_close(pool[row].cpu().double(), states[token], rtol=tolerance, atol=tolerance)
        assert torch.equal(pool[3].cpu(), states_before[3])


@on_devices
def test_a_step_that_is_no_number_reaches_the_result(back_end: BackEnd) -> None:
    """Limits of steps do not hide it, as maxima and minima of a GPU would."""
    layer = back_end.layer(1, 1, 8, 6, KINDS[1])
    mixed, stored = numbers((1, layer.sizes.num_channels), 4), torch.full((1, 1, layer.width), torch.nan)
    assert back_end.recur(layer, Pass([[-1]], [-1], {}), mixed, stored, None).isnan().all()


@on_devices
def test_a_state_of_another_branch_is_noticed(back_end: BackEnd) -> None:
    """The known-wrong arm: each token continues from the one before."""
    kind, sizes = KINDS[0], (2, 1, 8, 6)
    layer, plain = back_end.layer(*sizes, kind), layer_of(*sizes, kind)
    mixed, stored = numbers((23, layer.sizes.num_channels), 4), stored_of(plain, kind, 23)
    pool = numbers(pool_shape(layer, 5), 6)
    wanted, _ = on_paths(plain, kind, OWN_ROWS.trees, OWN_ROWS.first_rows, mixed, stored, pool)
    order = ScanOrder.from_arrays(*OWN_ROWS._replace(kept={}).arguments(), back_end.device)
    order = replace(order, origins=torch.full_like(order.origins, -1))
    found = back_end.recur(layer, order, mixed, stored, pool.to(back_end.device))
    different = (found.cpu().double() - wanted).abs().amax(dim=(1, 2)) > 1e-3
    follows = torch.tensor([parent == i - 1 for tree in OWN_ROWS.trees for i, parent in enumerate(tree)])
    assert different[~follows].all()


@to_the_bit
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_token_is_the_same_to_the_bit_in_any_pass(back_end: BackEnd, kind: Kind) -> None:
    """In a chain, in chunks of it that continue from kept states, and as a branch of a tree next to another request."""
    count, sizes = (20, (2, 2, 16, 40)) if back_end.is_native else (8, (1, 2, 8, 20))
    layer = back_end.layer(*sizes, kind)
    mixed = numbers((count, layer.sizes.num_channels), 7)
    stored = stored_of(layer_of(*sizes, kind), kind, count)

    def recur(tokens: Sequence[int], trees: Sequence[Sequence[int]], **rows: Any) -> Tensor:
        """Steps are stored by token instead of by slot where each number has a decay."""
        order = Pass(trees, slots=tokens, **{"first_rows": [-1] * len(trees), "kept": {}, **rows})
        of = stored[list(tokens)] if kind[1] == "column" else stored
        return back_end.recur(layer, order, mixed[list(tokens)], of, pool)

    pool: Tensor | None = None
    whole = recur(range(count), [range(-1, count - 1)])
    pool = torch.full(pool_shape(layer, 1), torch.nan, device=back_end.device)
    chunks = [
        recur(range(start, start + size), [range(-1, size - 1)], first_rows=[0 if start else -1], kept={size - 1: 0})
        for start, size in ((0, 1), (1, count // 2), (1 + count // 2, count - 1 - count // 2))
    ]
    assert torch.equal(torch.cat(chunks), whole)
    pool, last = None, count - 2
    tokens = [3, 4, 5, *range(last), 5, last, 6, last + 1, 2]
    tree = [*range(-1, last - 1), last - 1, last - 1, last, last + 1, last + 1]
    found = recur(tokens, [[-1, 0, 0], tree])[3:]
    assert torch.equal(found[[*range(last), last + 1, last + 3]], whole)

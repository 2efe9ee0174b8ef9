"""Native linear layers: equal to PyTorch's, whatever the sizes, and the same for a row alone or among others."""

import copy
import shutil

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN

from native_layers import paired_call
from specinfer.core.errors import NativeCodeError
from specinfer.core.tree import TokenTree
from specinfer.model.batch import Piece, pack
from specinfer.model.kv_tensors import KVTensors, LayerShape
from specinfer.ops import (
    GATES,
    AttentionCall,
    Ending,
    LinearCall,
    PackedLinear,
    Panels,
    describe,
    float8,
    library,
    norm,
    pack_linears,
)
from specinfer.ops.cpu import library as native_library
from specinfer.ops.cpu import linear_call
from specinfer.ops.cpu.library import call as call_native
from specinfer.ops.quantization import quantize

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
several_isas = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def _random(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _tolerance(x: Tensor, weight: Tensor) -> Tensor:
    """Of sums of so many products; activations may be rounded to the type of the weights."""
    depth, eps = x.shape[1], torch.finfo(torch.float32).eps
    if weight.dtype == torch.bfloat16:
        eps += torch.finfo(torch.bfloat16).eps / depth
    return eps * depth * (x.double().abs() @ weight.double().abs().T + 1)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")
def test_the_library_is_built_where_there_is_a_compiler() -> None:
    assert describe() != "none"


@several_isas
@given(
    st.integers(1, 45), st.integers(1, 90), st.integers(1, 110), st.booleans(), st.booleans(),
    st.sampled_from(DTYPES), st.integers(0, 99),
)  # fmt: skip
@example(1, 1, 1, True, True, torch.bfloat16, 0)
@example(14, 256, 32, True, True, torch.bfloat16, 0)
@example(15, 257, 33, False, False, torch.float32, 0)
@example(28, 600, 64, True, True, torch.float16, 0)
@example(40, 4_500, 32, True, True, torch.bfloat16, 0)
def test_equal_to_the_product(
    isa: str, rows: int, depth: int, size: int, biased: bool, dots: bool, dtype: torch.dtype, seed: int
) -> None:
    x, weight = _random((rows, depth), seed=seed), _random((size, depth), dtype, seed + 1)
    bias = _random((size,), dtype, seed + 2) if biased else None
    panels = Panels.from_weight(weight, bias)
    assert torch.equal(panels.unpack(), weight)
    call = LinearCall(panels, dots=dots)
    y = call(x)
    exact = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert ((y.double() - exact).abs() <= _tolerance(x, weight)).all()
    for row in range(rows):
        assert torch.equal(call(x[row : row + 1])[0], y[row])
    added = call(x, torch.ones(rows, size), Ending.ADD)
    torch.testing.assert_close(added, y + 1)


@pytest.mark.parametrize("dots", [False, True])
@pytest.mark.parametrize("kind", [*DTYPES, 8, 4], ids=str)
def test_a_call_keeps_to_its_buffer(isa: str, kind: torch.dtype | int, dots: bool) -> None:
    """Behind it lies somebody else's memory."""
    weight = _random((70, 131), torch.float32)
    if isinstance(kind, torch.dtype):
        panels = Panels.from_weight(weight.to(kind))
    else:
        rounded = quantize(weight, 8 if kind == 8 else 4)
        panels = Panels.from_codes(rounded)
    call = LinearCall(panels, dots=dots)
    for rows in (1, 15, 40):
        x, result = _random((rows, 131)), torch.empty(rows, 70)
        scratch = torch.full((rows * call.scratch_floats + 64,), 7.0)
        addresses = (call.address, x.data_ptr(), result.data_ptr(), scratch.data_ptr())
        call_native("specinfer_linear", *addresses, rows, Ending.STORE, None)
        assert (scratch[-64:] == 7.0).all()
        assert (scratch[:-64] != 7.0).float().mean() > 0.9, "and all of it is used"
        assert torch.equal(result, call(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_read_back(dtype: torch.dtype) -> None:
    weight, numbers = _random((70, 33), dtype), torch.tensor([69, 0, 31, 32, 32])
    call = LinearCall(Panels.from_weight(weight))
    assert torch.equal(call.rows(numbers), weight[numbers].float())
    assert call.rows(numbers[:0]).shape == (0, 33)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("activation", GATES)
def test_gates_open_values(isa: str, dtype: torch.dtype, biased: bool, activation: str) -> None:
    """16 gates and 16 values by turns."""
    x, weight = _random((9, 40)), _random((96, 40), torch.float32).div(6).to(dtype)
    bias = _random((96,), dtype) if biased else None
    gates, values = (
        functional.linear(x, weight.float(), None if bias is None else bias.float()).view(9, 3, 2, 16).unbind(2)
    )
    wanted, ending = (ACT2FN[activation](gates) * values).flatten(1), GATES[activation]
    panels = Panels.from_weight(weight, bias)
    for call in (LinearCall(panels), LinearCall(panels, dots=False)):
        torch.testing.assert_close(call(x, None, ending), wanted, rtol=2e-2, atol=5e-2)
        if dtype == torch.float32:
            torch.testing.assert_close(call(x, None, ending), wanted, rtol=1e-4, atol=1e-4)


def test_endings_of_many_rows_are_those_of_few(isa: str) -> None:
    """512 rows are computed at a time, then the others."""
    x = _random((600, 40))
    call = LinearCall(Panels.from_weight(_random((96, 40), torch.float32).div(6).bfloat16()))
    for ending in (Ending.STORE, *GATES.values()):
        assert torch.equal(call(x, None, ending)[-3:], call(x[-3:], None, ending))
    added = call(x, torch.ones(600, 96), Ending.ADD)
    assert torch.equal(added[-3:], call(x[-3:], torch.ones(3, 96), Ending.ADD))


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("ending", Ending)
def test_float32_numbers_that_bfloat16_represents_are_multiplied_as_float32(
    isa: str, rows: int, ending: Ending
) -> None:
    """To the last bit."""
    x, weight = _random((rows, 41)), _random((96, 41), torch.bfloat16, 1)
    narrow, wide = Panels.from_weight(weight), Panels.from_weight(weight.float())
    width = 48 if ending in GATES.values() else 96
    found = LinearCall(narrow, widens=True)(x, torch.ones(rows, width), ending)
    assert torch.equal(found, LinearCall(wide)(x, torch.ones(rows, width), ending))


@pytest.mark.parametrize("activation", GATES)
def test_extreme_gates(isa: str, activation: str) -> None:
    """The exponential has an end on both sides."""
    ends = [-1e15, -200.0, -88.5, -87.0, -10.0, -5.0, -1e-3, 0.0, 1e-3, 5.0, 10.0, 87.0, 200.0, 1e15, torch.nan]
    x = torch.tensor(ends).unsqueeze(1)
    call = LinearCall(Panels.from_weight(torch.ones(32, 1)))
    # In float32 PyTorch's own tanh leaves nothing of the small values on the negative side.
    wanted = (ACT2FN[activation](x.double()) * x).float().expand(-1, 16)
    atol = 1e-30 if activation == "silu" else 1e-13  # nor does float64 far out
    torch.testing.assert_close(call(x, None, GATES[activation]), wanted, rtol=1e-5, atol=atol, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dots", [False, True])
def test_what_is_not_finite_shows(isa: str, dtype: torch.dtype, dots: bool) -> None:
    """In its own row and nowhere else: the engine looks for NaN where it emits a token."""
    x, weight = _random((5, 40)), _random((50, 40), dtype, 1)
    x[1, 3], x[3, 0] = torch.nan, torch.inf
    y = LinearCall(Panels.from_weight(weight), dots=dots)(x)
    wanted = functional.linear(x.double(), weight.double())
    assert torch.equal(y.isnan(), wanted.isnan())
    assert torch.equal(y.isinf(), wanted.isinf())
    clean = LinearCall(Panels.from_weight(weight), dots=dots)(x[:1])
    assert torch.equal(clean[0], y[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_of_a_type(isa: str, dtype: torch.dtype) -> None:
    """All that 16 bits say, but infinities and NaN: weights are finite, as loading makes sure."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    numbers = numbers[numbers.isfinite()].unsqueeze(1)
    y = LinearCall(Panels.from_weight(numbers), dots=False)(torch.ones(1, 1))
    assert torch.equal(y[0], numbers[:, 0].float())


@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize("has_post_norms", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, 20])
def test_a_layer_in_one_call_is_its_parts(isa: str, activation: str, has_post_norms: bool, tokens: int) -> None:
    """As they are called one by one where ranks add up in between."""
    width, heads, dim, opened = 40, 2, 8, 48
    shapes = ((4 * dim, width), (width, heads * dim), (2 * opened, width), (width, opened))
    linears = [LinearCall(Panels.from_weight(_random(shape, seed=i) / 5)) for i, shape in enumerate(shapes)]
    norms = [1 + _random((width,), seed=i) / 5 for i in range(4)]
    post_norms = (norms[2], norms[3]) if has_post_norms else (None, None)
    call = paired_call(tuple(linears), tuple(norms[:2]), 1e-6, post_norms=post_norms, gate=GATES[activation])
    store = KVTensors((LayerShape(1, dim, dim),), tokens, torch.float32, torch.device("cpu"))
    chain, slots = TokenTree.chain(0, range(1, tokens)), torch.arange(tokens).numpy()
    pieces = pack([Piece.from_span([0], chain, slots[:0], slots)], store, torch.device("cpu"), native=True).native
    attention = AttentionCall(store.keys[0], store.values[0], heads, 0.3, rotated=dim)
    x, angles = _random((tokens, width), seed=9), _random((tokens, dim), seed=10)
    arguments = ((attention, None), pieces, angles.cos(), angles.sin())
    whole, parts = x.clone(), x.clone()
    call(*arguments, whole)
    call(*arguments, parts, sum_over_ranks=lambda added: added)
    torch.testing.assert_close(whole, parts, rtol=1e-5, atol=1e-5)
    assert (whole - x).abs().mean() > 0.1


def test_norm(isa: str) -> None:
    for rows, size in ((1, 1), (3, 16), (5, 70), (40, 33)):
        x, weight = _random((rows, size)), _random((size,), seed=1)
        torch.testing.assert_close(norm(x, weight, 1e-5), functional.rms_norm(x, (size,), weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_and_its_replacement(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(40, 70), nn.Linear(70, 33, bias=False)).to(dtype).requires_grad_(False)
    before = copy.deepcopy(model)
    assert pack_linears(model) == 2
    assert all(isinstance(layer, PackedLinear) for layer in model)
    assert all(torch.equal(a.weight, b.weight) for a, b in zip(model, before, strict=True))
    for shape in ((40,), (1, 40), (2, 3, 40), (7, 40), (3, 0, 40), (2, 5, 40)):
        x = _random(shape, dtype, 5)
        torch.testing.assert_close(model(x), before(x), rtol=2e-2, atol=2e-2)
        assert model(x).shape == before(x).shape
    x = _random((4, 80), dtype, 6)[:, ::2]
    torch.testing.assert_close(copy.deepcopy(model)(x), before(x), rtol=2e-2, atol=2e-2)


class _Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_what_stays_as_it_is() -> None:
    for layer in (
        _Doubled(8, 8),
        nn.Linear(8, 8, dtype=torch.float64),
        nn.Linear(8, 8, device="meta"),
        nn.Conv1d(8, 8, 1),
    ):
        assert pack_linears(nn.Sequential(layer)) == 0


@pytest.mark.parametrize(
    ("suffixes", "layout", "reason"), [([".missing"], None, "was not built"), (None, -1, "is of version")]
)
def test_without_the_library_the_package_says_how_to_get_it(
    suffixes: list[str] | None, layout: int | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if suffixes is not None:
        monkeypatch.setattr(native_library, "EXTENSION_SUFFIXES", suffixes)
    if layout is not None:
        monkeypatch.setattr(native_library, "_LAYOUT", layout)
    library.cache_clear()
    try:
        with pytest.raises(NativeCodeError, match=f"{reason}.*install the package again"):
            describe()
    finally:
        library.cache_clear()


@pytest.mark.parametrize(("seconds", "uses"), [((1.0, 2.0), True), ((1.0, 0.9), True), ((1.0, 0.7), False)])
def test_dot_instructions_that_are_clearly_slower_are_not_used(
    seconds: tuple[float, float], uses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_dots = dict(zip((True, False), seconds, strict=True))
    monkeypatch.delenv("SPECINFER_NATIVE")
    monkeypatch.setattr(linear_call, "has_dots", lambda kind: True)
    monkeypatch.setattr(linear_call, "_NUM_LAYERS", 1)
    monkeypatch.setattr(linear_call, "LinearCall", lambda panels, dots: by_dots[dots])
    monkeypatch.setattr(linear_call, "_seconds", lambda layers, x: layers[0])
    linear_call.uses_dots.cache_clear()
    assert linear_call.uses_dots(torch.bfloat16) is uses
    linear_call.uses_dots.cache_clear()


@pytest.mark.parametrize(("code", "is_number"), [(0x7F, False), (0xFF, False), (0x7E, True), (0xFE, True), (0, True)])
def test_codes_of_8_bits_that_are_no_numbers_are_found(code: int, is_number: bool) -> None:
    codes = torch.tensor([[1, 0x80], [code, 0x7E]], dtype=torch.uint8)
    assert float8.has_nan(codes) is not is_number
    assert bool(codes.view(torch.float8_e4m3fn).float().isfinite().all()) is is_number

"""Native linear layers: held equal to PyTorch's, whatever the sizes, and the same for a row alone or among others."""

import copy
import shutil

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from specinfer.kernels import PackedLinear, describe, library, linear, pack_linears
from specinfer.model.load import load_model

DTYPES = (torch.float32, torch.bfloat16)
native = pytest.mark.skipif(library.library() is None, reason="built without a compiler")


def _random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")
def test_the_library_is_built_where_there_is_a_compiler() -> None:
    assert describe() != "none"


@native
@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 45), st.integers(1, 90), st.integers(1, 110), st.booleans(), st.sampled_from(DTYPES),
    st.integers(0, 99),
)  # fmt: skip
@example(1, 1, 1, True, torch.bfloat16, 0)
@example(14, 256, 32, True, torch.bfloat16, 0)
@example(15, 257, 33, False, torch.float32, 0)
@example(28, 600, 64, True, torch.float32, 0)
def test_equal_to_the_product(rows: int, depth: int, size: int, biased: bool, dtype: torch.dtype, seed: int) -> None:
    x, weight = _random((rows, depth), dtype, seed), _random((size, depth), dtype, seed + 1)
    bias = _random((size,), dtype, seed + 2) if biased else None
    packed = library.pack(weight)
    assert torch.equal(library.unpack(packed, size), weight)
    y = library.linear(x, packed, bias, size)
    exact = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    # Sums of so many products, rounded once to the type.
    tolerance = torch.finfo(torch.float32).eps * depth * (x.double().abs() @ weight.double().abs().T + 1)
    tolerance = tolerance + (torch.finfo(dtype).eps * exact.abs() if dtype == torch.bfloat16 else 0)
    assert ((y.double() - exact).abs() <= tolerance).all()
    for row in range(rows):
        assert torch.equal(library.linear(x[row : row + 1], packed, bias, size)[0], y[row])


@native
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_shows(dtype: torch.dtype) -> None:
    """In its own row and nowhere else: the engine looks for NaN where it says a token."""
    x, weight = _random((5, 40), dtype, 0), _random((50, 40), dtype, 1)
    x[1, 3], x[3, 0] = torch.nan, torch.inf
    y = library.linear(x, library.pack(weight), None, 50)
    wanted = functional.linear(x.double(), weight.double())
    assert torch.equal(y.isnan(), wanted.isnan())
    assert torch.equal(y.isinf(), wanted.isinf())
    weight[7, 2] = torch.nan
    assert library.linear(x[:1], library.pack(weight), None, 50).isnan()[0].nonzero().tolist() == [[7]]


@native
def test_bfloat16_is_rounded_as_pytorch_rounds() -> None:
    """Every product of two numbers whose exact result lies anywhere between two that can be stored."""
    x = torch.arange(-300, 300, dtype=torch.float32).unsqueeze(1).to(torch.bfloat16)
    weight = torch.tensor([[1.0], [1.0078125], [-3.140625], [1e30], [1e-30]], dtype=torch.bfloat16)
    wanted = (x.float() @ weight.float().T).to(torch.bfloat16)
    assert torch.equal(library.linear(x, library.pack(weight), None, 5), wanted)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "rows_that_pay", lambda dtype: 6)
    return


@native
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_and_its_replacement(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(40, 70), nn.Linear(70, 33, bias=False)).to(dtype).requires_grad_(False)
    before = copy.deepcopy(model)
    assert pack_linears(model) == 2
    assert all(isinstance(layer, PackedLinear) for layer in model)
    for shape in ((40,), (1, 40), (2, 3, 40), (7, 40), (3, 0, 40), (2, 5, 40)):
        x = _random(shape, dtype, 5)
        torch.testing.assert_close(model(x), before(x), rtol=2e-2, atol=2e-2)
        assert model(x).shape == before(x).shape
    x = _random((4, 80), dtype, 6)[:, ::2]
    torch.testing.assert_close(model(x), before(x), rtol=2e-2, atol=2e-2)


class _Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@native
@pytest.mark.usefixtures("always")
def test_what_stays_as_it_is() -> None:
    for layer in (
        _Doubled(8, 8),
        nn.Linear(8, 8, dtype=torch.float16),
        nn.Linear(8, 8, device="meta"),
        nn.Conv1d(8, 8, 1),
    ):
        assert pack_linears(nn.Sequential(layer)) == 0


def test_without_the_library_models_run_as_pytorch_has_them(
    monkeypatch: pytest.MonkeyPatch, model_folder: object
) -> None:
    monkeypatch.setattr(library, "library", lambda: None)
    loaded = load_model(model_folder("llama"), "auto", torch.device("cpu"))  # type: ignore[operator]
    assert not any(isinstance(module, PackedLinear) for module in loaded.model.modules())
    assert describe() == "none"


@native
def test_rows_that_pay_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    linear.rows_that_pay.cache_clear()
    faster = {1, 4, 8, 16, 32, 64}
    monkeypatch.setattr(linear, "_is_faster", lambda rows, *_, unpacks: rows in faster)
    assert linear.rows_that_pay(torch.float32) == 64
    linear.rows_that_pay.cache_clear()
    faster.discard(8)
    assert linear.rows_that_pay(torch.float32) == 0, "no threshold lies between 4 and 32: for 16 one must not unpack"
    linear.rows_that_pay.cache_clear()

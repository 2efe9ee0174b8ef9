"""Kernels of decoder layers equal their plain versions, and those the plainest ones.

Without a GPU kernels run in Triton's interpreter; with one they are compiled, and these tests are marked `gpu`.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from reference import layers
from specinfer.ops import float8, layer_ops, quantization
from specinfer.ops.quantization import dequantize
from specinfer.ops.quantized_linear import QuantizedLinear
from specinfer.ops.quantized_weight import NEST, QuantizedWeight
from specinfer.ops.routes import Routes
from specinfer.ops.splits import Division, divide, num_parts

pytest.importorskip("triton")
import interpreter as interpreter
from specinfer.ops.triton import few_rows, low_rank, rotary, weights
from specinfer.ops.triton import gate as gates
from specinfer.ops.triton import norm as norms
from specinfer.ops.triton import product as products

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
pytestmark = [pytest.mark.gpu] if HAS_GPU else []
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KINDS = ("int8", "int4", "fp8")


def _random(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def _close(found: Tensor, wanted: Tensor) -> None:
    """But for a last bit, which the order of a sum may flip."""
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    rtol = {torch.float32: 1e-5, torch.bfloat16: 0.01, torch.float16: 0.002}[found.dtype]
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=rtol / 10)


@pytest.mark.parametrize("dtype", DTYPES)
def test_adapters_add_to_their_rows_whatever_the_others_have(dtype: torch.dtype) -> None:
    inputs, outputs, ranks, lora_indices = 70, 150, (0, 3, 0, 20), torch.tensor([1, 0, 3, 2, 1, 3], dtype=torch.int32)
    x, y = _random((len(lora_indices), inputs), 0, dtype), _random((len(lora_indices), outputs), 1, dtype)
    pairs = [
        (_random((rank, inputs), i, dtype), _random((outputs, rank), i + 9, dtype)) if rank else None
        for i, rank in enumerate(ranks)
    ]
    rows = [(0, 0, 0) if pair is None else (pair[0].data_ptr(), pair[1].data_ptr(), len(pair[0])) for pair in pairs]
    places, lora_indices = torch.tensor(rows, device=DEVICE).T.contiguous(), lora_indices.to(DEVICE)
    found, wanted = y.clone(), y.clone()
    low_rank.add_low_rank(found, x, lora_indices, places, 24)
    sizes = y.double().abs()
    for row, pair in enumerate([pairs[slot] for slot in lora_indices.tolist()]):
        if pair is not None:
            wanted[row] += functional.linear(functional.linear(x[row], pair[0]), pair[1])
            down, up = (one.double().abs() for one in pair)
            sizes[row] += functional.linear(functional.linear(x[row].double().abs(), down), up)
    near = {torch.float32: 1e-6, torch.bfloat16: 0.01, torch.float16: 0.002}[dtype]
    others = y.clone()
    layers.add_low_rank(others, x, lora_indices, places, 24)
    assert ((others.double() - wanted.double()).abs() <= near * sizes).all()
    assert ((found.double() - wanted.double()).abs() <= near * sizes).all()
    assert torch.equal(found[[1, 3]], y[[1, 3]])
    alone = y[2:3].clone()
    low_rank.add_low_rank(alone, x[2:3], lora_indices[2:3], places, 24)
    assert torch.equal(alone, found[2:3])


# ------------------------------------------------------------------------------------------------ between products


@settings(max_examples=25)
@given(st.integers(0, 5), st.integers(1, 80), st.booleans(), st.sampled_from(DTYPES), st.integers(0, 99))
@example(1, 1, True, torch.float32, 0)
@example(3, 64, True, torch.bfloat16, 0)
def test_sum_and_norm(tokens: int, width: int, adds: bool, dtype: torch.dtype, seed: int) -> None:
    hidden, weight = _random((tokens, width), seed, dtype), _random((width,), seed + 1, dtype)
    added = _random((tokens, width), seed + 2, dtype) if adds else None
    total = hidden.clone() if added is None else (hidden.float() + added.float()).to(dtype)
    ours, theirs = hidden.clone(), hidden.clone()
    found = norms.add_norm(ours, added, weight, 1e-5)
    wanted = layers.add_norm(theirs, added, weight, 1e-5)
    _close(found, wanted)
    assert torch.equal(ours, total)
    assert torch.equal(theirs, total)
    exact = total.double() / (total.double().pow(2).mean(dim=1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(wanted.double(), exact, rtol=0.02, atol=1e-3)
    out = torch.empty_like(hidden)
    assert norms.add_norm(hidden.clone(), added, weight, 1e-5, out) is out
    _close(out, wanted)
    longer = torch.zeros(tokens, 2 * width + 3, dtype=dtype, device=DEVICE)
    for add_norm in (norms.add_norm, layers.add_norm):
        add_norm(hidden.clone(), added, weight, 1e-5, longer.zero_()[:, width : 2 * width])
        _close(longer[:, width : 2 * width], wanted)
        assert not longer[:, :width].any()
        assert not longer[:, 2 * width :].any()


def _rotated(head: Tensor, position: int, base: float) -> Tensor:
    """[dim] a head whose pairs of numbers, dim / 2 apart, are turned one by one."""
    dim, turned = len(head), head.double().clone()
    for i in range(dim // 2):
        angle = torch.tensor(position * base ** (-2 * i / dim), dtype=torch.float64)
        x, y = head[i].double(), head[i + dim // 2].double()
        turned[i] = x * angle.cos() - y * angle.sin()
        turned[i + dim // 2] = y * angle.cos() + x * angle.sin()
    return turned


def _table(positions: int, dim: int, base: float = 100.0) -> Tensor:
    angles = torch.arange(positions, device=DEVICE).double().unsqueeze(1) * base ** (
        -torch.arange(0, dim, 2, device=DEVICE).double() / dim
    )
    both = torch.cat([angles, angles], dim=1)
    return layer_ops.rotation_table(both.cos().float(), both.sin().float())


@settings(max_examples=25)
@given(
    st.integers(0, 5), st.sampled_from((1, 2, 3)), st.sampled_from((1, 2)), st.sampled_from((2, 8, 12)), st.booleans(),
    st.sampled_from(DTYPES), st.integers(0, 99),
)  # fmt: skip
@example(5, 3, 2, 8, True, torch.float32, 0)
@example(5, 1, 1, 12, False, torch.bfloat16, 0)
@example(3, 2, 2, 8, False, torch.float32, 10)
@example(3, 0, 2, 8, True, torch.float32, 10)  # without queries
def test_rotation_and_store(
    tokens: int, repeats: int, kv_heads: int, dim: int, has_norms: bool, dtype: torch.dtype, seed: int
) -> None:
    heads, source = kv_heads * repeats, torch.Generator().manual_seed(seed)
    qkv = _random((tokens, (heads + 2 * kv_heads) * dim), seed, dtype)
    positions = torch.randint(40, (tokens,), generator=source).to(DEVICE)
    slots = torch.randperm(9, generator=source)[:tokens]
    slots = slots.masked_fill(torch.rand(tokens, generator=source) < 0.3, -1).to(DEVICE)
    weights = (_random((dim,), seed + 1, dtype), _random((dim,), seed + 2, dtype)) if has_norms else None
    pools = [_random((9, kv_heads, dim), seed + 3 + i, dtype) for i in range(2)]
    table, ours, theirs = _table(40, dim), [p.clone() for p in pools], [p.clone() for p in pools]
    found = rotary.rotate_and_store(qkv, positions, table, slots, *ours, weights, 1e-5)
    wanted = layers.rotate_and_store(qkv, positions, table, slots, *theirs, weights, 1e-5)
    _close(found, wanted)
    for mine, its in zip(ours, theirs, strict=True):
        _close(mine, its)
    left = [slot for slot in range(9) if slot not in slots.tolist()]
    assert all(torch.equal(mine[left], pool[left]) for mine, pool in zip(ours, pools, strict=True))
    assert all(torch.equal(its[left], pool[left]) for its, pool in zip(theirs, pools, strict=True))
    if dtype != torch.float32:
        return
    for token, (position, slot) in enumerate(zip(positions.tolist(), slots.tolist(), strict=True)):
        parts = list(qkv[token].unflatten(0, (-1, dim)))
        for head, its in enumerate(parts[: heads + kv_heads]):
            if weights is not None:
                one = weights[0] if head < heads else weights[1]
                its = its / (its.pow(2).mean() + 1e-5).sqrt() * one
            turned = _rotated(its, position, 100.0).float()
            if head < heads:
                torch.testing.assert_close(wanted[token, head], turned, rtol=1e-4, atol=1e-5)
            elif slot >= 0:
                torch.testing.assert_close(theirs[0][slot, head - heads], turned, rtol=1e-4, atol=1e-5)
        if slot >= 0:
            assert torch.equal(theirs[1][slot], torch.stack(parts[heads + kv_heads :]))


@settings(max_examples=15)
@given(st.integers(0, 4), st.integers(1, 70), st.sampled_from(DTYPES), st.integers(0, 99))
@example(2, 1025, torch.float32, 0)
def test_gates(tokens: int, width: int, dtype: torch.dtype, seed: int) -> None:
    gated = _random((tokens, 2 * width), seed, dtype) * 3
    wanted = layers.gate(gated)
    _close(gates.gate(gated), wanted)
    out = torch.empty_like(wanted)
    assert gates.gate(gated, out) is out
    opened, x = gated[:, width:].double(), gated[:, :width].double()
    torch.testing.assert_close(wanted.double(), x * x.sigmoid() * opened, rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "parts"), [(1, 1), (17, 2), (64, 4), (0, 1)])
def test_products_of_few_rows(tokens: int, parts: int, dtype: torch.dtype) -> None:
    rows, weight, bias = _random((tokens, 2048), 0, dtype), _random((64, 2048), 1, dtype), _random((64,), 2, dtype)
    for added in (None, bias):
        found = few_rows.few_rows_product(rows, weight, added, division=Division(64, 128, 4, parts))
        assert found.shape == ((tokens, 64) if parts == 1 else (parts, tokens, 64))
        assert found.dtype == (dtype if parts == 1 else torch.float32)
        exact = layers.few_rows_product(rows.double(), weight.double(), None if added is None else added.double())
        rounding = torch.finfo(dtype).eps / 2 * exact.abs()
        sums = 2**-18 * (rows.double().abs() @ weight.double().abs().T)  # of tensor cores
        assert ((layer_ops.sum_parts(found, dtype).double() - exact).abs() <= rounding + sums).all()
        bound = 0.01 if dtype == torch.bfloat16 else 0.002
        wanted = layers.few_rows_product(rows, weight, added)
        assert (layer_ops.sum_parts(found, dtype) - wanted).norm() <= bound * wanted.norm()


@pytest.mark.parametrize(("tokens", "biased"), [(1, False), (40, True)])
def test_gated_products_of_few_rows(tokens: int, biased: bool) -> None:
    rows, weight = _random((tokens, 256), 0, torch.bfloat16), _random((192, 256), 1, torch.bfloat16) / 16
    bias = _random((192,), 2, torch.bfloat16) if biased else None
    wanted = layers.gated_product(rows, weight, bias)
    torch.testing.assert_close(few_rows.gated_product(rows, weight, bias), wanted, rtol=0.03, atol=0.01)


def test_products_of_few_rows_give_every_multiprocessor_work() -> None:
    hopper = 132
    for num_rows, shape, parts in (
        (1, (6144, 4096), 4), (1, (4096, 4096), 4), (32, (28672, 4096), 1), (32, (4096, 14336), 4),
        (33, (6144, 4096), 2), (64, (4096, 14336), 2), (64, (64, 128), 1), (1, (64, 1024), 2), (1, (128, 8192), 8),
    ):  # fmt: skip
        division = divide(num_rows, *shape, num_cores=hopper)
        assert division.parts == parts
        held = division.stages * division.step * 2 * (division.rows + 64)
        assert held <= (113 if shape[0] > 64 * hopper or num_rows <= 32 else 227) * 1024


ROTATIONS = (rotary.rotate_and_store, layers.rotate_and_store)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parts_of_products_are_summed_by_the_next_kernel(dtype: torch.dtype) -> None:
    parts, hidden, weight = _random((3, 5, 24), 0), _random((5, 24), 1, dtype), _random((24,), 2, dtype)
    whole = layer_ops.sum_parts(parts, dtype)
    for add_norm in (norms.add_norm, layers.add_norm):
        ours, theirs = hidden.clone(), hidden.clone()
        _close(add_norm(ours, parts, weight, 1e-5), layers.add_norm(theirs, whole, weight, 1e-5))
        _close(ours, theirs)
    qkv, slots = _random((2, 5, 4 * 8), 3), torch.arange(5, device=DEVICE)
    pools = [torch.zeros(5, 1, 8, dtype=dtype, device=DEVICE) for _ in range(4)]
    wanted = layers.rotate_and_store(layer_ops.sum_parts(qkv, dtype), slots, _table(9, 8), slots, *pools[:2])
    whole = layer_ops.sum_parts(qkv, torch.float32)
    found = [run(whole, slots, _table(9, 8), slots, *pools[2:], dtype=dtype) for run in ROTATIONS]
    assert [one.dtype for one in found] == [dtype] * 2
    for rotate_and_store in ROTATIONS:
        _close(rotate_and_store(qkv, slots, _table(9, 8), slots, *pools[2:], dtype=dtype), wanted)
        for mine, its in zip(pools[2:], pools[:2], strict=True):
            _close(mine, its)


# ----------------------------------------------------------------------------------------------- rounded weights


def _layer(kind: str, outputs: int, inputs: int, biased: bool, seed: int) -> Any:
    plain = torch.nn.Linear(inputs, outputs, bias=biased, device=DEVICE).requires_grad_(False)
    plain.weight.copy_(_random((outputs, inputs), seed) * 10 ** _random((outputs, 1), seed + 1))
    if biased:
        plain.bias.copy_(_random((outputs,), seed + 2))
    return QuantizedLinear.from_linear(plain, "fp8" if kind == "fp8" else quantization.BITS[kind], native=False)


@settings(max_examples=40)
@given(
    st.sampled_from(KINDS), st.integers(0, 20), st.integers(1, 150), st.integers(1, 80), st.booleans(),
    st.sampled_from(DTYPES), st.integers(0, 99),
)  # fmt: skip
@example("int8", 1, 64, 64, True, torch.bfloat16, 0)
@example("int4", 17, 33, 65, False, torch.bfloat16, 0)
@example("fp8", 33, 129, 65, True, torch.float32, 0)
@example("fp8", 70, 128, 3, True, torch.float16, 1)
def test_products_with_rounded_weights(
    kind: str, rows: int, inputs: int, outputs: int, biased: bool, dtype: torch.dtype, seed: int
) -> None:
    layer, x = _layer(kind, outputs, inputs, biased, seed), _random((rows, inputs), seed + 3, dtype)
    exact = x.double() @ layer.weight.double().T
    size = (x.double().abs() @ layer.weight.double().abs().T).clamp(min=1.0)
    bias = None if layer.bias is None else layer.bias.detach().to(dtype)
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    for product in (products.product, layers.product):
        found = product(x, layer.stored, bias)
        assert (found.shape, found.dtype) == ((rows, outputs), dtype)
        near = {torch.float32: 1e-6, torch.bfloat16: 0.01, torch.float16: 0.002}[dtype]
        assert ((found.double() - exact).abs() <= near * size).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_are_widened(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = _layer(kind, 4, 1100, False, 0)  # more than a program's
    for has_float8 in (True, False):
        found = weights.widen(layer.stored, dtype, has_float8=has_float8)
        assert torch.equal(found, layer.weight.to(dtype))
    x = _random((3, 1100), 1, dtype)
    whole = products.product_of_many(x, layer.stored)
    _close(whole, layers.product(x, layer.stored, None))
    monkeypatch.setattr(products, "_AT_ONCE", 2500)
    out = torch.empty_like(whole)
    assert products.product_of_many(x, layer.stored, out=out) is out
    _close(out, whole)


# Weights as files hold them: bits, inputs of a group, type of the scales, and what there is besides.
STORED: dict[str, tuple[int, int, torch.dtype, tuple[str, ...]]] = {
    "Q4_0": (4, 32, torch.float16, ()),
    "Q4_1": (4, 32, torch.float16, ("added",)),
    "Q5_1": (5, 32, torch.float16, ("added",)),
    "Q8_0": (8, 32, torch.float16, ()),
    "Q4_K": (4, 32, torch.uint8, ("added", "nest")),
    "Q6_K": (6, 16, torch.int8, ("nest",)),
    "IQ4_NL": (4, 32, torch.float16, ("levels",)),
    "IQ4_XS": (4, 32, torch.int8, ("levels", "nest")),
    "MXFP4": (4, 32, torch.bfloat16, ("levels",)),
    "NVFP4": (4, 16, torch.float32, ("levels",)),
    "AWQ": (4, 128, torch.float16, ("zeros",)),
    "GPTQ of 8 bits": (8, 64, torch.float16, ("zeros",)),
    "a channel": (4, 128, torch.bfloat16, ()),
    "FP8 in blocks": (8, 128, torch.float32, ("floats",)),
}


def _stored(name: str, outputs: int, inputs: int, seed: int) -> QuantizedWeight:
    bits, group, dtype, parts = STORED[name]
    source = torch.Generator().manual_seed(seed)
    groups = -(-inputs // group) if "nest" not in parts else -(-inputs // NEST) * (NEST // group)
    shape = (outputs, groups)

    def numbers(kind: torch.dtype) -> Tensor:
        if kind.is_floating_point:
            return (torch.rand(shape, generator=source) / 8 - 1 / 16).to(kind)
        return torch.randint(-128 if kind == torch.int8 else 0, 64, shape, generator=source, dtype=kind)

    codes = torch.randint(0, 1 << bits, (outputs, groups * group), generator=source, dtype=torch.uint8)
    levels = None
    if "floats" in parts:
        levels, codes = float8.LEVELS, codes.masked_fill(codes & 127 == 127, 0)  # no NaN
    elif "levels" in parts:
        levels = torch.randint(-127, 114, (16,), generator=source, dtype=torch.int8)
    nest = torch.randn(outputs, -(-inputs // NEST), 2 if "added" in parts else 1, generator=source).half() / 16
    weight = QuantizedWeight(
        codes, numbers(dtype), bits, inputs, group, levels=levels, nest=nest if "nest" in parts else None,
        added=numbers(dtype) if "added" in parts else None,
        zeros=numbers(torch.uint8) if "zeros" in parts else None,
    ).packed()  # fmt: skip
    layer = QuantizedLinear(weight, None, torch.float32, native=False).to(DEVICE)
    assert torch.equal(layer.stored.unpacked().codes.cpu(), codes)
    return layer.stored


@pytest.mark.parametrize(("name", "dtype"), [(name, DTYPES[i % 3]) for i, name in enumerate(STORED)])
def test_products_with_weights_as_files_hold_them(name: str, dtype: torch.dtype) -> None:
    """Over a last step that is partly filled, unless the files' types have none."""
    outputs, inputs = 5, 2 * NEST if name == "Q4_K" else NEST if "nest" in STORED[name][3] else 140
    weight, bias = _stored(name, outputs, inputs, 1), _random((outputs,), 2, dtype)
    numbers = dequantize(weight)
    assert torch.equal(weights.widen(weight, dtype), numbers.to(dtype))
    near = {torch.float32: 1e-6, torch.bfloat16: 0.01, torch.float16: 0.002}[dtype]
    x = _random((18, inputs), 3, dtype)
    exact = x.double() @ numbers.double().T + bias.double()
    size = x.double().abs() @ numbers.double().abs().T + bias.double().abs()
    for found in (products.product(x, weight, bias, parts=2), layers.product(x, weight, bias)):
        assert (found.shape, found.dtype) == ((18, outputs), dtype)
        assert ((found.double() - exact).abs() <= near * size).all()


@pytest.mark.parametrize("name", [name for name, (bits, *_) in STORED.items() if bits == 4])
def test_products_in_the_order_that_hopper_gpus_multiply_in(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs, inputs = 5, 2 * NEST if name == "Q4_K" else NEST if "nest" in STORED[name][3] else 140
    weight = _stored(name, outputs, inputs, 1)
    x = _random((18, inputs), 3, torch.bfloat16)
    wanted = products.product(x, weight)
    others = not products.in_fours(x)
    monkeypatch.setattr(products, "in_fours", lambda _: others)
    _close(products.product(x, weight), wanted)


@pytest.mark.covering(1)
@pytest.mark.parametrize(("name", "dtype"), [(name, DTYPES[i % 3]) for i, name in enumerate([*STORED, *KINDS])])
@pytest.mark.parametrize("tokens", [3, 1, 40])
def test_products_with_the_weights_of_the_experts_that_rows_are_routed_to(
    name: str, dtype: torch.dtype, tokens: int
) -> None:
    """Some experts have no rows, some rows no second expert, and with many rows an expert has several blocks."""
    count, outputs = 5, 7
    inputs = 2 * NEST if name == "Q4_K" else NEST if name in STORED and "nest" in STORED[name][3] else 140
    if name == "fp8":
        weight = float8.quantize(_random((count * outputs, inputs), 1))
    elif name in KINDS:
        weight = _layer(name, count * outputs, inputs, False, 1).stored
    else:
        weight = _stored(name, count * outputs, inputs, 1)
    bias, numbers = _random((count * outputs,), 2, dtype), dequantize(weight).double().view(count, outputs, inputs)
    chosen = torch.randint(4, (tokens, 2), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    chosen[-1, 1] = count
    routes = Routes.from_experts(chosen, count, dtype)
    x = _random((tokens, inputs), 4, dtype)
    near = {torch.float32: 1e-6, torch.bfloat16: 0.01, torch.float16: 0.002}[dtype]
    for each, rows in ((2, x), (1, x.repeat_interleave(2, dim=0))):
        kernel = products.routed_product(rows, weight, routes, each, bias)
        plain = layers.routed_product(rows, weight, routes, each, bias)
        for found in (kernel, plain):
            assert (found.shape, found.dtype) == ((2 * tokens, outputs), dtype)
            assert not found[-1].any()
            for pair, expert in enumerate(chosen.flatten().tolist()[:-1]):
                row = rows[pair // each].double()
                exact = numbers[expert] @ row + bias.double().view(count, -1)[expert]
                size = numbers[expert].abs() @ row.abs() + bias.double().abs().view(count, -1)[expert]
                assert ((found[pair].double() - exact).abs() <= near * size).all()


@pytest.mark.parametrize("tokens", [1, 5, 300])
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_routes_have_every_pair_once_in_a_block_of_its_expert(tokens: int, dtype: torch.dtype) -> None:
    chosen = torch.randint(9, (tokens, 3), generator=torch.Generator().manual_seed(tokens)).to(DEVICE)  # 8 for none
    routes = Routes.from_experts(chosen, 8, dtype)
    assert len(routes.pairs) == routes.size * len(routes.experts)
    own = routes.experts.repeat_interleave(routes.size)
    there = routes.pairs < routes.num_pairs
    assert torch.equal(routes.pairs[there].sort().values.cpu(), torch.arange(3 * tokens))
    assert torch.equal(chosen.flatten()[routes.pairs[there]], own[there])


def test_groups_with_equal_numbers_become_one() -> None:
    weight = _stored("AWQ", 6, 512, 0)
    spread = replace(
        weight, group=32,
        **{name: getattr(weight, name).repeat_interleave(4, dim=1) for name in ("scales", "zeros")},
    )  # fmt: skip
    assert spread.merged().group_size == 128
    assert torch.equal(spread.merged().scales, weight.scales)
    assert torch.equal(dequantize(spread.merged()), dequantize(weight))
    spread.zeros[2, 1] += 1
    assert spread.merged().group_size == 32
    assert _stored("Q4_K", 6, 512, 0).merged().group_size == 32


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parts", [2, 4, 8])
def test_inputs_that_are_split(kind: str, parts: int) -> None:
    """Into more parts than there is work for, too."""
    layer, x = _layer(kind, 70, 300, True, 0), _random((5, 300), 1)
    whole = products.product(x, layer.stored, layer.bias)
    found = products.product(x, layer.stored, layer.bias, parts=parts)
    torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-4)
    out = torch.empty_like(found)
    assert products.product(x, layer.stored, layer.bias, out, parts=parts) is out
    assert torch.equal(out, found)


def test_how_many_parts() -> None:
    """Small layers fill the device; what a program has to do stays worth its while."""
    assert num_parts(4096, 64 * 264, 128) == 1
    assert num_parts(4096, 64 * 132, 128) == 2
    assert num_parts(14336, 4096, 128) == 8
    assert num_parts(256, 64, 64) == 1
    assert num_parts(2**20, 64, 64) == 16


def test_every_code_is_widened_to_what_it_stands_for() -> None:
    """By the device's instruction and without it: a row of ones that are one at a time."""
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    codes = codes[codes.view(float8.CODES).float().isfinite()]
    weight, x = torch.stack([codes.roll(i) for i in range(3)]), torch.eye(len(codes), device=DEVICE)
    wanted = weight.view(float8.CODES).float().T
    for has_float8 in (False, True):
        ones, size = torch.ones(3, 1, device=DEVICE), len(codes)
        stored = QuantizedWeight(weight, ones, 8, size, size, levels=float8.LEVELS)
        assert torch.equal(products.product(x, stored, has_float8=has_float8), wanted)


def test_many_rows_are_not_widened_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(layer_ops, "product", lambda *_: called.append("kernel"))
    monkeypatch.setattr(layer_ops, "product_of_many", lambda *_: called.append("many"))
    for rows in (1, layer_ops.MAX_ROWS, layer_ops.MAX_ROWS + 1):
        layer_ops.quantized_product(torch.zeros(rows, 4), QuantizedWeight(torch.zeros(2, 4), torch.ones(2, 1), 8, 4, 4))
    assert called == ["kernel", "kernel", "many"]


# ------------------------------------------------------------------------------------------------------- e4m3


@settings(max_examples=40)
@given(st.integers(1, 30), st.integers(1, 90), st.integers(0, 99))
@example(1, 1, 0)
def test_floating_point_of_8_bits_is_near(outputs: int, inputs: int, seed: int) -> None:
    weight = _random((outputs, inputs), seed) * 10 ** _random((outputs, 1), seed + 1)
    rounded = float8.quantize(weight)
    assert (rounded.codes.shape, rounded.codes.dtype) == (weight.shape, torch.uint8)
    assert (rounded.scales.shape, rounded.scales.dtype) == ((outputs, 1), torch.float32)
    found, largest = dequantize(rounded), weight.abs().amax(dim=1, keepdim=True)
    # Three bits of mantissa; below the smallest normal number, 2 ** -6 of 448, steps are all alike.
    assert ((found - weight).abs() <= (weight.abs() / 15.9).clamp(min=largest * 2**-6 / 448 / 15.9)).all()
    torch.testing.assert_close(found.abs().amax(dim=1), largest.squeeze(1), rtol=1e-6, atol=0)


def test_extreme_weights_of_floating_point(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in DTYPES:
        weight = torch.zeros((5, 40), dtype=dtype)
        weight[1, 3] = torch.finfo(dtype).tiny
        weight[2] = torch.finfo(dtype).max
        weight[3, ::2] = -torch.finfo(dtype).max / 3
        weight[4, 7], weight[4, 8] = 1.0, 1e-4
        rounded = float8.quantize(weight)
        found = dequantize(rounded)
        assert found.isfinite().all()
        assert (rounded.scales > 0).all()
        assert not found[0].any()
        torch.testing.assert_close(found[2:4], weight[2:4].float(), rtol=1e-6, atol=0)
        with monkeypatch.context() as patch:
            patch.setattr(float8, "_AT_ONCE", 50)
            pieces = float8.quantize(weight)
        assert torch.equal(pieces.codes, rounded.codes)
        assert torch.equal(pieces.scales, rounded.scales)
    meta = float8.quantize(torch.empty(4, 6, device="meta"))
    assert (meta.codes.shape, meta.scales.shape, meta.codes.is_meta) == ((4, 6), (4, 1), True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("biased", [False, True])
def test_layers_side_by_side(kind: str, biased: bool) -> None:
    """What is joined computes what its parts do."""
    layers = [_layer(kind, outputs, 40, biased, outputs) for outputs in (6, 3, 11)]
    x = _random((2, 3, 40), 1)
    joined = type(layers[0]).joined(layers)
    torch.testing.assert_close(joined(x), torch.cat([layer(x) for layer in layers], dim=-1), rtol=1e-5, atol=1e-4)
    assert torch.equal(joined.weight, torch.cat([layer.weight for layer in layers]))

"""Kernels in a fixed order: the same bits for a row among any others, and launches that nothing else decides about."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from interpreter import interpreted
from one_order import launches
from one_order import one_order as one_order
from specinfer.core.tree import TokenTree
from specinfer.ops import float8, quantization
from specinfer.ops.fixed_order import fixed_order, is_fixed
from specinfer.ops.kv_types import KVScales
from specinfer.ops.quantized_weight import QuantizedWeight
from specinfer.ops.routes import Routes
from specinfer.ops.triton import attention, fixed_attention
from specinfer.ops.triton.gate import gate
from specinfer.ops.triton.norm import add_norm
from specinfer.ops.triton.product import product, routed_product
from specinfer.ops.triton.row_sum import row_sum
from tiny import quick
from tree_cases import AttentionCase, Part, wide

pytestmark = [interpreted, pytest.mark.usefixtures("one_order")]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
COUNTS = (1, 2, 7, 16, 64, 300)
ROOT = TokenTree.root(1)
INPUTS, OUTPUTS, EXPERTS = 576, 40, 3


@pytest.fixture(autouse=True)
def _in_order() -> Iterator[None]:
    with fixed_order():
        yield
    assert not is_fixed()


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _weight(kind: str, dtype: torch.dtype, outputs: int = OUTPUTS) -> Tensor | QuantizedWeight:
    numbers = _random(outputs, INPUTS, seed=3)
    if kind == "numbers":
        return numbers.to(dtype)
    return (
        float8.quantize(numbers)
        if kind == "fp8"
        else quantization.quantize(numbers, 8 if kind == "int8" else 4).packed()
    )


def check_rows(compute: Callable[[Tensor], Tensor], rows: Tensor, counts: tuple[int, ...] = COUNTS) -> None:
    """Check that some of the rows, at any place and beside others, have the bits that they have among all of them."""
    launches.clear()
    whole = compute(rows)
    deciding = {launch.deciding() for launch in launches}
    for count in counts:
        for first in {0, min(5, len(rows) - count), len(rows) - count}:
            chosen = slice(first, first + count)
            assert torch.equal(compute(rows[chosen].clone()), whole[chosen]), f"{count} rows from {first} on"
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))
    assert torch.equal(compute(rows[order]), whole[order])
    assert {launch.deciding() for launch in launches} == deciding, "the number of rows decides about the order of sums"


@pytest.mark.parametrize("kind", quick(["numbers", "int8", "int4", "fp8"], "numbers", "int4"))
@pytest.mark.parametrize("dtype", quick(DTYPES, "bfloat16"))
def test_products(dtype: str, kind: str) -> None:
    weight, bias = _weight(kind, DTYPES[dtype]), _random(OUTPUTS, dtype=DTYPES[dtype])
    check_rows(lambda rows: product(rows, weight, bias), _random(300, INPUTS, dtype=DTYPES[dtype]))


@pytest.mark.parametrize("kind", quick(["numbers", "int4"], "numbers"))
@pytest.mark.parametrize("dtype", quick(DTYPES, "bfloat16"))
def test_experts(dtype: str, kind: str) -> None:
    """Rows with the same numbers have the same experts."""
    weight = _weight(kind, DTYPES[dtype], EXPERTS * OUTPUTS)

    def compute(rows: Tensor) -> Tensor:
        chosen = (rows[:, :2].float() * 64).long().abs() % EXPERTS
        routes = Routes.from_experts(chosen, EXPERTS, rows.dtype)
        return routed_product(rows, weight, routes, 2).unflatten(0, (-1, 2))

    check_rows(compute, _random(140, INPUTS, dtype=DTYPES[dtype]), (1, 2, 7, 16, 64))


@pytest.mark.parametrize("dtype", quick(DTYPES, "bfloat16"))
def test_norms_gates_and_sums(dtype: str) -> None:
    rows, weight = _random(70, 96, dtype=DTYPES[dtype]), _random(96, dtype=DTYPES[dtype])
    check_rows(lambda x: add_norm(x.clone(), x, weight, 1e-5), rows, (1, 2, 7, 16, 64))
    check_rows(gate, rows, (1, 2, 7, 16, 64))
    check_rows(row_sum, rows, (1, 2, 7, 16, 64))


# A chain of 139 tokens. Whatever it is cut into, each of its tokens attends to the same keys.
_LENGTH = 139


class Text:
    """A text with numbers of its own for queries, keys and values, in a cache of some type."""

    def __init__(self, dtype: torch.dtype, pool: torch.dtype | None) -> None:
        self.case = AttentionCase([Part(0, _LENGTH, ROOT)], dtype=dtype, padding=(0, 0))
        self.slots = self.case.layout.node_slots[0, :_LENGTH].clone()
        self.query = self.case.query.clone()
        if pool is not None:
            self.case.store_as(pool, KVScales(0.25, 0.5))

    def attend(self, parts: list[tuple[int, TokenTree, list[int]]], *, is_chain: bool, **features: Any) -> list[Tensor]:
        """Return the results of each request: its known tokens, and a tree whose nodes are tokens of the text.

        Nodes of -1 are others.
        """
        parted = AttentionCase(
            [Part(known, 1, tree) for known, tree, _ in parts], dtype=self.query.dtype, is_chain=is_chain
        )
        layout, case = parted.layout, self.case
        keys, values = (torch.cat([pool, pool[1:9]]) for pool in (case.keys, case.values))  # for the other nodes
        queries = parted.query
        for i, (known, _, nodes) in enumerate(parts):
            layout.slot_table[i, :known] = self.slots[:known]
            start = int(layout.starts[i])
            for node, place in enumerate(nodes):
                layout.node_slots[i, node] = self.slots[place] if place >= 0 else len(case.keys) + node % 8
                queries[start + node] = self.query[place] if place >= 0 else 1.0
        scales = {"scale": case.scale * case.scales.key, "value_scale": case.scales.value}
        out = attention.attend(queries, keys, values, layout, **scales, **features)
        return [out[int(layout.starts[i]) : int(layout.starts[i + 1])] for i in range(len(parts))]


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window, soft cap, sinks and slopes": {
        "window": 70, "softcap": 20.0, "sinks": torch.linspace(-1, 1, 4),
        "key_bias": torch.linspace(0, 0.3, 4)[:, None] * torch.arange(400),
    },
}  # fmt: skip
CACHES = ("float32", "bfloat16", "float16", "bfloat16 in float8_e4m3fn", "bfloat16 in float8_e5m2")


@pytest.mark.parametrize("features", quick(FEATURES, "plain"))
@pytest.mark.parametrize("cache", quick(CACHES, "bfloat16 in float8_e4m3fn"))
def test_attention(cache: str, features: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last three tokens of a text: in a prompt, alone, in a tree beside others, and in trees that cross a part."""
    monkeypatch.setattr(fixed_attention, "_PART", 64)
    dtype, _, pool = cache.partition(" in ")
    text, given = Text(DTYPES[dtype], getattr(torch, pool) if pool else None), FEATURES[features]

    def chain(first: int, last: int) -> tuple[int, TokenTree, list[int]]:
        count = last - first
        return first, TokenTree(tuple(range(count)), tuple(range(-1, count - 1))), list(range(first, last))

    launches.clear()
    (whole,) = text.attend([chain(0, _LENGTH)], is_chain=True, **given)
    (split,) = _attend_split(text, [chain(0, _LENGTH)], monkeypatch, **given)
    assert torch.equal(split, whole), "a program for each part, or one that folds them"
    for first in (100, 128, 138):
        (some,) = text.attend([chain(first, _LENGTH)], is_chain=True, **given)
        assert torch.equal(some, whole[first:])
    #  125 ─ 126 ─ 127 ─ 128, with others before and between them
    tree = TokenTree(tuple(range(9)), (-1, 0, 0, 2, 2, 4, 4, 6, 7))
    nodes = [125, -1, 126, -1, 127, -1, 128, -1, -1]
    tree_of_many, alone = text.attend([(125, tree, nodes), (20, wide(3), [20, -1, 21, -1])], is_chain=False, **given)
    for node, place in enumerate(nodes):
        assert place < 0 or torch.equal(tree_of_many[node], whole[place]), place
    assert torch.equal(alone[[0, 2]], whole[[20, 21]])
    attends = [launch for launch in launches if launch.kernel in ("shared_parts_program", "finish_program")]
    alike = {name for launch in attends for name, _ in launch.deciding()[1]}
    for name in ("ROWS", "KEYS", "PART", "num_warps", "num_stages", "enable_fp_fusion"):
        assert name not in alike or len({launch.numbers[name] for launch in attends}) == 1, name


def _attend_split(text: Text, parts: Any, monkeypatch: pytest.MonkeyPatch, **features: Any) -> list[Tensor]:
    right = attention.attend_in_order
    with monkeypatch.context() as patch:
        patch.setattr(attention, "attend_in_order", lambda *args, **options: right(*args, **options, is_split=True))
        return text.attend(parts, is_chain=True, **features)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["rows of a tile", "parts of a product"])
def test_these_tests_fail_for_orders_that_depend_on_the_number_of_rows(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = _weight("numbers", torch.bfloat16)

    def compute(rows: Tensor) -> Tensor:
        return product(rows, weight, parts=1 if len(rows) < 10 else 2)

    if wrong == "rows of a tile":
        monkeypatch.setattr("specinfer.ops.triton.product.block_of", lambda rows, *_, **__: 16 if rows < 10 else 64)
        compute = lambda rows: product(rows, weight)  # noqa: E731
    with pytest.raises(AssertionError):
        check_rows(compute, _random(70, INPUTS, dtype=torch.bfloat16), (1, 16))

"""Additions of adapters to linear layers: equal to their products, row by row, and nothing to rows without one."""

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from specinfer.ops import (
    GATES,
    AdapterRuns,
    AdapterSlots,
    AdapterTable,
    Ending,
    LinearCall,
    LowRank,
    Panels,
    quantize,
)

several_isas = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _adapter(inputs: int, outputs: int, rank: int, seed: int) -> tuple[Tensor, Tensor]:
    return _random(rank, inputs, seed=seed), _random(outputs, rank, seed=seed + 1)


def _table(matrices: tuple[Tensor, Tensor] | None) -> AdapterTable:
    """An adapter of a model with three linear layers, whose last is changed."""
    return AdapterTable([None, None, None if matrices is None else LowRank.from_matrices(*matrices)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@several_isas
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 3)), min_size=1, max_size=6),
    st.integers(1, 90), st.integers(1, 110), st.lists(st.integers(1, 9), min_size=3, max_size=3), st.integers(0, 99),
)  # fmt: skip
@example([(1, 0), (15, 1), (3, 0), (2, 2), (1, 3)], 65, 96, [1, 4, 9], 0)
def test_each_row_gets_the_product_of_its_adapter(
    isa: str,
    dtype: torch.dtype,
    requests: list[tuple[int, int]],
    inputs: int,
    outputs: int,
    ranks: list[int],
    seed: int,
) -> None:
    """Adapter 0 is none; the call alone adds the same as the call within a linear layer, and a row alone the same."""
    made = (_adapter(inputs, outputs, rank, seed + i) for i, rank in enumerate(ranks))
    adapters = [None, *((down.to(dtype), up.to(dtype)) for down, up in made)]
    tables = [None if one is None else _table(one) for one in adapters]
    counts, rows = [count for count, _ in requests], sum(count for count, _ in requests)
    x, weight = _random(rows, inputs, seed=seed), _random(outputs, inputs, seed=seed + 1)
    call = LinearCall(Panels.from_weight(weight))
    call.number = 2
    plain, runs = call(x), AdapterRuns.from_requests(counts, [tables[i] for _, i in requests])
    y = call(x, runs=runs)
    start = 0
    for count, i in requests:
        part, one = slice(start, start + count), adapters[i]
        start += count
        if one is None:
            assert torch.equal(y[part], plain[part])
            continue
        exact = x[part].double() @ (weight.double() + one[1].double() @ one[0].double()).T
        torch.testing.assert_close(y[part].double(), exact, rtol=1e-4, atol=1e-3)
        alone = AdapterRuns.from_requests([1], [tables[i]])
        assert torch.equal(call(x[part][:1].contiguous(), runs=alone)[0], y[part][0])
    if runs is not None:
        added = torch.zeros(rows, outputs)
        runs.add(2, x, added)
        torch.testing.assert_close(plain + added, y, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("ending", [Ending.ADD, *GATES.values()])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, 8, 4], ids=str)
def test_adapters_come_before_the_end_of_a_layer_of_any_type(isa: str, kind: torch.dtype | int, ending: Ending) -> None:
    weight, x = _random(96, 64, seed=1), _random(5, 64, seed=2)
    down, up = _adapter(64, 96, 6, 3)
    if isinstance(kind, int):
        rounded = quantize(weight, 8 if kind == 8 else 4)
        call = LinearCall(Panels.from_codes(rounded))
    else:
        call = LinearCall(Panels.from_weight(weight.to(kind)))
    call.number = 2
    runs = AdapterRuns.from_requests([2, 3], [None, _table((down, up))])
    before = torch.ones(5, 96 if ending == Ending.ADD else 48)
    y = call(x, before.clone(), ending, runs)
    sums = call(x)
    sums[2:] += x[2:] @ down.T @ up.T
    if ending == Ending.ADD:
        expected = sums + 1
    else:
        gates, values = sums.unflatten(1, (-1, 2, 16)).unbind(2)
        opened = (
            gates * gates.sigmoid() if ending == Ending.GATED else torch.nn.functional.gelu(gates, approximate="tanh")
        )
        expected = (opened * values).flatten(1)
    torch.testing.assert_close(y, expected, rtol=1e-3, atol=1e-3)
    assert torch.equal(y[:2], call(x, before.clone(), ending)[:2])


def test_a_layer_that_no_adapter_changes_stays_as_it_is(isa: str) -> None:
    call, x = LinearCall(Panels.from_weight(_random(40, 30))), _random(4, 30, seed=1)
    call.number = 2
    assert torch.equal(call(x, runs=AdapterRuns.from_requests([4], [_table(None)])), call(x))


def test_slots_are_given_to_adapters_of_a_pass_and_taken_from_those_unused_longest() -> None:
    first, second, third = (AdapterTable([LowRank(torch.ones(i, 2), torch.ones(4, i)), None]) for i in (1, 2, 3))
    slots = AdapterSlots(2, 2, 3, torch.device("cpu"))
    assert slots.place([first, None, second, first]) == [1, 0, 2, 1]
    assert slots.place([second, first]) == [2, 1]
    assert slots.place([third, first]) in ([2, 1], [1, 2])
    assert slots.place([first, second, third]) is None
    kept = slots.place([third])
    assert kept is not None
    assert slots.tables[kept[0]] is third
    assert third.layers[0] is not None
    assert slots.places[0, :, kept[0]].tolist() == [third.layers[0].down.data_ptr(), third.layers[0].up.data_ptr(), 3]
    assert not slots.places[1].any()
    assert not slots.places[:, :, 0].any()

"""The optimiser: the alternatives with the most tokens per second for a whole batch."""

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specinfer.policy.cost_model import CostModel
from specinfer.policy.curves import Curve
from specinfer.policy.optimizer import ExpectedYield, choose_each
from tests.policy.simulated_machines import slow_target_costs

COSTS = slow_target_costs()


def test_the_worked_example_of_the_module() -> None:
    costs = CostModel(Curve((1, 11), (1.0, 2.0)), Curve([1], [0.0]))
    tokens, nodes = np.array([[1.0, 2.8], [1.0, 1.1]]), np.array([[0.0, 2.0]] * 2)
    expected = ExpectedYield(tokens, nodes, np.zeros((2, 2)))
    assert expected.together().rates(costs, 2).tolist() == pytest.approx([2 / 1.1, 3.9 / 1.5])
    assert choose_each(expected, costs).tolist() == [1, 0]
    assert float(expected[[0, 1], [1, 0]].together().rates(costs, 2)) == pytest.approx(3.8 / 1.3)


def _rate(expected: ExpectedYield, chosen: Sequence[int], costs: CostModel) -> float:
    """Tokens per second of these choices, request by request."""
    places = list(enumerate(chosen))
    nodes = sum(expected.nodes[place] for place in places)
    deepest = max(expected.levels[place] for place in places)
    level = float(costs.draft_level(nodes / max(deepest, 1.0)))
    seconds = float(costs.target(len(places) + nodes)) + deepest * level + costs.rest
    return float(sum(expected.tokens[place] for place in places) / seconds)


@given(st.integers(1, 3), st.integers(0, 10**6))
def test_the_choice_is_no_worse_than_any_for_all_and_near_the_best(num_requests: int, seed: int) -> None:
    source = np.random.default_rng(seed)
    shape = (num_requests, 5)
    nodes = source.uniform(0, 30, shape)
    expected = ExpectedYield(1 + source.uniform(0, 6, shape), nodes, source.uniform(0, 8, shape))
    for values, off in ((expected.tokens, 1.0), (expected.nodes, 0.0), (expected.levels, 0.0)):
        values[:, 0] = off
    chosen = choose_each(expected, COSTS).tolist()
    got = _rate(expected, chosen, COSTS)
    alike = max(_rate(expected, [one] * num_requests, COSTS) for one in range(5))
    best = max(_rate(expected, every, COSTS) for every in product(range(5), repeat=num_requests))
    assert alike - 1e-9 <= got <= best + 1e-9
    assert got >= 0.8 * best


def test_a_request_that_is_easy_to_guess_for_gets_more_than_its_neighbour() -> None:
    expected = ExpectedYield(
        np.array([[1.0, 4.0, 14.0], [1.0, 1.2, 1.25]]), np.array([[0.0, 7, 31]] * 2), np.array([[0.0, 0, 0]] * 2)
    )
    easy, hard = choose_each(expected, COSTS).tolist()
    assert easy == 2
    assert hard < 2

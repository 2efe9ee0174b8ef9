"""The choice by ranks: the tree size with the most tokens per second, and how requests share the nodes."""

import pytest

from specinfer.core.tree import OFF
from specinfer.drafters.sparse_context import num_to_read
from specinfer.policy.acceptance import AcceptanceModel
from specinfer.policy.cost_model import CostModel
from specinfer.policy.curves import Curve
from specinfer.policy.rank_choice import RankChoice, TreeSizes
from tests.policy.simulated_machines import GROWING, bent_costs, make_costs, make_span


def _optimizer(costs: CostModel) -> RankChoice:
    return RankChoice(costs, AcceptanceModel())


def test_the_worked_example_of_the_module() -> None:
    costs = CostModel(Curve([1, 5], [1.0, 1.4]), Curve([1, 5], [0.1, 0.1]))
    optimizer = RankChoice(costs, AcceptanceModel.assumed((0.5, 0.25)), TreeSizes((1, 2, 3), (1, 2)))
    sizes = list(zip(optimizer.sizes.num_nodes.tolist(), optimizer.sizes.num_levels.tolist(), strict=True))
    rates = dict(zip(sizes, optimizer.rates(1).round(2).tolist(), strict=True))
    assert [rates[size] for size in ((0, 0), (1, 1), (2, 1), (3, 2))] == [1.0, 1.25, 1.35, 1.33]
    assert max(rates, key=rates.__getitem__) == (2, 1)
    budget = optimizer.choose(1)
    assert (budget.max_nodes, budget.max_depth) == (3, 2), "an easy request may have more than the average"
    assert budget.min_path_prob == pytest.approx(1.75 / 1.3 * 0.1)


@pytest.mark.parametrize("num_requests", [1, 16])
def test_reading_a_prompt_is_paid_by_the_time_that_one_request_saves_the_batch(num_requests: int) -> None:
    """All requests wait for it, and together they save what the step becomes shorter for its tokens."""
    costs = make_costs()
    optimizer = _optimizer(costs)
    optimizer.choose(num_requests)
    rates = optimizer.rates(num_requests)
    span = make_span(length=200, max_tokens=100)
    break_even = (1 / rates[0] - 1 / rates.max()) * 100 / 200  # seconds for each token of the prompt
    for factor, pays in ((0.9, True), (1.1, False)):
        costs.read_token = factor * break_even
        assert optimizer.pays_to_read(span.request, num_requests) is pays


@pytest.mark.parametrize("window", [None, 512])
def test_reading_a_long_prompt_is_put_off_until_the_output_is_long_enough_to_repay_it(window: int | None) -> None:
    """It is taken to go on for as many tokens as it has; how many it may have counts only where that is less."""
    costs = make_costs(read_token=0.1)
    costs.window = window
    optimizer = _optimizer(costs)
    optimizer.choose(1)
    rates = optimizer.rates(1)
    saved = 1 / rates[0] - 1 / rates.max()
    num_read = num_to_read(6000, 0, window)
    assert num_read == 6000 or 512 <= num_read + 64 < 1024
    pays = [
        optimizer.pays_to_read(make_span(num_output, 10_000, 6000 - num_output).request, 1)
        for num_output in (1, int(0.95 * 0.1 * num_read / saved), int(1.05 * 0.1 * num_read / saved))
    ]
    assert pays == ([True, True, True] if window else [False, False, True])
    assert not optimizer.pays_to_read(make_span(length=6000, max_tokens=10).request, 1)


@pytest.mark.parametrize("num_guessed", [0, 3], ids=["without drafts", "with drafts in vain"])
def test_a_long_reading_waits_for_lookups_which_may_copy_the_prompt_and_a_short_one_does_not(num_guessed: int) -> None:
    costs = make_costs(read_token=0.01)  # seconds, and a pass takes one
    optimizer = _optimizer(costs)
    optimizer.choose(1)
    passes_until_read = []
    for length in (100, 290, 1500):
        request = make_span(1, 10_000, length).request
        assert optimizer.pays_to_read(request, 1)
        while not optimizer.pays_to_read(request, 1, has_lookups=True):
            request.speculation.record(num_guessed, num_guessed, 0, 1)
        passes_until_read.append(request.speculation.num_target_passes)
    assert passes_until_read[:2] == [0, 0]
    assert 1 < passes_until_read[2] < 15, "less than the reading takes"


def test_beside_prompts_trees_pay_only_where_rows_cost_less_than_their_tokens_later() -> None:
    """Passes over up to 32 rows take as long; beyond them each row takes its share."""
    optimizer = _optimizer(bent_costs(32))
    optimizer.choose(16)
    assert optimizer.usual().nodes > 0
    assert optimizer.beside(2, 16, 500) == OFF, "a row takes 1/8 s, and 16 requests emit more than 6 tokens/s"
    optimizer.choose(2)
    alone = optimizer.beside(1, 2, 500)
    assert 0 < alone.max_nodes < optimizer.choose(2).max_nodes
    assert optimizer.beside(1, 2, 4).max_nodes > alone.max_nodes, "where rows are free, trees are larger"


def test_trees_shrink_with_the_size_of_the_batch_until_it_decodes_plainly() -> None:
    """A pass costs the same up to 512 tokens, and beyond that every token its share."""
    sizes = []
    for num_requests in (1, 8, 32, 128, 512, 5000):
        optimizer = _optimizer(make_costs())
        sizes.append(optimizer.choose(num_requests).max_nodes)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 8
    assert sizes[-2:] == [0, 0], "a full batch decodes plainly"
    assert _optimizer(make_costs()).choose(512) == OFF


def test_a_tree_is_the_larger_the_cheaper_it_is() -> None:
    steep, shallow = _optimizer(make_costs(GROWING)), _optimizer(make_costs())
    assert 0 < steep.choose(1).max_nodes < shallow.choose(1).max_nodes
    # Expensive levels: a shallow tree.
    depths = [_optimizer(make_costs(GROWING, level)).choose(1).max_depth for level in (0.001, 0.05, 0.2, 0.4, 5.0)]
    assert depths == sorted(depths, reverse=True)
    assert depths[0] > depths[2] > depths[-1] == 0


def test_budgets_are_best_first_with_a_lower_bound_of_the_path_probability() -> None:
    costs = make_costs(GROWING, 0.05)
    optimizer = _optimizer(costs)
    budget = optimizer.choose(1)
    assert budget.widths == ()
    assert 0 < budget.min_path_prob <= 0.5
    assert budget.max_nodes <= optimizer.sizes.max_nodes
    assert budget.max_depth <= optimizer.sizes.max_depth
    # A node must be worth the time it adds, at the current token rate.
    rate = optimizer.rates(1).max()
    assert budget.min_gain == pytest.approx(rate * 0.05)
    assert _optimizer(make_costs()).choose(1).min_path_prob == 0.0, "a node that costs nothing may be very unlikely"


def test_slow_and_flat_passes_get_a_wide_menu() -> None:
    assert TreeSizes.for_costs(bent_costs(200)).max_nodes == 256
    assert TreeSizes.for_costs(bent_costs(200)).max_depth >= 24
    assert TreeSizes.for_costs(bent_costs(200, 0.004)).max_nodes == 64, "weighing would cost a part of the pass"
    assert TreeSizes.for_costs(bent_costs(20)).max_nodes == 64, "large trees cost as much as they are large"


def test_trees_go_as_far_as_they_are_free() -> None:
    for bend in (130, 200, 256, 600):
        budget = _optimizer(bent_costs(bend)).choose(1)
        assert 0.8 * min(bend, 256) <= budget.max_nodes <= min(bend, 256)
        assert budget.min_path_prob < 0.001, "a node before the bend may be very unlikely"
        assert budget.max_depth >= 16


@pytest.mark.parametrize("num_requests", [2, 4, 8, 16, 32])
def test_requests_together_stay_where_the_curve_bends(num_requests: int) -> None:
    """The most that their trees may have, since no request gives back what another takes more."""
    budget = _optimizer(bent_costs(200)).choose(num_requests)
    assert 0.7 * 200 < num_requests * (1 + budget.max_nodes) < 1.3 * 200


@pytest.mark.parametrize(("max_rows", "most"), [(256, (255, 7, 3, 0)), (96, (95, 2, 0, 0))])
def test_no_tree_is_larger_than_a_step_on_the_device_holds(max_rows: int, most: tuple[int, ...]) -> None:
    """A step has rows for 1, 32, 64 and 256 requests, for which all rows are free here."""
    costs = bent_costs(10_000)
    costs.max_rows = max_rows
    optimizer = _optimizer(costs)
    for num_requests, nodes in zip((1, 20, 64, 256), most, strict=True):
        assert costs.most_nodes(num_requests) == nodes
        budget = optimizer.choose(num_requests)
        assert budget.max_nodes <= nodes
        assert bool(budget.max_nodes) == bool(nodes)
        assert optimizer.gain(num_requests) >= 1.0
    assert set(1 + optimizer.sizes.num_nodes[1:]) == {2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64}, "whole blocks of rows"


def test_nodes_before_a_bend_are_not_priced_like_those_after_it() -> None:
    """As on a CPU: 16 rows take a tenth longer than one; beyond them computing takes longer than reading."""
    costs = CostModel(Curve([1, 16, 32, 512], [0.05, 0.055, 0.1, 1.6]), Curve((1, 64), [0.001] * 2))
    optimizer = _optimizer(costs)
    assert not optimizer.sizes.is_wide
    budget, rate = optimizer.choose(1), optimizer.rates(1).max()
    assert 10 <= budget.max_nodes <= 15, "a tree that needs more rows than that pays for all of them"
    assert budget.min_path_prob == pytest.approx(rate * 0.005 / 15, rel=0.5)


def test_a_price_that_grows_steadily_leaves_nodes_for_easy_requests() -> None:
    rows = (1, 64, 256, 1024)
    costs = CostModel(Curve(rows, [4.0 + 0.01 * n for n in rows]), Curve((1, 64), [0.02] * 2))
    optimizer = _optimizer(costs)
    assert optimizer.sizes.is_wide
    budget = optimizer.choose(8)
    rates = optimizer.rates(8)
    assert budget.max_nodes == 2 * optimizer.sizes.num_nodes[rates.argmax()]
    assert budget.min_path_prob == pytest.approx(rates.max() * 0.01, rel=0.03), "within the noise of the fastest"

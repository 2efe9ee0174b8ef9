"""The policy that chooses trees: costs are learned, nothing unmeasured is taken to be cheap, off is kept to."""

import numpy as np
import pytest

from specinfer.engine.costs import StepCosts, measure_costs
from specinfer.engine.metrics import StepRecord
from specinfer.engine.speculation import OFF, CostPolicy, Menu, RankAcceptance, make_policy
from specinfer.request import Span
from specinfer.sampling import SamplingParams
from specinfer.tree import TokenTree, TreeBudget
from specinfer.verify import Acceptance
from tiny import make_request

SIZES = (1, 2, 4, 8, 16, 32, 64)


def _record(rows: int, levels: int, target: float, draft: float = 0.0, rest: float = 0.0, read: int = 0) -> StepRecord:
    return StepRecord(1, rows, rows - 1, levels, 1, read, draft, target, rest)


def _span(num_output: int = 0, max_tokens: int = 100, length: int = 10) -> Span:
    request = make_request("a", range(length), SamplingParams(temperature=0.0, max_tokens=max_tokens))
    request.token_ids += [1] * num_output
    return Span(request, len(request.token_ids) - 1, len(request.token_ids))


def test_the_menu_is_sound() -> None:
    menu = Menu()
    assert menu.expansions[0] == ()
    assert len(set(menu.expansions)) == len(menu.expansions)
    for widths, nodes, levels in zip(menu.expansions, menu.num_nodes, menu.num_levels, strict=True):
        assert nodes == TreeBudget(widths).num_nodes <= 32
        assert levels == len(widths)


def test_expected_tokens_are_those_of_the_full_expansion() -> None:
    menu = Menu()
    within = np.array([0.0, 0.5, 0.7, 0.8, 0.85])
    expected = dict(zip(menu.expansions, menu.expected_tokens(within), strict=True))
    assert expected[()] == pytest.approx(1.0)
    assert expected[(1, 1)] == pytest.approx(1 + 0.5 + 0.25)
    assert expected[(3, 1)] == pytest.approx(1 + 0.8 + 0.4)


def test_ranks_are_learned_from_the_walk() -> None:
    acceptance = RankAcceptance()
    tree = TokenTree((0, 5, 6, 7), (-1, 0, 0, 2))  # the second guess is right, then nothing
    for _ in range(500):
        acceptance.observe(tree, Acceptance((2,), 9))
    within = acceptance.within()
    # At the root rank 2 of 2 was right; at the kept node the only guess, of rank 1, was wrong.
    assert within[1] < 0.05
    assert within[2] == pytest.approx(1.0, abs=0.1)


def test_beyond_what_was_measured_every_token_costs_its_share() -> None:
    costs = StepCosts(SIZES, [1.0] * len(SIZES), draft_level=0.0)
    assert float(costs.target(64)) == pytest.approx(1.0)
    assert float(costs.target(640)) == pytest.approx(10.0)
    policy = CostPolicy(costs)
    assert policy.choose(1) != ()
    assert policy.choose(64) == (), "a full batch decodes plainly"


def test_a_cost_that_grows_at_some_sizes_only_is_learned_there() -> None:
    costs = StepCosts(SIZES, [1.0] * len(SIZES), draft_level=0.0)
    for _ in range(200):
        costs.observe(_record(1, 0, 1.0))
        costs.observe(_record(32, 4, 4.0))
    assert float(costs.target(1)) == pytest.approx(1.0, rel=0.3)
    assert float(costs.target(32)) == pytest.approx(4.0, rel=0.3)


def test_a_dear_drafter_is_left_alone_and_tried_again() -> None:
    policy = CostPolicy(StepCosts(SIZES, [1.0] * len(SIZES), draft_level=5.0))
    span = _span()
    budgets = [policy.budgets([span])[0] for _ in range(policy._RETRY + 1)]
    assert budgets.count(OFF) == policy._RETRY
    assert len(budgets[policy._RETRY - 1].widths) == 2


def test_a_poor_drafter_is_left_alone() -> None:
    policy = CostPolicy(StepCosts(SIZES, [1.0, 1.0, 1.1, 1.2, 1.4, 2.0, 4.0], draft_level=0.1))
    assert policy.choose(1) != ()
    tree = TokenTree((0, 5, 6, 7, 8), (-1, 0, 0, 0, 0))
    for _ in range(300):
        policy.acceptance.observe(tree, Acceptance((), 9))
    assert policy.choose(1) == ()


def test_reading_a_long_prompt_must_pay() -> None:
    costs = StepCosts(SIZES, [1.0] * len(SIZES), draft_level=0.01, read_token=0.1)
    policy = CostPolicy(costs)
    few, many = _span(max_tokens=4, length=1000), _span(max_tokens=800, length=1000)
    assert policy.budgets([few]) == [OFF]
    assert policy.budgets([many]) != [OFF]
    few.request.drafter_knows = True
    assert policy.budgets([few]) != [OFF], "what was read is paid for"


def test_reading_is_told_apart_from_levels() -> None:
    costs = StepCosts(SIZES, [1.0] * len(SIZES), draft_level=0.1)
    for _ in range(300):
        costs.observe(_record(5, 4, 1.0, draft=0.4 + 100 * 0.02, read=100))
        costs.observe(_record(5, 4, 1.0, draft=0.4))
    assert costs.draft_level == pytest.approx(0.1, rel=0.05)
    assert costs.read_token == pytest.approx(0.02, rel=0.05)


def test_without_a_drafter_there_is_nothing_to_choose(runner_of: object) -> None:
    target = runner_of("llama")  # type: ignore[operator]
    assert make_policy(None, target, None).budgets([_span()]) == [OFF]


def test_measuring_leaves_the_cache_as_it_was(runner_of: object) -> None:
    from specinfer.drafters import make_drafter

    target = runner_of("llama")  # type: ignore[operator]
    drafter = make_drafter(["ngram"], target.loaded.vocab_size)
    assert drafter is not None
    costs = measure_costs(target, drafter, max_seconds=0.5)
    assert target.cache.num_free == target.cache.num_slots
    assert 0 < float(costs.target(1)) <= float(costs.target(64))

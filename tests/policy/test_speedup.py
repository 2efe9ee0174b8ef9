"""The expected speed beside the measured one, and what a pair that loses is said to do."""

import logging

import pytest

from specinfer.core.tree import OFF, TokenTree
from specinfer.policy.acceptance import AcceptanceModel
from specinfer.policy.auto_policy import AutoPolicy
from specinfer.policy.rank_choice import RankChoice
from specinfer.policy.speedup import Speedup
from specinfer.verify import Acceptance
from tests.policy.simulated_machines import SimulatedDrafting, make_costs, make_record

REMEDY = "leave the drafter out"


def test_tokens_are_compared_with_what_plain_decoding_would_have_taken() -> None:
    speedup = Speedup(1.4)
    assert speedup.measured is None
    assert "nothing measured yet" in speedup.line()
    for num_generated in (1, 3):
        speedup.observe(make_record(num_generated=num_generated, num_guessed=3, target_time=1.5), plain_seconds=1.0)
    assert speedup.measured == pytest.approx(4 / 3)
    assert speedup.line() == "expected 1.40 times the speed of plain decoding, measured 1.33"


def test_plain_steps_neither_win_nor_lose_and_show_what_trees_are_compared_with() -> None:
    """Costs are lower than the mean on a busy machine."""
    speedup = Speedup(1.0, REMEDY)
    for _ in range(50):
        speedup.observe(make_record(target_time=2.0), plain_seconds=1.0)
    assert speedup.measured == 1.0
    for _ in range(50):
        speedup.observe(make_record(num_generated=2, num_guessed=3, target_time=2.0), plain_seconds=1.0)
    assert speedup.measured == pytest.approx(1.5)


def test_a_pair_that_loses_is_said_to_lose(caplog: pytest.LogCaptureFixture) -> None:
    speedup = Speedup(1.4, REMEDY)
    with caplog.at_level(logging.INFO, "specinfer"):
        for _ in range(1100):
            speedup.observe(make_record(num_guessed=3, target_time=2.0), plain_seconds=1.0)
    assert len(caplog.records) == 2, "after 500 tokens, and after twice as many"
    assert caplog.records[-1].getMessage().endswith(f"measured 0.50: drafting loses here; {REMEDY}, after 1000 tokens")


def test_the_measured_speed_is_that_of_the_machine() -> None:
    costs = make_costs(draft_level=0.05)
    policy, run = AutoPolicy(make_costs(draft_level=0.05)), SimulatedDrafting(costs, 0.7)
    rate = run.rate(policy, 600)
    assert policy.speedup is not None
    assert policy.speedup.measured == pytest.approx(rate * float(costs.target(1)), rel=0.1)


def test_steps_in_which_a_lookup_finds_nothing_count() -> None:
    """The example of `RankChoice.rates`."""
    model = AcceptanceModel.assumed((0.999,))
    choice = RankChoice(make_costs(draft_level=0.0), model)
    choice.choose(1)
    always = choice.gain(1)
    model._coverage.observe(0, 8)  # none in half of the steps
    assert choice.gain(1) == pytest.approx((1 + always) / 2, rel=0.02)


def test_levels_of_a_model_that_proposes_nothing_cost_their_time() -> None:
    """A model that is seldom sure enough drafts in vain: plain decoding is faster, though its few tokens are right."""
    model = AcceptanceModel.assumed((0.9,))
    choice = RankChoice(make_costs(draft_level=0.3), model)
    assert choice.choose(1).max_nodes
    for _ in range(60):
        model.observe(TokenTree.root(0), Acceptance((), 1))
    assert choice.choose(1) == OFF


@pytest.mark.parametrize(("num_levels", "drafting"), [(1, 1.0), (0, 0.25)])
def test_drafting_in_vain_is_no_part_of_plain_decoding(num_levels: int, drafting: float) -> None:
    """Neither a level of a model nor a look-up."""
    speedup = Speedup(1.0)
    for _ in range(10):
        speedup.observe(make_record(num_model_levels=num_levels, draft_time=drafting), plain_seconds=1.0)
    assert speedup.measured == pytest.approx(1.0 / (1.0 + drafting))


def test_plain_decoding_is_chosen_with_a_reason_and_a_remedy() -> None:
    policy = AutoPolicy(make_costs(draft_level=5.0), remedy=REMEDY)
    summary = policy.summary()
    assert summary is not None
    assert summary.startswith("auto: plain decoding, ")
    assert summary.endswith(REMEDY)
    assert policy.speedup is not None
    assert policy.speedup.expected == 1.0

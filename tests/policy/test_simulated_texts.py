"""The policy "auto" with a draft model that seldom pays and a lookup that is free: no kind of text loses by it."""

import numpy as np
import pytest
import torch

from specinfer.core.request import FinishReason
from specinfer.core.tree import TokenTree
from specinfer.policy.auto_policy import AutoPolicy
from specinfer.policy.cost_model import CostModel
from specinfer.verify import Acceptance
from tests.policy.simulated_machines import make_record, make_span
from tests.policy.simulated_texts import Kind, SimulatedTexts, pair_costs

REWRITING, CODE, STORIES = Kind(0.6, 0.75, 240), Kind(0.15, 0.85), Kind(0.05, 0.5)
COSTS = {
    "as they are": pair_costs(),
    "of a busy minute": pair_costs(2.0, 2.3),
    "drafting seemed cheap": pair_costs(1.15, 0.7),
}


def _auto(costs: CostModel) -> AutoPolicy:
    return AutoPolicy(CostModel.from_dict(costs.as_dict()), ["suffix"])


@pytest.mark.parametrize("known", COSTS)
def test_text_that_is_copied_is_looked_up_and_its_prompt_seldom_read(known: str) -> None:
    texts, policy = SimulatedTexts(pair_costs()), _auto(COSTS[known])
    speedups = [texts.speedup(policy, REWRITING) for _ in range(8)]
    alone = SimulatedTexts(pair_costs(), ["suffix"])
    assert np.mean(speedups) >= 0.93 * np.mean(
        [alone.speedup(AutoPolicy(pair_costs(), ["suffix"], has_models=False), REWRITING) for _ in range(8)]
    )
    assert texts.num_read <= 2


@pytest.mark.parametrize("known", COSTS)
def test_a_mix_of_texts_gains_and_none_loses(known: str) -> None:
    speedups: dict[str, list[float]] = {}
    for seed in range(3):
        texts, policy = SimulatedTexts(pair_costs(), seed=seed), _auto(COSTS[known])
        for _ in range(6):
            for name, kind in (("rewriting", REWRITING), ("stories", STORIES), ("code", CODE)):
                speedups.setdefault(name, []).append(texts.speedup(policy, kind))
    assert np.mean(speedups["rewriting"]) >= 1.4
    assert np.mean(speedups["code"]) >= 1.1
    assert np.mean(speedups["stories"]) >= 0.98


@pytest.mark.parametrize(
    ("passes", "drafting", "is_provisional"), [(1.0, 1.0, False), (1.3, 1.4, True), (1.0, 1.0, True)]
)
def test_trials_lose_at_most_two_percent_of_the_first_text(
    passes: float, drafting: float, is_provisional: bool
) -> None:
    """Neither tests of the model nor passes that are measured again, of an answer that is hard to predict."""
    for seed in range(4):
        policy = _auto(pair_costs(passes, drafting))
        policy.costs.is_provisional = is_provisional
        assert SimulatedTexts(pair_costs(), seed=seed).speedup(policy, Kind(0.0, 0.3), 60) >= 0.98


def test_passes_are_measured_again_by_trees_that_lose_little() -> None:
    """Larger ones are left out where they would lose more than is allowed."""
    policy, texts, measured = _auto(pair_costs()), SimulatedTexts(pair_costs()), 0
    policy.costs.is_provisional = True
    while policy.costs.is_provisional:
        texts.speedup(policy, STORIES, 200)
        measured += 1
        assert measured < 10


def test_what_a_lookup_finds_does_not_make_a_model_seem_quick() -> None:
    """Else the model would be tested every few steps, on text where it does not pay."""
    policy = AutoPolicy(pair_costs(1.0, 4.0), ["suffix"])
    tested = 0
    for _ in range(300):
        (budget,) = policy.budgets([make_span(num_output=30)])
        tested += bool(budget.widths)
        path = (1, 2, 3, 4, 5, 6, 7)
        found = make_record(
            num_rows=8, num_guessed=7, num_levels=7, num_model_levels=0, num_generated=8, target_time=0.105
        )
        policy.observe(found, [(TokenTree.chain(0, [1] * 7, "suffix"), Acceptance(path, 1))])
    assert tested <= 5


@pytest.mark.parametrize(("length", "is_measured"), [(600, False), (6, True)])
def test_passes_are_not_measured_again_by_trees_for_which_a_long_prompt_would_be_read(
    length: int, is_measured: bool
) -> None:
    policy = AutoPolicy(pair_costs())
    policy.costs.is_provisional = True
    num_nodes = []
    for _ in range(8):
        (budget,) = policy.budgets([make_span(num_output=2, length=length)])
        num_nodes.append(budget.max_nodes if policy._is_measured else 0)
        policy.observe(make_record(target_time=0.05), [(TokenTree.root(0), Acceptance((), 1))])
    assert any(num_nodes) is is_measured


def test_an_output_is_expected_to_go_on_as_long_as_those_that_became_as_long() -> None:
    policy = AutoPolicy(pair_costs())
    for length in (20, 100, 300):
        request = make_span(num_output=length).request
        request.finish_reason = FinishReason.STOP
        policy.on_tokens(request, TokenTree.root(0), Acceptance((), 1), torch.empty(0), 1)
    lengths = policy.costs.lengths
    assert lengths.left(50) == (206 + 50 + 250) / 3
    assert lengths.left(400) == 400

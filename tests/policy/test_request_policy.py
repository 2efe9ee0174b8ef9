"""Policies by request: the tree of a request overrides the default."""

from collections.abc import Sequence

import pytest

from specinfer.core.request import Request, Span
from specinfer.core.step_record import StepRecord
from specinfer.core.tree import OFF, TokenTree, TreeBudget
from specinfer.core.tree_shape import parse_tree
from specinfer.policy.base import TREE_OFF, FixedPolicy, SpeculationPolicy, budget_of
from specinfer.policy.cost_model import CostModel
from specinfer.policy.request_policy import RequestPolicy, make_policy
from specinfer.verify import Acceptance
from tests.policy.simulated_machines import WRONG, make_costs, make_record, make_span


class Counting(SpeculationPolicy):
    """A policy that gives one budget, and counts its calls."""

    def __init__(self, budget: TreeBudget) -> None:
        self._budget, self.asked, self.num_steps = budget, [0], 0

    def budgets(self, spans: Sequence[Span], reading: Sequence[Span] = ()) -> list[TreeBudget]:
        self.asked.append(len(spans))
        return [self._budget] * len(spans)

    def observe(self, step: StepRecord, outcomes: Sequence[tuple[TokenTree, Acceptance]]) -> None:
        self.num_steps += 1

    def reason(self, request: Request) -> str | None:
        return "the policy's own"


def test_reasons_are_those_of_the_policy_that_decided() -> None:
    own, other = Counting(OFF), FixedPolicy(why_off="another")
    policy = RequestPolicy(own, lambda: other)
    policy.prepare()
    found = [policy.reason(make_span(tree=tree).request) for tree in (None, "auto", "off", "1,1")]
    assert found == ["the policy's own", "another", TREE_OFF, None]


def test_a_request_for_auto_uses_the_default_policy_if_that_is_auto() -> None:
    budget = TreeBudget(9, 9, min_path_prob=0.1)
    policy = RequestPolicy(Counting(budget), lambda: pytest.fail("a second one was made"), is_auto=True)
    policy.prepare()
    trees = ["auto", None, "off", "auto"]
    assert policy.budgets([make_span(tree=tree) for tree in trees]) == [budget, budget, OFF, budget]


def test_each_request_of_a_batch_gets_what_it_asked_for() -> None:
    usual, auto = Counting(TreeBudget(7, 3)), Counting(TreeBudget(9, 9, min_path_prob=0.1))
    made = []

    def make_auto() -> Counting:
        made.append(auto)
        return auto

    prepared = RequestPolicy(usual, make_auto)
    prepared.prepare()
    prepared.prepare()
    assert made.pop() is auto
    assert not made, "measured once"
    policy = RequestPolicy(usual, make_auto, num_drafters=2)
    trees = [None, "off", "1,1", "best-first:4", "auto", None, "best-first:4:2", "auto", "3"]
    wanted = [
        TreeBudget(7, 3),
        OFF,
        TreeBudget.expansion((1, 1), 2),
        TreeBudget(4, 4),
        TreeBudget(9, 9, min_path_prob=0.1),
        TreeBudget(7, 3),
        TreeBudget(4, 2),
        TreeBudget(9, 9, min_path_prob=0.1),
        TreeBudget.expansion((3,), 2),
    ]
    assert policy.budgets([make_span(), make_span()]) == [TreeBudget(7, 3)] * 2
    assert not made, "costs are not measured before a request needs them"
    for _ in range(2):
        assert policy.budgets([make_span(tree=tree) for tree in trees]) == wanted
    assert made == [auto], "and once only"
    assert (usual.asked[-1], auto.asked[-1]) == (2, 2)
    policy.observe(make_record(), [])
    assert (usual.num_steps, auto.num_steps) == (1, 1)
    asked = len(usual.asked)
    assert policy.budgets([make_span(tree="off"), make_span(tree="2")]) == [OFF, TreeBudget.expansion((2,), 2)]
    assert len(usual.asked) == asked, "no request uses the default"


@pytest.mark.parametrize(
    ("tree", "budget"),
    [
        ("off", OFF),
        ("1,1,3,1", TreeBudget.expansion((1, 1, 3, 1), 3)),
        ("best-first:32", TreeBudget(32, 8)),
        ("best-first:32:3", TreeBudget(32, 3)),
    ],
)
def test_budgets_of_shapes(tree: str, budget: TreeBudget) -> None:
    assert budget_of(parse_tree(tree), 3) == budget
    spans = [make_span(), make_span()]

    def measure() -> CostModel:
        raise AssertionError("nothing needs to be measured")

    assert make_policy(parse_tree(tree), measure, 3).budgets(spans) == [budget] * 2


def test_the_costs_of_a_default_auto_are_measured_at_once() -> None:
    measured = []

    def measure() -> CostModel:
        measured.append(1)
        return make_costs()

    policy = make_policy(parse_tree("auto"), measure)
    assert measured == [1]
    assert policy.budgets([make_span()])[0].max_nodes > 0
    assert policy.budgets([make_span(tree="off")]) == [OFF]


def test_a_fixed_policy_never_changes() -> None:
    policy = FixedPolicy(TreeBudget(3, 2))
    policy.observe(make_record(), [WRONG] * 5)
    assert policy.budgets([make_span()] * 3) == [TreeBudget(3, 2)] * 3
    assert FixedPolicy().budgets([make_span()]) == [OFF]

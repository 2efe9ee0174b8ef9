"""The policies: what a request asks for, what pays on this machine, and that off is kept to where nothing pays."""

import heapq
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from specinfer.core.config import parse_tree
from specinfer.core.request import Request, Span
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree import OFF, TokenTree, TreeBudget
from specinfer.engine.metrics import StepRecord
from specinfer.policy.cost_policy import CostPolicy, FixedPolicy, RequestPolicy, budget_of, make_policy
from specinfer.policy.costs import Curve, StepCosts
from specinfer.policy.outcomes import Outcomes, RankAcceptance
from specinfer.policy.streamed_costs import Pass, StreamedCurve
from specinfer.verify import Acceptance
from tiny import make_request

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
GROWING = (1.0, 1.0, 1.1, 1.2, 1.4, 2.0, 4.0, 8.0, 16.0, 32.0)


def _costs(
    seconds: Sequence[float] = (1.0,) * len(SIZES), draft_level: float = 0.01, read_token: float = 0.0
) -> StepCosts:
    return StepCosts(Curve(SIZES, seconds), Curve((1, 64), [draft_level] * 2), read_token)


def _span(num_output: int = 0, max_tokens: int = 100, length: int = 10, tree: str | None = None) -> Span:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, tree=tree)
    request = make_request("a", range(length), params)
    request.token_ids += [1] * num_output
    return Span(request, len(request.token_ids) - 1, len(request.token_ids))


def _record(**changes: Any) -> StepRecord:
    return replace(StepRecord(1, 1, 0, 0, 1, 0, 0.0, 1.0, 0.0), **changes)


WRONG = TokenTree((0, 5, 6, 7, 8), (-1, 0, 0, 0, 0)), Acceptance((), 9)
RIGHT = TokenTree((0, 5, 6, 7), (-1, 0, 1, 2)), Acceptance((1, 2, 3), 9)


# ------------------------------------------------------------------------------------ what is expected


def _best_tree(by_rank: Sequence[float], num_nodes: int, max_depth: int) -> float:
    """Tokens expected of the best tree, guess by guess."""
    total, heap = 1.0, [(-chance, 1) for chance in by_rank]
    heapq.heapify(heap)
    for _ in range(min(num_nodes, 10**6) if max_depth else 0):
        if not heap:
            break
        negated, depth = heapq.heappop(heap)
        total -= negated
        if depth < max_depth:
            for chance in by_rank:
                heapq.heappush(heap, (negated * chance, depth + 1))
    return total


@pytest.mark.parametrize("by_rank", [(0.6, 0.12, 0.06, 0.04), (0.3, 0.25, 0.2, 0.15), (0.95, 0.01, 0.0, 0.0)])
def test_expected_tokens_are_those_of_the_best_trees(by_rank: tuple[float, ...]) -> None:
    outcomes = Outcomes()
    expected = outcomes.expected_tokens(np.array(by_rank))
    assert (outcomes.num_nodes[0], outcomes.num_levels[0], expected[0]) == (0, 0, 1.0), "the first is off"
    for nodes, levels, tokens in zip(outcomes.num_nodes, outcomes.num_levels, expected, strict=True):
        assert levels <= nodes <= outcomes.max_nodes
        assert levels <= outcomes.max_depth
        assert tokens == pytest.approx(_best_tree(by_rank, int(nodes), int(levels)))


def test_ranks_are_learned_from_the_walk() -> None:
    acceptance = RankAcceptance()
    tree = TokenTree((0, 5, 6, 7), (-1, 0, 0, 2))  # the second guess is right, then nothing
    for _ in range(2000):
        acceptance.observe(tree, Acceptance((2,), 9))
    # The first guess was wrong at both nodes, the second right where there was one.
    by_rank = acceptance.by_rank()
    assert by_rank[0] < 0.01
    assert by_rank[1] == pytest.approx(0.89, abs=0.02), "something is left for guesses that were never seen"
    for _ in range(3000):
        acceptance.observe(*WRONG)
    assert acceptance.by_rank().sum() < 0.01, "what was long ago is forgotten"


def test_chances_of_ranks_are_together_no_more_than_certain() -> None:
    acceptance = RankAcceptance()
    assert 0.5 < acceptance.by_rank().sum() <= 1
    for tree in (TokenTree((0, 5), (-1, 0)), TokenTree((0, 5, 6), (-1, 0, 0))):
        for _ in range(1000):
            acceptance.observe(tree, Acceptance((tree.num_guessed,), 9))
    assert acceptance.by_rank().sum() <= 0.98 + 1e-9


# ----------------------------------------------------------------------------------------- what pays


def test_on_a_quiet_machine_it_guesses_and_in_a_full_batch_less_and_less() -> None:
    """A pass costs the same up to 512 tokens, and beyond that every token its share."""
    sizes = []
    for num_requests in (1, 8, 32, 128, 512, 5000):
        policy = CostPolicy(_costs())
        sizes.append(policy.choose(num_requests).max_nodes)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 8
    assert sizes[-2:] == [0, 0], "a full batch decodes plainly"
    assert CostPolicy(_costs()).choose(512) == OFF
    spans = [_span() for _ in range(600)]
    assert CostPolicy(_costs()).budgets(spans) == [OFF] * 600


def test_a_tree_is_the_larger_the_cheaper_it_is() -> None:
    steep, shallow = CostPolicy(_costs(GROWING)), CostPolicy(_costs())
    assert 0 < steep.choose(1).max_nodes < shallow.choose(1).max_nodes
    # Dear levels: a shallow tree.
    depths = [CostPolicy(_costs(GROWING, level)).choose(1).max_depth for level in (0.001, 0.05, 0.2, 0.4, 5.0)]
    assert depths == sorted(depths, reverse=True)
    assert depths[0] > depths[2] > depths[-1] == 0


def test_budgets_are_best_first_with_a_floor() -> None:
    costs = _costs(GROWING, 0.05)
    policy = CostPolicy(costs)
    budget = policy.choose(1)
    assert budget.widths == ()
    assert 0 < budget.min_path_prob <= 0.5
    assert budget.max_nodes <= policy.outcomes.max_nodes
    assert budget.max_depth <= policy.outcomes.max_depth
    # A guess must be worth the time it adds, at the rate at which tokens come.
    rate = policy.rates(1).max()
    assert budget.min_gain == pytest.approx(rate * 0.05)
    assert CostPolicy(_costs()).choose(1).min_path_prob == 0.0, "a guess that costs nothing may be ever so unlikely"


def test_a_dear_drafter_is_left_alone_and_tried_again() -> None:
    policy = CostPolicy(_costs(draft_level=5.0))
    span = _span()
    budgets = [policy.budgets([span])[0] for _ in range(policy._RETRY + 1)]
    assert budgets.count(OFF) == policy._RETRY
    assert budgets[policy._RETRY - 1] == TreeBudget.expansion((1, 1))


def test_a_drafter_that_became_cheap_is_used_again() -> None:
    policy, span = CostPolicy(_costs(draft_level=5.0)), _span()
    chosen = []
    for _ in range(40 * policy._RETRY):
        (budget,) = policy.budgets([span])
        chosen.append(budget)
        if budget == OFF:
            policy.observe(_record(), [(TokenTree.root(0), Acceptance((), 1))])
        else:
            step = _record(num_rows=4, num_guessed=3, num_levels=3, draft_time=0.003)
            policy.observe(step, [RIGHT])
    assert chosen[0] == OFF
    assert OFF not in chosen[-2 * policy._RETRY :]
    assert chosen[-1].max_depth > 2


def test_a_poor_drafter_is_left_alone() -> None:
    policy = CostPolicy(_costs(GROWING, 0.1))
    assert policy.choose(1).max_nodes
    for _ in range(600):
        policy.observe(_record(num_rows=5, num_guessed=4, num_levels=1, draft_time=0.1), [WRONG])
    assert policy.choose(1) == OFF


def test_reading_a_long_prompt_must_pay() -> None:
    policy = CostPolicy(_costs(read_token=0.1))
    few, many = _span(max_tokens=4, length=1000), _span(max_tokens=800, length=1000)
    assert policy.budgets([few]) == [OFF]
    assert policy.budgets([many]) != [OFF]
    assert [budget == OFF for budget in policy.budgets([few, many])] == [True, False]
    few.request.drafter_knows = True
    assert policy.budgets([few]) != [OFF], "what was read is paid for"


def test_steps_that_read_prompts_teach_no_costs() -> None:
    """Their passes are large for another reason; but what came of their trees counts."""
    policy = CostPolicy(_costs())
    before, ranks = policy.costs.as_dict(), policy.acceptance.by_rank()
    policy.observe(_record(num_rows=104, num_guessed=3, num_levels=3, target_time=9.0), [RIGHT])
    assert policy.costs.as_dict() == before
    assert policy.acceptance.by_rank()[0] > ranks[0]
    policy.observe(_record(num_rows=4, num_guessed=3, num_levels=3, target_time=9.0, draft_time=0.1), [RIGHT])
    assert policy.costs.as_dict() != before


def test_where_weights_are_read_for_each_pass_prompts_teach_what_rows_cost() -> None:
    """But for very long ones, whose rows cost more than those of trees."""
    curve = StreamedCurve([Pass(1, 4.0, 3.9), Pass(128, 4.0, 3.9)])
    policy = CostPolicy(StepCosts(curve, Curve((1, 64), [0.02] * 2)))
    for rows, changes in ((2000, False), (400, True)):
        before = float(curve(300))
        policy.observe(_record(num_rows=rows, num_guessed=3, num_levels=3, target_time=rows / 40), [RIGHT])
        assert (float(curve(300)) > before) is changes


@pytest.mark.parametrize(("seconds", "num_steps"), [(0.001, CostPolicy._REVIEW), (1.0, 1)])
def test_choices_are_kept_where_weighing_would_cost_time(
    seconds: float, num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = CostPolicy(_costs([seconds] * len(SIZES), seconds / 100))
    weighed: list[int] = []
    choose = policy.choose
    monkeypatch.setattr(policy, "choose", lambda count: weighed.append(count) or choose(count))
    spans = [_span() for _ in range(3)]
    for _ in range(2 * num_steps):
        policy.budgets(spans)
    assert weighed == [3, 3]
    policy.budgets(spans[:2])
    assert weighed == [3, 3, 2], "another number of requests is another question"


# ------------------------------------------------------------------------- passes that cost the same up to a bend


def _bent(bend: int, seconds: float = 4.0, draft_level: float = 0.02) -> StepCosts:
    """Reading takes so many seconds, and computing more from so many rows on."""
    curve = Curve([1, bend, 1024], [seconds, seconds, seconds * 1024 / bend])
    return StepCosts(curve, Curve((1, 64), [draft_level] * 2))


def test_slow_and_flat_passes_get_a_wide_menu() -> None:
    assert Outcomes.fitting(_bent(200)).max_nodes == 256
    assert Outcomes.fitting(_bent(200)).max_depth >= 24
    assert Outcomes.fitting(_bent(200, 0.004)).max_nodes == 64, "weighing would cost a part of the pass"
    assert Outcomes.fitting(_bent(20)).max_nodes == 64, "large trees cost as much as they are large"


def test_trees_go_as_far_as_they_are_free() -> None:
    for bend in (130, 200, 256, 600):
        budget = CostPolicy(_bent(bend)).choose(1)
        assert 0.8 * min(bend, 256) <= budget.max_nodes <= min(bend, 256)
        assert budget.min_path_prob < 0.001, "a node before the bend may be ever so unlikely"
        assert budget.max_depth >= 16


@pytest.mark.parametrize("num_requests", [2, 4, 8, 16, 32])
def test_requests_together_stay_where_the_curve_bends(num_requests: int) -> None:
    """The most that their trees may have, since no request gives back what another takes more."""
    budget = CostPolicy(_bent(200)).choose(num_requests)
    assert 0.7 * 200 < num_requests * (1 + budget.max_nodes) < 1.3 * 200


def test_nodes_before_a_bend_are_not_priced_like_those_after_it() -> None:
    """As on a CPU: 16 rows take a tenth longer than one; beyond them computing takes longer than reading."""
    costs = StepCosts(Curve([1, 16, 32, 512], [0.05, 0.055, 0.1, 1.6]), Curve((1, 64), [0.001] * 2))
    policy = CostPolicy(costs)
    assert not policy.outcomes.is_wide
    budget, rate = policy.choose(1), policy.rates(1).max()
    assert 10 <= budget.max_nodes <= 15, "a tree that needs more rows than that pays for all of them"
    assert budget.min_path_prob == pytest.approx(rate * 0.005 / 15, rel=0.5)


def test_a_price_that_grows_steadily_leaves_room_for_easy_requests() -> None:
    rows = (1, 64, 256, 1024)
    costs = StepCosts(Curve(rows, [4.0 + 0.01 * n for n in rows]), Curve((1, 64), [0.02] * 2))
    policy = CostPolicy(costs)
    assert policy.outcomes.is_wide
    budget = policy.choose(8)
    rates = policy.rates(8)
    assert budget.max_nodes == 2 * policy.outcomes.num_nodes[rates.argmax()]
    assert budget.min_path_prob == pytest.approx(rates.max() * 0.01)


# ------------------------------------------------------------------------------ what a request asks for


class Counting:
    """A policy that gives one budget, and counts what it is told."""

    def __init__(self, budget: TreeBudget) -> None:
        self._budget, self.asked, self.num_steps = budget, [0], 0

    def budgets(self, spans: Sequence[Span]) -> list[TreeBudget]:
        self.asked.append(len(spans))
        return [self._budget] * len(spans)

    def observe(self, step: StepRecord, outcomes: Sequence[tuple[TokenTree, Acceptance]]) -> None:
        self.num_steps += 1

    def on_tokens(
        self, request: Request, tree: TokenTree, acceptance: Acceptance, logits: Tensor, num_generated: int
    ) -> None:
        pass


def test_who_asks_for_auto_gets_the_policy_that_all_have_if_that_is_auto() -> None:
    budget = TreeBudget(9, 9, min_path_prob=0.1)
    policy = RequestPolicy(Counting(budget), lambda: pytest.fail("a second one was made"), is_auto=True)
    policy.prepare()
    trees = ["auto", None, "off", "auto"]
    assert policy.budgets([_span(tree=tree) for tree in trees]) == [budget, budget, OFF, budget]


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
    assert policy.budgets([_span(), _span()]) == [TreeBudget(7, 3)] * 2
    assert not made, "costs are not measured before somebody asks for it"
    for _ in range(2):
        assert policy.budgets([_span(tree=tree) for tree in trees]) == wanted
    assert made == [auto], "and once only"
    assert (usual.asked[-1], auto.asked[-1]) == (2, 2)
    policy.observe(_record(), [])
    assert (usual.num_steps, auto.num_steps) == (1, 1)
    asked = len(usual.asked)
    assert policy.budgets([_span(tree="off"), _span(tree="2")]) == [OFF, TreeBudget.expansion((2,), 2)]
    assert len(usual.asked) == asked, "nobody to decide for"


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
    spans = [_span(), _span()]

    def measure() -> StepCosts:
        raise AssertionError("nothing needs to be measured")

    assert make_policy(parse_tree(tree), measure, 3).budgets(spans) == [budget] * 2


def test_auto_for_all_is_measured_at_once() -> None:
    measured = []

    def measure() -> StepCosts:
        measured.append(1)
        return _costs()

    policy = make_policy(parse_tree("auto"), measure)
    assert measured == [1]
    assert policy.budgets([_span()])[0].max_nodes > 0
    assert policy.budgets([_span(tree="off")]) == [OFF]


def test_fixed_is_fixed() -> None:
    policy = FixedPolicy(TreeBudget(3, 2))
    policy.observe(_record(), [WRONG] * 5)
    assert policy.budgets([_span()] * 3) == [TreeBudget(3, 2)] * 3
    assert FixedPolicy().budgets([_span()]) == [OFF]

"""The speculation policy "auto": it learns from each step, and turns speculation off where it does not pay."""

import itertools
from dataclasses import replace

import pytest

from specinfer.core.request import Span
from specinfer.core.tree import OFF, TokenTree, TreeBudget
from specinfer.policy.acceptance import AcceptanceModel
from specinfer.policy.auto_policy import AutoPolicy
from specinfer.policy.cost_model import CostModel
from specinfer.policy.curves import ContextCurve, Curve
from specinfer.policy.rank_choice import RankChoice
from specinfer.policy.streamed_costs import Pass, StreamedCurve
from specinfer.verify import Acceptance
from tests.policy.simulated_machines import GROWING, RIGHT, SIZES, WRONG, make_costs, make_record, make_span

TEST = TreeBudget.expansion((1, 1))


def _plain_steps(policy: AutoPolicy, spans: list[Span]) -> tuple[int, list[TreeBudget]]:
    """Return the number of plain steps, of a second each, before the next one with draft tokens, and its budgets."""
    for count in itertools.count():
        budgets = policy.budgets(spans)
        if any(budget != OFF for budget in budgets):
            return count, budgets
        policy.observe(make_record(), [(TokenTree.root(0), Acceptance((), 1))])
    raise AssertionError


def test_the_wait_for_the_next_test_begins_anew_when_speculation_was_on() -> None:
    # Drafting for 20 requests takes longer than it saves.
    policy = AutoPolicy(CostModel(Curve(SIZES, GROWING), Curve((1, 20, 64), (0.01, 0.9, 3.0))))
    full, alone = [make_span()] * 20, [make_span()]
    for _ in range(policy.FIRST_TEST - 1):
        assert policy.budgets(full) == [OFF] * 20
    assert policy.budgets(alone)[0].max_nodes
    num_plain, budgets = _plain_steps(policy, full)
    assert budgets[0] == TEST
    assert num_plain == policy.FIRST_TEST - 1


def test_trees_are_chosen_for_the_contexts_of_the_step_itself() -> None:
    """Not for the long one of the request before."""

    def policy() -> AutoPolicy:
        return AutoPolicy(CostModel(ContextCurve(SIZES, GROWING, 0.0, 0.0001), Curve((1, 64), [0.02] * 2)))

    fresh, used = policy(), policy()
    used.costs.observe(make_record(num_context=10**5, target_time=11.0))
    spans = [make_span() for _ in range(4)]
    assert used.budgets(spans) == fresh.budgets(spans) != [OFF] * 4


def test_the_request_that_takes_least_to_read_is_tested() -> None:
    policy = AutoPolicy(make_costs(draft_level=5.0))
    spans = [make_span(length=length) for length in (500, 20, 90)]
    for known in (1, 2):
        _, budgets = _plain_steps(policy, spans)
        assert [budget != OFF for budget in budgets] == [i == known for i in range(3)]
        spans[2].request.drafting.is_read = True


def test_a_batch_whose_rows_cost_as_much_as_its_tokens_save_has_no_drafter_read_for_a_test() -> None:
    """Also at length: there the drafter can show nothing that would change the choice."""
    policy, batch = AutoPolicy(make_costs(GROWING, read_token=0.1)), [make_span() for _ in range(100)]
    assert all(policy.budgets(batch) == [OFF] * 100 for _ in range(3 * policy.TEST_EVERY))
    policy.costs.adopt(Curve([1, 512, 1024], [16.0, 16.0, 32.0]))  # the machine changed
    assert any(policy.budgets(batch) != [OFF] * 100 for _ in range(policy.TEST_EVERY))


@pytest.mark.parametrize(("draft_level", "waits"), [(0.2, 40), (2.0, 400), (50.0, 1000)])
def test_tests_of_an_expensive_drafter_take_a_hundredth_of_the_time(draft_level: float, waits: int) -> None:
    """They are not put off for ever: the price may be wrong, and only drafting shows it."""
    policy = AutoPolicy(make_costs(GROWING, draft_level))
    policy.acceptance = AcceptanceModel.assumed((0.05,))
    policy.rank_choice = RankChoice(policy.costs, policy.acceptance)
    if draft_level == 0.2:  # at first the price is tried several times
        assert [_plain_steps(policy, [make_span(max_tokens=500)])[0] for _ in range(4)] == [3, 7, 15, 31]
    else:
        _plain_steps(policy, [make_span(max_tokens=500)])  # a part of what it loses was allowed before any step
    for _ in range(2):
        num_plain, budgets = _plain_steps(policy, [make_span(max_tokens=500)])
        assert budgets == [TEST]
        assert num_plain == pytest.approx(waits, abs=10)


def test_passes_are_not_measured_again_where_drafting_alone_takes_longer_than_it_saves() -> None:
    for draft_level, is_measured in ((5.0, False), (0.1, True)):
        policy = AutoPolicy(make_costs(draft_level=draft_level))
        policy.costs.target.observe(1, 3.0)
        policy.costs.adopt(policy.costs.target)  # type: ignore[arg-type]
        for _ in range(2 * policy.REVIEW):
            policy.budgets([make_span()])
            policy.observe(make_record(target_time=0.3), [(TokenTree.root(0), Acceptance((), 1))])
        assert policy.costs.is_doubtful
        assert (policy._remeasurement is not None) is is_measured


def test_a_prompt_that_seems_too_expensive_to_read_is_read_now_and_then() -> None:
    """The price of reading may be wrong, and only reading shows it. The shortest prompt is tried."""
    policy = AutoPolicy(make_costs(read_token=50.0))
    long, short = make_span(length=1000), make_span(length=100)
    num_plain, budgets = _plain_steps(policy, [long, short])
    assert num_plain == pytest.approx(policy.MAX_TEST_EVERY, abs=policy.TEST_REVIEW)
    assert budgets == [OFF, TEST]
    for _ in range(20):
        policy.observe(make_record(num_rows=4, num_guessed=3, num_levels=3, num_read=100, draft_time=0.1), [RIGHT])
    assert policy.rank_choice.pays_to_read(long.request, 2)


def test_steps_whose_passes_were_captured_do_not_change_the_costs() -> None:
    policy = AutoPolicy(make_costs())
    before = policy.costs.as_dict()
    step = make_record(num_rows=4, num_guessed=3, num_levels=3, target_time=9.0, draft_time=9.0)
    for is_first, is_same in ((True, True), (False, False)):
        policy.observe(replace(step, is_first_of_size=is_first), [RIGHT])
        assert (policy.costs.as_dict() == before) is is_same


def test_a_drafter_that_became_cheap_is_used_again() -> None:
    policy, span = AutoPolicy(make_costs(draft_level=5.0)), make_span()
    chosen = []
    for _ in range(60 * policy.TEST_EVERY):
        (budget,) = policy.budgets([span])
        chosen.append(budget)
        if budget == OFF:
            policy.observe(make_record(), [(TokenTree.root(0), Acceptance((), 1))])
        else:
            step = make_record(num_rows=4, num_guessed=3, num_levels=3, draft_time=0.003)
            policy.observe(step, [RIGHT])
    assert chosen[0] == OFF
    assert OFF not in chosen[-2 * policy.TEST_EVERY :]
    assert chosen[-1].max_depth > 2


def test_a_drafter_that_is_always_wrong_is_not_used() -> None:
    policy = AutoPolicy(make_costs(GROWING, 0.1))
    assert policy.rank_choice.choose(1).max_nodes
    for _ in range(600):
        policy.observe(make_record(num_rows=5, num_guessed=4, num_levels=1, draft_time=0.1), [WRONG])
    assert policy.rank_choice.choose(1) == OFF


def test_a_drafter_reads_a_long_prompt_only_if_that_saves_time() -> None:
    policy = AutoPolicy(make_costs(read_token=0.1))
    few, many = make_span(max_tokens=4, length=1000), make_span(num_output=800, max_tokens=1600, length=200)
    assert policy.budgets([few]) == [OFF]
    assert policy.budgets([many]) != [OFF]
    assert [budget == OFF for budget in policy.budgets([few, many])] == [True, False]
    few.request.drafting.is_read = True
    assert policy.budgets([few]) != [OFF], "what was read costs nothing more"


def test_a_first_token_waits_for_no_drafting_unless_a_pass_reads_its_weights_from_a_disk() -> None:
    spans = [make_span(num_output=0), make_span(num_output=1)]
    assert [bool(budget.max_nodes) for budget in AutoPolicy(make_costs()).budgets(spans)] == [False, True]
    streamed = CostModel(StreamedCurve([Pass(1, 4.0, 3.9), Pass(128, 4.0, 3.9)]), Curve((1, 64), [0.02] * 2))
    assert all(budget.max_nodes for budget in AutoPolicy(streamed).budgets(spans))


def _steps_with_trees(length: int, waited: float) -> tuple[bool, bool]:
    """Return whether requests get trees where another's first token is next, after so long, and with no such one."""
    policy = AutoPolicy(make_costs(GROWING))
    policy.planner.clock = lambda: waited
    others, first = [make_span() for _ in range(2)], make_span(num_output=0, length=length)
    first.request.times.arrival = 0.0
    with_first = policy.budgets([*others, Span(first.request, 0, length)])
    assert not with_first[-1].max_nodes
    return with_first[0].max_nodes > 0, policy.budgets(others)[0].max_nodes > 0


def test_trees_delay_no_first_token_of_others_noticeably() -> None:
    assert _steps_with_trees(100, 0.0) == (False, True)
    assert _steps_with_trees(100, 1000.0) == (True, True), "it has waited so long that trees make no difference"


def test_steps_that_read_prompts_do_not_change_the_costs() -> None:
    """Their passes are large for another reason, but the acceptance of their trees counts."""
    policy = AutoPolicy(make_costs())
    before, ranks = policy.costs.as_dict(), policy.acceptance.by_rank()
    policy.observe(make_record(num_rows=104, num_guessed=3, num_levels=3, target_time=9.0), [RIGHT])
    assert policy.costs.as_dict() == before
    assert policy.acceptance.by_rank()[0] > ranks[0]
    policy.observe(make_record(num_rows=4, num_guessed=3, num_levels=3, target_time=9.0, draft_time=0.1), [RIGHT])
    assert policy.costs.as_dict() != before


def test_where_weights_are_read_for_each_pass_prompts_show_the_cost_of_rows() -> None:
    """Very long ones do not, because their rows cost more than those of trees."""
    curve = StreamedCurve([Pass(1, 4.0, 3.9), Pass(128, 4.0, 3.9)])
    policy = AutoPolicy(CostModel(curve, Curve((1, 64), [0.02] * 2)))
    for rows, changes in ((2000, False), (400, True)):
        before = float(curve(300))
        policy.observe(make_record(num_rows=rows, num_guessed=3, num_levels=3, target_time=rows / 40), [RIGHT])
        assert (float(curve(300)) > before) is changes


@pytest.mark.parametrize(("seconds", "num_steps"), [(0.001, AutoPolicy.REVIEW), (1.0, 1)])
def test_choices_are_kept_for_some_steps_where_choosing_costs_time(
    seconds: float, num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = AutoPolicy(make_costs([seconds] * len(SIZES), seconds / 100))
    weighed: list[int] = []
    choose = policy.rank_choice.choose
    monkeypatch.setattr(policy.rank_choice, "choose", lambda count: weighed.append(count) or choose(count))
    spans = [make_span() for _ in range(3)]
    for _ in range(2 * num_steps):
        policy.budgets(spans)
    assert weighed == [3, 3]
    policy.budgets(spans[:2])
    assert weighed == [3, 3, 2], "another number of requests needs another choice"


def test_the_reason_for_plain_decoding_names_the_pass_the_drafter_the_batch_or_the_acceptance() -> None:
    """Whichever it is that would have to change."""
    span, steep = make_span(num_output=9), (1.0, 1.9, 3.8, 7.6, 15.2, 30.4, 60.8, 121.6, 243.2, 486.4)
    reasons = {}
    for name, costs, count, rate in (
        ("pass", make_costs(steep), 1, 0.6),
        ("drafter", make_costs(draft_level=5.0), 1, 0.6),
        ("batch", make_costs(GROWING), 600, 0.6),
        ("acceptance", make_costs(GROWING, 0.1), 1, 0.01),
        ("none", make_costs(GROWING), 1, 0.6),
    ):
        policy = AutoPolicy(costs)
        policy.acceptance = AcceptanceModel.assumed([rate, 0.01])
        policy.rank_choice = RankChoice(costs, policy.acceptance)
        policy.budgets([span] * count)
        span.request.drafting.is_read = True
        reasons[name] = policy.reason(span.request)
        assert (reasons[name] or policy.summary()).startswith("auto: ")
    assert reasons == {
        "pass": "auto: plain decoding, a pass over 2 tokens costs 1.9 times one here",
        "drafter": "auto: plain decoding, drafting 1 token takes 5.0 times as long as a pass",
        "batch": "auto: plain decoding, in a batch of 600 requests "
        "a pass over 1200 tokens costs 2.0 times one over 600",
        "acceptance": "auto: plain decoding, only 1% of the first draft tokens are accepted, and "
        "drafting 1 token takes 0.1 times as long as a pass",
        "none": None,
    }


def test_the_summary_at_load_is_of_a_single_request_and_changes_nothing() -> None:
    policy = AutoPolicy(make_costs(GROWING))
    assert policy.summary().startswith("auto: up to ")
    assert "times the speed of plain decoding expected" in policy.summary()
    assert policy.budgets([make_span()] * 600) == [OFF] * 600
    assert AutoPolicy(make_costs(draft_level=5.0)).summary().startswith("auto: plain decoding, drafting 1 token")

"""Budgets for lookups alone: they rest while looking up takes more time than it saves."""

from dataclasses import replace

import pytest

from specinfer import StructuredOutputsParams
from specinfer.core.grammar.compiler import GrammarCompiler
from specinfer.core.request import Span
from specinfer.core.tree import OFF, TokenTree, TreeBudget
from specinfer.core.tree_shape import TreeShape
from specinfer.policy.auto_policy import AutoPolicy
from specinfer.policy.lookup_policy import LookupPolicy
from specinfer.policy.request_policy import make_policy
from specinfer.verify import Acceptance
from tests.policy.simulated_machines import GROWING, SIZES, make_costs, make_record, make_span
from tiny import EOS, VOCAB, make_tokenizer

COMPILER = GrammarCompiler(make_tokenizer(), VOCAB, (EOS,))
OLD = [make_span(num_output=5)]


def _num_asked(policy: LookupPolicy, num_accepted: int, draft_time: float, num_steps: int = 1000) -> int:
    """Return in how many of the steps lookups draft, if each finds this many tokens and takes this share of a pass."""
    num_asked = 0
    for _ in range(num_steps):
        is_asked = policy.budget(OLD) != OFF
        num_asked += is_asked
        found = num_accepted if is_asked else 0
        path = tuple(range(1, found + 1))
        step = make_record(num_rows=1 + found, num_guessed=found, draft_time=draft_time * is_asked, num_model_levels=0)
        policy.observe(step, [Acceptance(path, 1)])
    return num_asked


@pytest.mark.parametrize(
    ("num_accepted", "draft_time", "share"), [(2, 0.05, 1.0), (0, 0.005, 1.0), (0, 0.05, 0.25), (0, 5.0, 0.15)]
)
def test_lookups_draft_as_long_as_they_save_time(num_accepted: int, draft_time: float, share: float) -> None:
    policy = LookupPolicy(make_costs(), ["suffix"])
    assert _num_asked(policy, num_accepted, draft_time) / 1000 == pytest.approx(share, abs=0.06)


def test_lookups_are_tried_again_with_a_new_request() -> None:
    policy = LookupPolicy(make_costs(), ["suffix"])
    while policy.budget(OLD) != OFF:
        _num_asked(policy, 0, 0.5, 1)
    assert policy.budget([make_span(num_output=1)]) != OFF


def test_what_was_gained_on_one_text_is_soon_forgotten_on_the_next() -> None:
    policy = LookupPolicy(make_costs(), ["suffix"])
    assert _num_asked(policy, 8, 0.05, 200) == 200
    policy.budget([make_span(num_output=1)])
    assert _num_asked(policy, 0, 0.05, 200) < 120


def test_what_was_lost_on_one_text_does_not_count_on_the_next() -> None:
    """There a single draft that is wrong would make lookups rest for many tokens."""
    policy, step = LookupPolicy(make_costs(), ["suffix"]), make_record(num_rows=4, num_guessed=3, num_model_levels=0)
    while policy._gain > -0.009:
        policy.budget(OLD)
        policy.observe(replace(step, draft_time=0.05), [Acceptance((), 1)])
    assert policy.budget([make_span(num_output=1)]) != OFF
    policy.observe(replace(step, draft_time=0.3), [Acceptance((), 1)])
    assert policy.budget(OLD) != OFF


def test_a_draft_token_of_a_lookup_must_be_worth_its_row() -> None:
    cheap, dear = (LookupPolicy(make_costs(seconds), ["suffix"]).budget(OLD) for seconds in ((1.0,) * 10, GROWING))
    assert 0 <= cheap.min_path_prob < dear.min_path_prob <= 0.5
    assert cheap.drafters == {"suffix"}


def _spans_with_grammar() -> list[Span]:
    spans = [make_span(num_output=3), make_span(num_output=0), make_span(num_output=3)]
    for span in spans[:2]:
        span.request.grammar = COMPILER.compile(StructuredOutputsParams(choice=["the cat", "and it"]))
    return spans


def test_auto_takes_forced_tokens_where_it_decodes_plainly_but_not_before_the_first_token() -> None:
    policy = AutoPolicy(make_costs(draft_level=5.0))
    spans = _spans_with_grammar()
    assert policy.budgets(spans) == [OFF] * 3
    forced, first, other = policy.with_forced(spans, [OFF] * 3)
    assert (first, other) == (OFF, OFF)
    assert forced.max_nodes >= 16
    assert forced.asks_none
    assert not forced.asks("suffix")


def test_forced_tokens_do_not_raise_the_limits_of_drafters() -> None:
    policy, budget = AutoPolicy(make_costs()), TreeBudget(3, 2, min_path_prob=0.2, min_gain=0.1)
    (forced, *_) = policy.with_forced(_spans_with_grammar(), [budget] * 3)
    assert min(forced.max_nodes, forced.max_depth) >= 16
    assert forced.with_models == budget


def test_a_forced_token_must_save_more_than_its_row_takes() -> None:
    cheap, dear = (
        AutoPolicy(make_costs(seconds)).with_forced(_spans_with_grammar(), [OFF] * 3)[0]
        for seconds in ((1.0,) * 10, [float(size) for size in SIZES])
    )
    assert cheap.min_path_prob == 0
    assert dear.min_path_prob == AutoPolicy.FORCED_LIKELY


def test_what_grammars_alone_draft_says_nothing_about_drafters() -> None:
    policy = AutoPolicy(make_costs(draft_level=5.0))
    before = policy.acceptance.by_rank().tolist()
    tree = TokenTree.chain(0, [1, 2], "grammar")
    policy.observe(make_record(num_rows=3, num_guessed=2), [(tree, Acceptance((1, 2), 5))])
    assert policy.acceptance.by_rank().tolist() == before
    policy.observe(make_record(num_rows=3, num_guessed=2), [(TokenTree.chain(0, [1, 2], "a"), Acceptance((1, 2), 5))])
    assert policy.acceptance.by_rank().tolist() != before


def test_a_grammar_is_one_more_drafter_of_a_fixed_expansion() -> None:
    policy = make_policy(TreeShape((2, 1)), make_costs, 2)
    spans = _spans_with_grammar()
    budgets = policy.with_forced(spans, policy.budgets(spans))
    assert [budget.num_drafters for budget in budgets] == [3, 3, 2]


def test_auto_asks_lookups_alone_where_no_model_pays_but_not_before_the_first_token() -> None:
    policy = AutoPolicy(make_costs(draft_level=5.0), ["suffix"])
    later_span = make_span(num_output=3)
    first, later = policy.budgets([make_span(num_output=0), later_span])
    assert first == OFF
    assert later.drafters == {"suffix"}
    before = policy.acceptance.by_rank().tolist()
    policy.observe(make_record(num_rows=2, num_model_levels=0), [])
    assert policy.acceptance.by_rank().tolist() == before
    assert str(policy.reason(later_span.request)).startswith("auto: only suffix drafts, drafting")
    assert AutoPolicy(make_costs(draft_level=5.0)).budgets([make_span()]) == [OFF], "a lookup that is alone has costs"

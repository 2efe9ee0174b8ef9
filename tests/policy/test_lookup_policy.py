"""Budgets for lookups alone: they rest while looking up takes more time than it saves."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from specinfer import StructuredOutputsParams
from specinfer.core.grammar.compiler import GrammarCompiler
from specinfer.core.request import Request, Span
from specinfer.core.tree import OFF, TokenTree, TreeBudget
from specinfer.core.tree_shape import TreeShape
from specinfer.drafters import MergedDrafter
from specinfer.drafters.lookup.grammar import COPIED
from specinfer.policy.auto_policy import AutoPolicy
from specinfer.policy.cost_model import CostModel
from specinfer.policy.curves import Curve
from specinfer.policy.lookup_policy import LookupPolicy
from specinfer.policy.rank_choice import TreeSizes
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
    assert max(cheap.row_prices) == 0
    assert all(price > 0 for price in np.diff(dear.row_prices))
    assert dear.row_prices[14] == pytest.approx(1.3 * 0.4), "15 rows more make a pass 1.4 times as long"
    assert cheap.drafters == {"suffix"}


def test_a_row_costs_the_tokens_of_all_requests() -> None:
    linear = LookupPolicy(make_costs([float(size) for size in SIZES]), ["suffix"])
    prices = linear.budget([make_span(num_output=5)] * 8).row_prices
    assert len(prices) == 8 * 16
    assert min(np.diff(prices)) > 1, "no draft token is so likely"


def test_slow_passes_whose_rows_are_free_take_more_nodes() -> None:
    assert LookupPolicy(make_costs(GROWING), ["suffix"]).budget(OLD).max_nodes == 16
    assert LookupPolicy(make_costs(), ["suffix"]).budget(OLD).max_nodes > 100


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
    assert cheap.row_prices[0] == 0
    assert dear.row_prices[0] > 1


@pytest.mark.parametrize("name", ["grammar", COPIED])
def test_what_grammars_alone_draft_says_nothing_about_drafters(name: str) -> None:
    policy = AutoPolicy(make_costs(draft_level=5.0))
    before = policy.acceptance.by_rank().tolist()
    tree = TokenTree.chain(0, [1, 2], name)
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
    assert str(policy.reason(later_span.request)).startswith("auto: no model drafts in most passes, drafting")
    assert AutoPolicy(make_costs(draft_level=5.0)).budgets([make_span()]) == [OFF], "a lookup that is alone has costs"


def test_lookups_without_a_model_draft_by_the_price_of_rows() -> None:
    policy, span = AutoPolicy(make_costs(GROWING), ["suffix"], has_models=False), make_span(num_output=3)
    (budget,) = policy.budgets([span])
    assert budget.row_prices
    assert budget.drafters == {"suffix"}
    assert policy.reason(span.request) is None
    while policy.budgets([span]) != [OFF]:
        policy.observe(make_record(num_model_levels=0, draft_time=0.1), [])
    assert policy.reason(span.request) == "auto: plain decoding, drafts of suffix save no time here"


def test_on_a_device_trees_of_lookups_have_sizes_of_captured_passes() -> None:
    costs = make_costs()
    costs.max_rows = 64
    (budget,) = AutoPolicy(costs, ["suffix"], has_models=False).budgets([make_span(num_output=3)])
    assert budget.max_nodes in TreeSizes.DEVICE_SIZES
    assert not budget.row_prices


class _Coin:
    """A lookup that proposes so many tokens, which are all right in a share of the steps, and never tells which."""

    name = "suffix"

    def __init__(self, num_tokens: int) -> None:
        self._tokens = [1] * num_tokens

    def draft(self, spans: Sequence[Span], budgets: Sequence[TreeBudget]) -> list[TokenTree]:
        return [
            TokenTree.chain(span.request.token_ids[-1], self._tokens[: budget.max_nodes], self.name, 0.6)
            for span, budget in zip(spans, budgets, strict=True)
        ]

    def observe(self, request: Request, tree: TokenTree, acceptance: Acceptance) -> None:
        pass

    def forget(self, request_id: str) -> None:
        pass


@pytest.mark.parametrize(
    ("num_tokens", "share", "least"), [(1, 0.3, 0.98), (1, 0.6, 0.97), (1, 0.95, 0.98), (8, 0.3, 0.97), (8, 0.7, 1.5)]
)
def test_a_lookup_gains_where_it_repays_the_second_row_and_loses_nowhere(
    num_tokens: int, share: float, least: float
) -> None:
    """On processors without instructions for small products the second row costs most of a pass."""
    milliseconds = np.asarray([57.0, 100.0, 107.0, 160.0, 240.0])
    costs, random = CostModel(Curve((1, 2, 4, 8, 14), milliseconds / 1e3), Curve([1], [1e-4])), np.random.default_rng(0)
    drafter, policy = MergedDrafter([_Coin(num_tokens)]), AutoPolicy(costs, ["suffix"], has_models=False)
    true, request, seconds = Curve(costs.target.sizes, costs.target.seconds), make_span(num_output=2).request, 0.0
    while request.num_output < 1000:
        spans = [Span(request, len(request.token_ids) - 1, len(request.token_ids))]
        budgets = policy.budgets(spans)
        is_right = random.random() < share
        (tree,) = drafter.draft(spans, budgets) if budgets != [OFF] else [TokenTree.root(1)]
        path = tuple(range(1, len(tree))) if is_right else ()
        next_token = 1 if is_right and not path else 2
        request.token_ids += [1] * len(path) + [next_token]
        drafter.observe(request, tree, acceptance := Acceptance(path, next_token))
        step = make_record(
            num_rows=len(tree), num_guessed=tree.num_guessed, num_generated=1 + len(path), num_model_levels=0,
            target_time=float(true(len(tree))),
        )  # fmt: skip
        policy.observe(step, [(tree, acceptance)])
        seconds += step.time
    assert request.num_output * 0.057 / seconds >= least

"""Merged drafters: how trees are united and share a budget, and that a broken drafter costs only its drafts."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from drafting import draft_expansion, draft_within
from specinfer.core.request import Request, Span
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree import OFF, Distribution, Draw, TokenTree, TreeBudget
from specinfer.drafters import (
    MergedDrafter,
    NGramDrafter,
    PredictionDrafter,
    make_drafter,
)
from specinfer.drafters.growth.calibration import source
from specinfer.drafters.kind import DraftKind
from specinfer.drafters.merge.budget_split import BudgetSplit
from specinfer.drafters.merge.guarded import MAX_FAILURES
from specinfer.drafters.merge.merged import levels_of_models
from specinfer.model.runner import ModelRunner
from specinfer.verify import Acceptance
from tiny import VOCAB, make_engine, make_request, paths_of, random_prompts, resized, run

GREEDY = SamplingParams(temperature=0.0, max_tokens=20)


class Script:
    """A drafter that returns what a function says."""

    def __init__(self, name: str, make: Callable[[Span, TreeBudget], Any], several: Callable[[list[Any]], Any] = list):
        self.name, self._make, self._several = name, make, several
        self.forgotten: list[str] = []

    def draft(self, spans: Sequence[Span], budgets: Sequence[TreeBudget]) -> list[TokenTree]:
        return self._several([self._make(span, budget) for span, budget in zip(spans, budgets, strict=True)])

    def observe(self, request: Request, tree: TokenTree, acceptance: Acceptance) -> None:
        pass

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)


def _chain(*guesses: int) -> Callable[[Span, TreeBudget], TokenTree]:
    return lambda span, budget: TokenTree.chain(
        span.request.token_ids[-1], guesses[: min(budget.max_nodes, budget.max_depth)], "toy"
    )


def _raise(span: Span, budget: TreeBudget) -> TokenTree:
    raise RuntimeError("broken on purpose")


def _tree(*paths: Sequence[int], name: str = "toy", confidence: float = 0.5) -> Callable[..., TokenTree]:
    """These chains in one tree, as far as the budget goes."""

    def make(span: Span, budget: TreeBudget) -> TokenTree:
        root = span.request.token_ids[-1]
        chains = [TokenTree.chain(root, path[: budget.max_depth], name, confidence) for path in paths]
        tree = TokenTree.merge(chains)
        draws = {draw.node: draw for draw in reversed(tree.draws)}
        tree = TokenTree(tree.tokens, tree.parents, tuple(draws[node] for node in range(1, len(tree))))
        return tree.keep(range(min(len(tree), budget.max_nodes + 1)))

    return make


def test_fixed_expansions_are_united() -> None:
    merged = MergedDrafter([Script("a", _chain(1, 2)), Script("b", _chain(1, 3))])
    assert merged.name == "a+b"
    request = make_request("0", [5])
    assert paths_of(draft_expansion(merged, request, 2, 2)) == [(), (1,), (1, 2), (1, 3)]
    assert paths_of(draft_expansion(merged, request, 1, 1)) == [(), (1,), (1, 2), (1, 3)], "each grows a whole one"
    assert [draw.node for draw in draft_expansion(merged, request, 1, 1).draws] == [1, 2, 1, 3]


def test_each_drafter_is_asked_for_the_whole_expansion() -> None:
    asked: list[TreeBudget] = []

    def noted(span: Span, budget: TreeBudget) -> TokenTree:
        asked.append(budget)
        return TokenTree.root(span.request.token_ids[-1])

    merged = MergedDrafter([Script("a", noted), Script("b", noted)])
    draft_expansion(merged, make_request("0", [5]), 2, 1)
    assert asked == [TreeBudget.expansion((2, 1))] * 2
    asked.clear()
    draft_within(merged, make_request("0", [5]), TreeBudget(6, 3, min_path_prob=0.1))
    assert asked == [TreeBudget(6, 3, min_path_prob=0.1)] * 2, "chosen guesses compete: each may offer all"


def test_only_the_drafters_that_a_budget_names_are_asked() -> None:
    asked: list[str] = []

    def noted(name: str) -> Callable[[Span, TreeBudget], TokenTree]:
        def make(span: Span, budget: TreeBudget) -> TokenTree:
            asked.append(name)
            return _chain(1)(span, budget)

        return make

    merged = MergedDrafter([Script(name, noted(name)) for name in "abc"])
    request = make_request("0", [5])
    for budget in (TreeBudget(4, 2, drafters=frozenset("ac")), TreeBudget.expansion((1, 1), 3)):
        draft_within(merged, request, replace(budget, drafters=frozenset("ac")).cut(1, 3))
        assert asked == ["a", "c"], "also when the budget was cut"
        asked.clear()
    guided = make_request("1", [5], prediction_ids=(5, 6, 7))
    tree = draft_within(MergedDrafter([PredictionDrafter(), Script("a", noted("a"))]), guided,
                   TreeBudget(4, 2, drafters=frozenset()))  # fmt: skip
    assert paths_of(tree) == [(), (5,), (5, 6)], "a prediction is the request's own"
    assert not asked


class ModelScript(Script):
    """A drafter that counts as a model, each level of which costs a pass."""

    kind = DraftKind()


SURE, UNSURE = 0.995, 0.02  # confidences of a lookup
LIMITS = TreeBudget(8, 8, min_path_prob=0.01, with_models=TreeBudget(2, 2, min_gain=0.3))


@pytest.mark.parametrize(("confidence", "num_paths"), [(SURE, 7), (UNSURE, 3)])
def test_a_model_is_asked_only_where_its_levels_add_to_what_lookups_are_sure_of(
    confidence: float, num_paths: int
) -> None:
    asked: list[TreeBudget] = []

    def noted(span: Span, budget: TreeBudget) -> TokenTree:
        asked.append(budget)
        return _tree((7, 8), name="model", confidence=0.9)(span, budget)

    lookup = Script("suffix", _tree((1, 2, 3, 4, 5, 6), name="suffix", confidence=confidence))
    merged, request = MergedDrafter([lookup, ModelScript("model", noted)]), make_request("0", [5])
    for _ in range(50):
        merged.calibration.count(source("suffix", request), 0, SURE, kept=True)
        merged.calibration.count(source("suffix", request), 0, UNSURE, kept=False)
    tree = draft_within(merged, request, LIMITS)
    assert len(tree) == num_paths, "lookups alone have limits of their own, and share those of models otherwise"
    is_asked = confidence == UNSURE
    assert asked == [LIMITS.with_models] * is_asked
    assert merged.num_model_levels == levels_of_models(merged, [tree], [LIMITS]) == [2 * is_asked]
    assert LIMITS.cut(1, 1).with_models == TreeBudget(1, 1, min_gain=0.3)


def test_lookups_leave_room_for_models_whose_tokens_may_not_be_dropped() -> None:
    lookup = Script("suffix", _tree((1, 2, 3, 4, 5, 6), name="suffix", confidence=SURE))
    merged = MergedDrafter([lookup, ModelScript("model", _tree((7, 8), name="model"))], may_choose=False)
    tree = draft_within(merged, make_request("0", [5]), LIMITS)
    assert tree.num_guessed == 2
    assert {draw.drafter for draw in tree.draws} == {"suffix", "model"}


@pytest.mark.parametrize("confidence", [SURE, UNSURE])
def test_a_model_that_is_not_asked_has_read_nothing(confidence: float, runner_of: Callable[..., ModelRunner]) -> None:
    """Else what it reads later would count as the time of a level."""
    lookup = Script("suffix", _tree((1, 2, 3, 4, 5, 6), name="suffix", confidence=confidence))
    merged = MergedDrafter([lookup, ModelScript("model", _tree((7, 8), name="model"))])
    request = make_request("0", [3, 1, 4], GREEDY)
    for _ in range(50):
        merged.calibration.count(source("suffix", request), 0, SURE, kept=True)
        merged.calibration.count(source("suffix", request), 0, UNSURE, kept=False)
    engine = make_engine(runner_of("llama"), merged, LIMITS)
    engine.add(request)
    for _ in range(2):
        engine.step()
    records = engine.metrics.recent
    is_asked = confidence == UNSURE
    assert request.drafting.is_read is is_asked
    engine.abort(request)
    assert records[-1].num_model_levels == 2 * is_asked
    assert (sum(record.num_read for record in records) > 0) is is_asked


def test_levels_of_a_model_count_also_where_lookups_crowd_its_tokens_out() -> None:
    lookup = Script("suffix", _tree((1, 2), name="suffix", confidence=SURE))
    merged = MergedDrafter([lookup, ModelScript("model", _tree((7, 8), name="model", confidence=0.01))])
    tree = draft_within(merged, make_request("0", [5]), TreeBudget(2, 2))
    assert {draw.drafter for draw in tree.draws} == {"suffix"}
    assert merged.num_model_levels == [2]


BEST_FIRST_DRAFTERS: list[Callable[..., TokenTree]] = [
    _tree((1, 2, 3), (4, 5), name="a", confidence=0.6),
    _tree((1, 2, 6), (7, 8, 9), name="b", confidence=0.5),
    _tree((4, 9), name="c", confidence=0.9),
]


@pytest.mark.parametrize("max_nodes", range(1, 14))
def test_best_first_guesses_compete_for_one_budget(max_nodes: int) -> None:
    drafters = [Script(name, make) for name, make in zip("abc", BEST_FIRST_DRAFTERS, strict=True)]
    merged, request = MergedDrafter(drafters), make_request("0", [5])
    tree = draft_within(merged, request, TreeBudget(max_nodes, 3))
    assert tree.num_guessed == min(max_nodes, 10), "so many different paths there are, each with its parent"
    assert paths_of(tree)[0] == ()
    assert paths_of(tree)[1] in {(1,), (4,)}
    assert (4,) in paths_of(tree), "the surest of all"


def test_what_is_hardly_ever_accepted_is_left_out_of_the_competition() -> None:
    good, poor = Script("good", _tree((1, 2, 3), name="good")), Script("poor", _tree((4, 5, 6), name="poor"))
    for order in ([good, poor], [poor, good]):
        merged, request = MergedDrafter(order), make_request("0", [5])
        budget = TreeBudget(3, 3)
        for _ in range(60):
            tree = draft_within(merged, request, TreeBudget(6, 3))
            path = tree.path(next(n for n in range(len(tree)) if tree.path_tokens(n) == (1, 2, 3)))
            merged.observe(request, tree, Acceptance(path, 0))
        assert paths_of(draft_within(merged, request, budget)) == [(), (1,), (1, 2), (1, 2, 3)]
        assert len(draft_within(merged, request, TreeBudget(6, 3, min_path_prob=0.3))) == 4, (
            "the others are not worth it"
        )
        merged.forget("0")


DRAWN_DISTRIBUTION = Distribution(np.arange(10), np.full(10, 0.1))


def _drawn(name: str, *tokens: int) -> Script:
    """Draws with a distribution, as many of these tokens as the budget allows, below the root."""

    def make(span: Span, budget: TreeBudget) -> TokenTree:
        said = tokens[: budget.max_nodes]
        draws = tuple(Draw(node, name, DRAWN_DISTRIBUTION) for node in range(1, len(said) + 1))
        return TokenTree((span.request.token_ids[-1], *said), (-1,) + (0,) * len(said), draws)

    return Script(name, make)


@pytest.mark.parametrize("max_nodes", [1, 2, 3, 8, 20])
def test_drawn_guesses_share_a_budget_and_none_is_dropped(max_nodes: int) -> None:
    merged = MergedDrafter([_drawn("a", 1, 2, 3, 4, 5), _drawn("b", 1, 6, 7, 8, 9, 2)], may_choose=False)
    request, budget = make_request("0", [5]), TreeBudget(max_nodes, 2)
    tree = draft_within(merged, request, budget)
    assert len(tree.draws) == min(max_nodes, 11), "what the first one leaves over is for the second"
    assert all(draw.distribution is DRAWN_DISTRIBUTION for draw in tree.draws)
    names = [draw.drafter for draw in tree.draws]
    assert names == sorted(names), "in the order of the drafters"
    if max_nodes == 8:
        assert names.count("a") == 4, "equal shares, as long as nothing is known"
        of_second = next(draw.node for draw in tree.draws if draw.drafter == "b" and draw.node > 4)
        for _ in range(100):
            merged.observe(request, tree, Acceptance((of_second,), 0))
        assert [draw.drafter for draw in draft_within(merged, request, budget).draws].count("b") > 4


def test_tokens_of_lookups_must_be_probable_enough_under_rules_that_draw_too() -> None:
    """They were chosen, so they may be dropped; drawn ones are kept."""
    budget = TreeBudget(8, 8, min_path_prob=0.3)
    sizes = []
    for drafter in (Script("lookup", _chain(*range(1, 9))), _drawn("draws", *range(1, 9))):
        merged, request = MergedDrafter([drafter], may_choose=False), make_request("0", [5])
        request.verification = "traversal"
        for _ in range(100):  # one token is right, and no other
            merged.observe(request, draft_within(merged, request, TreeBudget(8, 8)), Acceptance((1,), 0))
        sizes.append(draft_within(merged, request, budget).num_guessed)
    assert sizes == [1, 8]


def test_lookups_are_asked_alone_under_every_rule() -> None:
    merged, request = MergedDrafter([Script("lookup", _chain(7, 8))], may_choose=False), make_request("0", [5])
    request.verification = "traversal"
    (tree,) = merged.look_up([Span(request, 0, 1)], [TreeBudget(8, 8)])
    assert paths_of(tree) == [(), (7,), (7, 8)]


def test_shares_follow_what_was_accepted() -> None:
    budget_split = BudgetSplit(["a", "b", "c"])
    assert budget_split.share(30, [0, 1, 2]) == 10
    assert budget_split.share(30, [1, 2]) == 15
    assert budget_split.share(30, [2]) == 30, "the last has all that is left"
    assert budget_split.share(0, [0, 1]) == 0
    tree = TokenTree((0, 5, 6), (-1, 0, 1), (Draw(1, "a"), Draw(2, "a"), Draw(1, "b"), Draw(1, "b")))
    for _ in range(200):
        budget_split.observe(tree, Acceptance((1, 2), 7))
    # a: 1 + 1/2 a tree, b: 1/2, c: nothing; squared 9 : 1 : 0, and every one keeps a little.
    assert budget_split.share(1000, [0, 1]) == pytest.approx(900, abs=5)
    assert budget_split.share(1000, [2, 0, 1]) == pytest.approx(1000 * 0.1 / 3, abs=5)
    for _ in range(400):
        budget_split.observe(TokenTree.chain(0, [5], "c"), Acceptance((1,), 7))
    assert budget_split.share(1000, [2, 0, 1]) > 900, "what changes is followed"


def test_drafters_of_which_nothing_was_accepted_for_long_share_evenly() -> None:
    """A drafter so poor that its share rounds to no node is asked alone once the others have had their nodes."""
    budget_split, tree = BudgetSplit(["a", "b", "c"]), TokenTree.chain(0, [5], "a")
    for _ in range(40_000):
        budget_split.observe(tree, Acceptance((1,), 7))
    assert budget_split.share(8, [0, 1, 2]) == 7
    assert budget_split.share(8, [1, 2]) == 4
    assert budget_split.share(8, [2]) == 8


def test_a_drafter_without_guesses_costs_nothing() -> None:
    silent = Script("silent", lambda span, budget: TokenTree.root(span.request.token_ids[-1]))
    request = make_request("0", [5])
    for order in ([silent, Script("b", _chain(7, 8))], [Script("b", _chain(7, 8)), silent]):
        for may_choose in (True, False):
            merged = MergedDrafter(order, may_choose=may_choose)
            assert paths_of(draft_expansion(merged, request, 1, 1)) == [(), (7,), (7, 8)]
            assert paths_of(draft_within(merged, request, TreeBudget(9, 2))) == [(), (7,), (7, 8)]
    mute = Script("mute", lambda span, budget: TokenTree.root(span.request.token_ids[-1]))
    assert draft_expansion(MergedDrafter([silent, mute]), request, 2) == TokenTree.root(5)
    assert draft_within(MergedDrafter([silent]), request, OFF) == TokenTree.root(5)


class Sulking(Script):
    """Guesses, but cannot be told anything."""

    def observe(self, *_: Any) -> None:
        raise RuntimeError("no more")

    forget = observe


def test_a_drafter_that_fails_to_observe_and_forget_ends_no_step(runner_of: Callable[..., ModelRunner]) -> None:
    runner = runner_of("llama")
    (plain,) = run(make_engine(runner), [make_request("0", [3, 1, 4], SamplingParams(temperature=0, max_tokens=8))])
    merged = MergedDrafter([Sulking("bad", _chain(7)), Script("b", _chain(9, 9))])
    request = make_request("1", [3, 1, 4], SamplingParams(temperature=0, max_tokens=8))
    assert run(make_engine(runner, merged, (1, 1)), [request]) == [plain]


def test_a_drafter_of_unknown_tokens_does_not_cost_the_others_guesses() -> None:
    merged = MergedDrafter([Script("bad", _chain(VOCAB)), Script("b", _chain(7))], vocab_size=VOCAB)
    for _ in range(MAX_FAILURES + 2):
        assert paths_of(draft_expansion(merged, make_request("0", [5]), 1)) == [(), (7,)]


def test_one_failing_drafter_leaves_the_others_guesses(caplog: pytest.LogCaptureFixture) -> None:
    broken = Script("broken", _raise)
    merged = MergedDrafter([broken, Script("b", _chain(7))])
    with caplog.at_level(logging.ERROR, logger="specinfer"):
        assert paths_of(draft_expansion(merged, make_request("0", [5]), 1)) == [(), (7,)]
    assert "broken" in caplog.text
    assert broken.forgotten == ["0"]
    alone = MergedDrafter([broken])
    assert draft_expansion(alone, make_request("0", [5]), 1) == TokenTree.root(5)


def test_a_drafter_that_fails_again_and_again_is_asked_no_more(caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    def fails(span: Span, budget: TreeBudget) -> TokenTree:
        calls.append(budget)
        raise RuntimeError("broken on purpose")

    merged = MergedDrafter([Script("broken", fails), Script("b", _chain(7))], may_choose=False)
    with caplog.at_level(logging.ERROR, logger="specinfer"):
        for _ in range(MAX_FAILURES + 3):
            assert paths_of(draft_within(merged, make_request("0", [5]), TreeBudget(2, 1))) == [(), (7,)]
    assert len(calls) == MAX_FAILURES
    assert "asked no more" in caplog.text


def test_failures_of_a_drafter_count_only_if_they_follow_each_other() -> None:
    calls = []

    def fails_but_once_in_a_while(span: Span, budget: TreeBudget) -> TokenTree:
        calls.append(budget)
        if len(calls) % MAX_FAILURES:
            raise RuntimeError("broken on purpose")
        return TokenTree.root(span.request.token_ids[-1])

    merged = MergedDrafter([Script("moody", fails_but_once_in_a_while), Script("b", _chain(7))], may_choose=False)
    for _ in range(3 * MAX_FAILURES):
        draft_within(merged, make_request("0", [5]), TreeBudget(2, 1))
    assert len(calls) == 3 * MAX_FAILURES


def test_a_prediction_is_followed_and_not_needed(runner_of: Callable[..., ModelRunner]) -> None:
    """Right, wrong or absent: the tokens are those of plain decoding, and a right one saves passes."""
    runner, prompt = resized(runner_of("llama"), 400), [3, 1, 4]
    (plain,) = run(make_engine(runner), [make_request("0", prompt, GREEDY)])
    passes = []
    for said in ((), tuple(plain), (9,) * 20, (*plain[:8], 50, *plain[9:])):
        drafter = make_drafter(["ngram"], VOCAB)
        request = make_request("0", prompt, GREEDY, prediction_ids=said)
        assert run(make_engine(runner, drafter, (1, 1, 1, 1)), [request]) == [plain]
        passes.append(request.speculation.num_target_passes)
        if said == tuple(plain):
            assert request.origins.count("prediction") == 16
    assert passes[1] == 4, "five tokens a pass"
    assert passes[1] < passes[3] < min(passes[0], passes[2])


def test_make_drafter(runner_of: Callable[..., ModelRunner]) -> None:
    assert make_drafter([], VOCAB) is None
    drafter = make_drafter(["ngram", runner_of("llama")], VOCAB, ["ngram", "tiny"])
    assert drafter is not None
    assert drafter.name == "prediction+grammar+ngram+tiny"
    assert drafter.num_drafters == 2, "a prediction is not there for every request"


def _oversized(span: Span, budget: TreeBudget) -> TokenTree:
    return TokenTree.chain(span.request.token_ids[-1], [3] * 5000)


NONSENSE: dict[str, tuple[Callable[[Span, TreeBudget], Any], Callable[[list[Any]], Any]]] = {
    "raises": (_raise, list),
    "wrong root": (lambda span, budget: TokenTree.chain((span.request.token_ids[-1] + 1) % VOCAB, [3, 4]), list),
    "outside the vocabulary": (_chain(VOCAB, VOCAB + 5), list),
    "far outside the vocabulary": (_chain(2**40), list),
    "negative": (_chain(-1, 3), list),
    "far too large": (_oversized, list),
    "too few": (_chain(3), lambda trees: trees[1:]),
    "too many": (_chain(3), lambda trees: [*trees, *trees]),
    "none at all": (_chain(3), lambda trees: None),
    "none inside": (_chain(3), lambda trees: [None for _ in trees]),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", NONSENSE)
@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(max_tokens=20, repetition_penalty=1.2)], ids=["greedy", "sampled"]
)
@pytest.mark.filterwarnings("ignore")
def test_nonsense_never_fails_a_step(kind: str, params: SamplingParams, runner_of: Callable[..., ModelRunner]) -> None:
    """Whatever a drafter returns, tokens are those of plain decoding."""
    runner = resized(runner_of("llama"), 300)
    prompts = random_prompts([4, 7, 11])

    def requests() -> list[Request]:
        return [make_request(str(i), prompt, params, seed=i) for i, prompt in enumerate(prompts)]

    plain = run(make_engine(runner), requests())
    for others in ([], [NGramDrafter()]):
        engine = make_engine(runner, MergedDrafter([*others, Script("bad", *NONSENSE[kind])]), (2, 2))
        asked = requests()
        try:
            assert run(engine, asked) == plain
        finally:
            for request in asked:
                engine.abort(request)


@pytest.mark.parametrize("kind", ["raises", "wrong root", "too few", "too many", "none at all", "none inside"])
def test_nonsense_costs_no_other_drafter_its_guesses(
    kind: str, runner_of: Callable[..., ModelRunner], caplog: pytest.LogCaptureFixture
) -> None:
    runner, prompt = resized(runner_of("llama"), 300), [3, 1, 4]
    (plain,) = run(make_engine(runner), [make_request("0", prompt, GREEDY)])
    knowing = Knowing({"0": plain}, lambda i: True)
    bad = Script("bad", *NONSENSE[kind])
    for drafters in ([bad, knowing], [knowing, bad]):
        engine, request = make_engine(runner, MergedDrafter(drafters), (1, 1, 1)), make_request("0", prompt, GREEDY)
        assert run(engine, [request]) == [plain]
        assert request.speculation.num_target_passes == 5
        assert engine.metrics.num_draft_failures == 0
    assert caplog.text.count("drafter bad failed; going on") == 2 * MAX_FAILURES


class Knowing:
    """Knows every continuation; `right` says whether the guess for the i-th output token is the true one."""

    name = "knowing"

    def __init__(self, outputs: dict[str, list[int]], right: Callable[[int], bool], spare: int = 0) -> None:
        self._outputs, self._right, self._spare = outputs, right, spare

    def draft(self, spans: Sequence[Span], budgets: Sequence[TreeBudget]) -> list[TokenTree]:
        return [self._one(span.request, budget) for span, budget in zip(spans, budgets, strict=True)]

    def _one(self, request: Request, budget: TreeBudget) -> TokenTree:
        """A chain, each node of it behind `spare` wrong siblings."""
        tokens, parents, parent = [request.token_ids[-1]], [-1], 0
        for depth, width in enumerate(budget.widths):
            i = request.num_output + depth
            true = self._outputs[request.request_id][i]
            guess = true if self._right(i) else (true + 1) % VOCAB
            siblings = [(guess + 7 + k) % VOCAB for k in range(min(self._spare, width - 1))]
            for token in (*siblings, guess):
                tokens.append(token)
                parents.append(parent)
            parent = len(tokens) - 1
        return TokenTree(tuple(tokens), tuple(parents), tuple(Draw(node, self.name) for node in range(1, len(tokens))))

    def observe(self, request: Request, tree: TokenTree, acceptance: Acceptance) -> None:
        pass

    def forget(self, request_id: str) -> None:
        pass


@pytest.mark.parametrize(
    ("right", "widths", "spare", "passes", "accepted"),
    [
        (lambda i: True, (1, 1, 1), 0, 5, 15),  # 3 guesses and 1 token a pass, 20 tokens
        (lambda i: True, (1,), 0, 10, 10),
        (lambda i: True, (1,) * 30, 0, 1, 19),  # the last token is said without a guess
        (lambda i: True, (1, 1, 1, 1, 1, 1), 0, 3, 17),  # 7 + 7 + 6
        (lambda i: False, (1, 1, 1), 0, 20, 0),
        (lambda i: i % 2 == 0, (1, 1), 0, 10, 10),  # one right, one wrong: two tokens a pass
        (lambda i: i % 3 != 2, (1, 1, 1), 0, 7, 13),  # two right, then the target's: 3 a pass, 2 in the last
        (lambda i: i < 10, (1, 1, 1, 1), 0, 12, 8),  # 5 + 5, then one by one
        (lambda i: True, (3, 2), 2, 7, 13),  # wrong siblings beside the right ones: 3 a pass
    ],
)
def test_tokens_per_pass_as_computed_by_hand(
    right: Callable[[int], bool],
    widths: tuple[int, ...],
    spare: int,
    passes: int,
    accepted: int,
    runner_of: Callable[..., ModelRunner],
) -> None:
    runner = runner_of("llama")
    prompts = random_prompts([6, 40])
    requests = [make_request(str(i), prompt, GREEDY) for i, prompt in enumerate(prompts)]
    plain = run(make_engine(runner), requests)
    assert all(r.speculation.as_dict()["tokens_per_pass"] == 1.0 for r in requests)
    drafter = Knowing({str(i): output for i, output in enumerate(plain)}, right, spare)
    requests = [make_request(str(i), prompt, GREEDY) for i, prompt in enumerate(prompts)]
    engine = make_engine(runner, drafter, widths)
    assert run(engine, requests) == plain
    assert engine.metrics.num_steps == passes
    for request in requests:
        stats = request.speculation.as_dict()
        assert stats["num_target_passes"] == passes
        assert stats["num_accepted_draft_tokens"] == accepted == sum(o is not None for o in request.origins)
        assert stats["tokens_per_pass"] == pytest.approx(20 / passes)

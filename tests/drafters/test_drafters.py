"""Drafters: what they guess, how guesses merge, and that a broken drafter costs only its guesses."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import reference
from specinfer.core.request import Request, Span
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree import OFF, Distribution, Draw, TokenTree, TreeBudget
from specinfer.drafters import (
    Drafter,
    MergedDrafter,
    NGramDrafter,
    PredictionDrafter,
    SmallModelDrafter,
    make_drafter,
)
from specinfer.drafters.drafter_cache import DrafterCache
from specinfer.drafters.merge.budget_split import BudgetSplit
from specinfer.drafters.merge.guarded import MAX_FAILURES
from specinfer.model.runner import ModelRunner
from specinfer.verify import Acceptance
from tiny import VOCAB, make_engine, make_model, make_request, paths_of, random_prompts, resized, run

GREEDY = SamplingParams(temperature=0.0, max_tokens=20)


def _span(request: Request) -> Span:
    return Span(request, request.num_computed, len(request.token_ids))


def _draft(drafter: Drafter, request: Request, *widths: int) -> TokenTree:
    return _within(drafter, request, TreeBudget.expansion(widths, getattr(drafter, "num_drafters", 1)))


def _within(drafter: Drafter, request: Request, budget: TreeBudget) -> TokenTree:
    (tree,) = drafter.draft([_span(request)], [budget])
    assert tree.tokens[0] == request.token_ids[-1]
    assert tree.num_guessed <= budget.max_nodes
    assert tree.max_depth <= budget.max_depth
    return tree


# -------------------------------------------------------------------------------------------- n-gram


@pytest.mark.parametrize(
    ("tokens", "guesses"),
    [
        ([1, 2, 3, 1, 2], [3, 1, 2]),
        ([1, 2, 3, 4, 1, 2], [3, 4, 1]),
        ([1, 2, 3, 1, 2, 4, 1, 2], [4, 1, 2]),  # the last occurrence
        ([9, 1, 2, 3, 8, 1, 2, 4, 9, 1, 2], [3, 8, 1]),  # a longer match beats a later one
        ([5, 5, 5], [5, 5, 5]),
        ([1, 2, 1, 2], [1, 2, 1]),  # past the end the repetition goes on
        ([1, 2, 3, 4], []),
        ([1, 3, 2, 3], []),  # one token is too little
        ([1], []),
    ],
)
def test_ngram_by_hand(tokens: list[int], guesses: list[int]) -> None:
    tree = _draft(NGramDrafter(), make_request("0", tokens), 1, 1, 1)
    assert (list(tree.tokens), list(tree.parents)) == ([tokens[-1], *guesses], list(range(-1, len(guesses))))
    assert [(draw.node, draw.drafter, draw.distribution) for draw in tree.draws] == [
        (node, "ngram", None) for node in range(1, len(guesses) + 1)
    ]
    sure = [draw.confidence for draw in tree.draws]
    assert sure == sorted(sure), "a match that held is a longer one"
    assert all(0 < confidence < 1 for confidence in sure)


def _lookup(tokens: list[int], length: int) -> list[int]:
    """The same by searching backwards."""
    for size in (4, 3, 2):
        for start in range(len(tokens) - size - 1, -1, -1):
            if size < len(tokens) and tokens[start : start + size] == tokens[-size:]:
                text = list(tokens)
                for _ in range(length):
                    text.append(text[start + size + len(text) - len(tokens)])
                return text[len(tokens) :]
    return []


@given(st.lists(st.integers(0, 2), min_size=1, max_size=20), st.lists(st.integers(0, 2), max_size=20))
def test_ngram_keeps_up_with_a_growing_text(prompt: list[int], said: list[int]) -> None:
    drafter, request = NGramDrafter(), make_request("0", prompt, SamplingParams(max_tokens=50))
    for token in [*said, 0]:
        tree = _within(drafter, request, TreeBudget(9, 4))
        assert list(tree.tokens[1:]) == _lookup(request.token_ids, 4)
        request.append(token, None)
    drafter.forget("0")
    drafter.forget("0")


def test_ngram_forgets_a_request() -> None:
    """Another request of the same name must not be served from the first one's text."""
    drafter = NGramDrafter()
    assert _draft(drafter, make_request("0", [1, 2, 3, 1, 2]), 1).num_guessed == 1
    drafter.forget("0")
    assert _draft(drafter, make_request("0", [9, 9, 4, 1, 2]), 1).num_guessed == 0


@pytest.mark.parametrize(("low", "high"), [(0, 2), (3, 2), (-1, -1)])
def test_ngram_sizes(low: int, high: int) -> None:
    with pytest.raises(ValueError, match="n-gram sizes"):
        NGramDrafter(low, high)


# --------------------------------------------------------------------------------------- small models

PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(temperature=0.9),
    "penalised": SamplingParams(temperature=0.7, frequency_penalty=1.0, repetition_penalty=1.3),
    "limited": SamplingParams(temperature=1.0, top_k=2),
}


def _expected(model: Any, request: Request, widths: Sequence[int]) -> set[tuple[int, ...]]:
    """Paths of the expansion: at each node the best children by the drafter's logits plus the shared noise."""
    level: list[tuple[int, ...]] = [()]
    paths = set(level)
    for width in widths:
        grown = []
        for path in level:
            output = [*request.output_ids, *path]
            logits = reference.last_logits(model, [*request.prompt_ids, *output]).tolist()
            row = reference.scores(logits, request.params, request.prompt_ids, output, request.seed)
            best = sorted(range(len(row)), key=lambda token: -row[token])[:width]
            grown += [(*path, token) for token in best if row[token] > -torch.inf]
        level = grown
        paths |= set(level)
    return paths


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("widths", [(1,), (1, 1, 1), (3, 2), (1, 1, 3, 1), (4,), (2, 2, 2)])
def test_small_model_grows_the_expansion(
    name: str, widths: tuple[int, ...], runner_of: Callable[..., ModelRunner]
) -> None:
    drafter, model = SmallModelDrafter(runner_of("llama"), VOCAB, "small"), make_model("llama")
    request = make_request("0", random_prompts([9])[0], PARAMS[name], seed=4)
    tree = _draft(drafter, request, *widths)
    assert set(paths_of(tree)) == _expected(model, request, widths)
    assert set(tree.drafters()[1:]) == {"small"}
    drafter.forget("0")


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", ["llama", "mistral", "mpt", "gpt2"])
@pytest.mark.parametrize("widths", [(2, 1, 1), (1, 1), (2, 2)])
def test_small_model_keeps_up_with_any_output(
    family: str, widths: tuple[int, ...], runner_of: Callable[..., ModelRunner]
) -> None:
    """Its cache follows accepted paths, rejected ones, steps it slept through and steps without a budget."""
    drafter, model = SmallModelDrafter(runner_of(family), VOCAB), make_model(family)
    params = SamplingParams(temperature=0.0, max_tokens=99)
    requests = [make_request(str(i), prompt, params) for i, prompt in enumerate(random_prompts([5, 12]))]
    generator = torch.Generator().manual_seed(1)
    for step in range(8):
        trees = drafter.draft([_span(r) for r in requests], [TreeBudget.expansion(widths)] * 2)
        for request, tree in zip(requests, trees, strict=True):
            assert set(paths_of(tree)) == _expected(model, request, widths), step
            leaf = int(torch.randint(len(tree), (), generator=generator))
            for token in (*tree.path_tokens(leaf), 5 + step):
                request.append(token, None)
            if step % 3 != 1:  # as when its tree was discarded
                drafter.observe(request, tree, Acceptance(tree.path(leaf), 5 + step))
        if step == 4:
            requests[0].append(7, None)
    for request in requests:
        drafter.forget(request.request_id)


def test_small_model_reads_long_prompts_in_chunks(
    runner_of: Callable[..., ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specinfer.drafters.drafter_cache.MAX_CHUNK", 7)
    drafter = SmallModelDrafter(runner_of("mistral"), VOCAB)
    request = make_request("0", random_prompts([30])[0])
    assert set(paths_of(_draft(drafter, request, 2, 2))) == _expected(make_model("mistral"), request, (2, 2))
    drafter.forget("0")


def test_small_model_computes_only_the_last_token_of_a_cached_prompt(
    runner_of: Callable[..., ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = resized(runner_of("llama"), 200, keeps_prefixes=True)
    drafter, sizes, note_read = SmallModelDrafter(runner, VOCAB), list[int](), DrafterCache.note_read

    def counted(self: DrafterCache, request: Request, count: int) -> None:
        sizes.append(count)
        note_read(self, request, count)

    monkeypatch.setattr(DrafterCache, "note_read", counted)
    for name in ("first", "second"):
        _draft(drafter, make_request(name, range(1, 21)), 1)
        drafter.forget(name)
    assert sizes == [20, 1]


def test_small_model_without_free_slots_drafts_less(runner_of: Callable[..., ModelRunner]) -> None:
    runner = resized(runner_of("llama"), 11)  # one too few for the prompt and a level to go on from
    drafter = SmallModelDrafter(runner, VOCAB)
    request = make_request("0", random_prompts([10])[0])
    assert _draft(drafter, request, 2, 2).num_guessed == 2, "the level there was room for"
    assert runner.cache.num_free == 11
    assert _draft(drafter, request, 2).num_guessed == 2, "there is room for this one"
    drafter.forget("0")
    long = make_request("1", random_prompts([13])[0])
    assert _draft(drafter, long, 1).num_guessed == 0


def test_free_slots_do_not_choose_among_draws(runner_of: Callable[..., ModelRunner]) -> None:
    """Two equal draws take one slot and two different ones two: what was drawn is kept either way."""
    runner = resized(runner_of("llama"), 3)  # two for the prompt, one for the tree
    drafter = SmallModelDrafter(runner, VOCAB, draft_sampling="iid")
    differ = 0
    for seed in range(60):
        request = make_request(str(seed), [3, 1], SamplingParams(top_k=2), seed)
        tree = _draft(drafter, request, 2, 1)
        first = [tree.tokens[draw.node] for draw in tree.candidates[0]]
        assert len(first) == 2, "a drawn guess was dropped"
        differ += first[0] != first[1]
        drafter.forget(str(seed))
    assert 10 < differ < 50


def test_small_model_stops_at_its_own_length(model_folder: Any, runner_of: Callable[..., ModelRunner]) -> None:
    runner = runner_of("gpt2", n_positions=16)
    drafter = SmallModelDrafter(runner, VOCAB)
    for length, depth in ((13, 3), (15, 1), (16, 0), (20, 0)):
        request = make_request(str(length), random_prompts([length])[0])
        assert _draft(drafter, request, 1, 1, 1).max_depth == depth
        drafter.forget(str(length))


@pytest.mark.parametrize("vocab", [VOCAB - 10, VOCAB + 10])
def test_small_model_of_another_padded_vocabulary(vocab: int, runner_of: Callable[..., ModelRunner]) -> None:
    drafter = SmallModelDrafter(runner_of("llama", vocab_size=vocab), VOCAB)
    request = make_request("0", random_prompts([6], vocab=80)[0], PARAMS["sampled"])
    tree = _draft(drafter, request, 8, 3)
    assert tree.num_guessed == 8 + 24
    assert max(tree.tokens) < min(vocab, VOCAB)
    drafter.forget("0")


def test_a_token_the_drafter_lacks_costs_that_request_its_guesses_only(runner_of: Callable[..., ModelRunner]) -> None:
    drafter = SmallModelDrafter(runner_of("llama", vocab_size=VOCAB - 8), VOCAB)
    ordinary, foreign = make_request("a", [1, 2, 3]), make_request("b", [1, VOCAB - 1, 3])
    trees = drafter.draft([_span(ordinary), _span(foreign)], [TreeBudget.expansion((2, 1))] * 2)
    assert [tree.num_guessed for tree in trees] == [4, 0]
    drafter.forget("a")
    drafter.forget("b")


def test_small_model_never_drafts_tokens_that_cannot_be_emitted(runner_of: Callable[..., ModelRunner]) -> None:
    drafter = SmallModelDrafter(runner_of("llama"), VOCAB)
    params = SamplingParams(temperature=1.0, allowed_token_ids=[3, 60])
    tree = _draft(drafter, make_request("0", [1, 2], params), 4, 3)
    assert set(paths_of(tree)[1:]) == {(3,), (60,), (3, 3), (3, 60), (60, 3), (60, 60)}
    assert tree.num_guessed == 6
    drafter.forget("0")


# ------------------------------------------------------------------------------------- merged and broken


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
    assert paths_of(_draft(merged, request, 2, 2)) == [(), (1,), (1, 2), (1, 3)]
    assert paths_of(_draft(merged, request, 1, 1)) == [(), (1,), (1, 2), (1, 3)], "each grows a whole one"
    assert [draw.node for draw in _draft(merged, request, 1, 1).draws] == [1, 2, 1, 3]


def test_each_drafter_is_asked_for_the_whole_expansion() -> None:
    asked: list[TreeBudget] = []

    def noted(span: Span, budget: TreeBudget) -> TokenTree:
        asked.append(budget)
        return TokenTree.root(span.request.token_ids[-1])

    merged = MergedDrafter([Script("a", noted), Script("b", noted)])
    _draft(merged, make_request("0", [5]), 2, 1)
    assert asked == [TreeBudget.expansion((2, 1))] * 2
    asked.clear()
    _within(merged, make_request("0", [5]), TreeBudget(6, 3, min_path_prob=0.1))
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
        _within(merged, request, replace(budget, drafters=frozenset("ac")).cut(1, 3))
        assert asked == ["a", "c"], "also when the budget was cut"
        asked.clear()
    guided = make_request("1", [5], prediction_ids=(5, 6, 7))
    tree = _within(MergedDrafter([PredictionDrafter(), Script("a", noted("a"))]), guided,
                   TreeBudget(4, 2, drafters=frozenset()))  # fmt: skip
    assert paths_of(tree) == [(), (5,), (5, 6)], "a prediction is the request's own"
    assert not asked


BEST_FIRST_DRAFTERS: list[Callable[..., TokenTree]] = [
    _tree((1, 2, 3), (4, 5), name="a", confidence=0.6),
    _tree((1, 2, 6), (7, 8, 9), name="b", confidence=0.5),
    _tree((4, 9), name="c", confidence=0.9),
]


@pytest.mark.parametrize("max_nodes", range(1, 14))
def test_best_first_guesses_compete_for_one_budget(max_nodes: int) -> None:
    drafters = [Script(name, make) for name, make in zip("abc", BEST_FIRST_DRAFTERS, strict=True)]
    merged, request = MergedDrafter(drafters), make_request("0", [5])
    tree = _within(merged, request, TreeBudget(max_nodes, 3))
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
            tree = _within(merged, request, TreeBudget(6, 3))
            path = tree.path(next(n for n in range(len(tree)) if tree.path_tokens(n) == (1, 2, 3)))
            merged.observe(request, tree, Acceptance(path, 0))
        assert paths_of(_within(merged, request, budget)) == [(), (1,), (1, 2), (1, 2, 3)]
        assert len(_within(merged, request, TreeBudget(6, 3, min_path_prob=0.3))) == 4, "the others are not worth it"
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
    tree = _within(merged, request, budget)
    assert len(tree.draws) == min(max_nodes, 11), "what the first one leaves over is for the second"
    assert all(draw.distribution is DRAWN_DISTRIBUTION for draw in tree.draws)
    names = [draw.drafter for draw in tree.draws]
    assert names == sorted(names), "in the order of the drafters"
    if max_nodes == 8:
        assert names.count("a") == 4, "equal shares, as long as nothing is known"
        of_second = next(draw.node for draw in tree.draws if draw.drafter == "b" and draw.node > 4)
        for _ in range(100):
            merged.observe(request, tree, Acceptance((of_second,), 0))
        assert [draw.drafter for draw in _within(merged, request, budget).draws].count("b") > 4


def test_tokens_of_lookups_must_be_probable_enough_under_rules_that_draw_too() -> None:
    """They were chosen, so they may be dropped; drawn ones are kept."""
    budget = TreeBudget(8, 8, min_path_prob=0.3)
    sizes = []
    for drafter in (Script("lookup", _chain(*range(1, 9))), _drawn("draws", *range(1, 9))):
        merged, request = MergedDrafter([drafter], may_choose=False), make_request("0", [5])
        request.verification = "traversal"
        for _ in range(100):  # one token is right, and no other
            merged.observe(request, _within(merged, request, TreeBudget(8, 8)), Acceptance((1,), 0))
        sizes.append(_within(merged, request, budget).num_guessed)
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
            assert paths_of(_draft(merged, request, 1, 1)) == [(), (7,), (7, 8)]
            assert paths_of(_within(merged, request, TreeBudget(9, 2))) == [(), (7,), (7, 8)]
    mute = Script("mute", lambda span, budget: TokenTree.root(span.request.token_ids[-1]))
    assert _draft(MergedDrafter([silent, mute]), request, 2) == TokenTree.root(5)
    assert _within(MergedDrafter([silent]), request, OFF) == TokenTree.root(5)


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
        assert paths_of(_draft(merged, make_request("0", [5]), 1)) == [(), (7,)]


def test_one_failing_drafter_leaves_the_others_guesses(caplog: pytest.LogCaptureFixture) -> None:
    broken = Script("broken", _raise)
    merged = MergedDrafter([broken, Script("b", _chain(7))])
    with caplog.at_level(logging.ERROR, logger="specinfer"):
        assert paths_of(_draft(merged, make_request("0", [5]), 1)) == [(), (7,)]
    assert "broken" in caplog.text
    assert broken.forgotten == ["0"]
    alone = MergedDrafter([broken])
    assert _draft(alone, make_request("0", [5]), 1) == TokenTree.root(5)


def test_a_drafter_that_fails_again_and_again_is_asked_no_more(caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    def fails(span: Span, budget: TreeBudget) -> TokenTree:
        calls.append(budget)
        raise RuntimeError("broken on purpose")

    merged = MergedDrafter([Script("broken", fails), Script("b", _chain(7))], may_choose=False)
    with caplog.at_level(logging.ERROR, logger="specinfer"):
        for _ in range(MAX_FAILURES + 3):
            assert paths_of(_within(merged, make_request("0", [5]), TreeBudget(2, 1))) == [(), (7,)]
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
        _within(merged, make_request("0", [5]), TreeBudget(2, 1))
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
    assert drafter.name == "prediction+ngram+tiny"
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


def test_a_perfect_copy_is_always_right(runner_of: Callable[..., ModelRunner]) -> None:
    """Greedy and sampled: target and drafter share the noise, so a copy of the target guesses every token."""
    runner = runner_of("llama")
    for params in PARAMS.values():
        fields = {name: getattr(params, name) for name in params.__slots__} | {"max_tokens": 20}
        drafter = SmallModelDrafter(resized(runner, 500), VOCAB)
        request = make_request("0", [1, 2, 3], SamplingParams(**fields), seed=11)
        run(make_engine(runner, drafter, (1, 1, 1)), [request])
        assert request.speculation.num_target_passes == 5
        assert request.speculation.num_accepted_draft_tokens == 15

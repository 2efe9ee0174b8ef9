"""Speculation has exactly the target's distribution: every drafting and every verification of tiny models, in
fractions.

The distribution of the first four tokens must equal that of plain decoding, not nearly but as fractions are equal.
That the comparison tells wrong ways apart is shown in verify/test_known_wrong.py.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from levels import Node
from reference.enumeration import (
    DeviceDrafter,
    EnumeratedDrafter,
    Forks,
    Model,
    Rule,
    Trees,
    a_span,
    calibrated,
    distance,
    every,
    every_tree,
    every_tree_of,
    extended,
    tokens_per_step,
    total_variation,
)
from reference.slow_growth import F32, Wish, slow_tree, tree_one_by_one
from specinfer.core import rules
from specinfer.core.thought import Reasoning, Thought
from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.drafters.base import Drafter
from specinfer.drafters.growth import tree_batch
from specinfer.drafters.growth.calibration import MIDDLE, RANKS, Calibration
from specinfer.drafters.growth.draft_sampling import Candidates
from specinfer.drafters.merge.merged import MergedDrafter
from specinfer.drafters.vocabulary.token_map import TokenMap
from specinfer.verify import Acceptance, verify_coupled
from tiny import trees as random_trees

RULES: tuple[Rule, ...] = tuple(rules.RULES[name].verify for name in rules.random_rules())
DRAWN = ("iid", "without-replacement", "hybrid")
DRAFT_SAMPLINGS = (*DRAWN, "top-k")
SURE = (1, 2, 3, 5)  # weights of distributions without zeros


@pytest.fixture(autouse=True)
def _narrow_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Best first draws more candidates for a node than it takes; two or three show all that can happen."""
    monkeypatch.setattr(tree_batch, "BEST_FIRST_WIDTH", 2)


def check(trees: Trees, target: Model) -> None:
    for rule in RULES:
        assert distance(rule, trees, target) == 0, rule


# ---------------------------------------------------------------------------------------- one drafter


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 4), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("widths", [(1, 1, 1), (3,), (2, 2), (1, 2, 1), (2, 1, 1)], ids=str)
@pytest.mark.parametrize("drawing", DRAFT_SAMPLINGS)
def test_fixed_expansions(drawing: str, widths: tuple[int, ...], seeds: range) -> None:
    for seed in seeds:
        trees = every_tree_of(EnumeratedDrafter(Model(seed + 100), drawing), TreeBudget.expansion(widths))
        check(trees, Model(seed))
    # Of hybrid siblings that cover the vocabulary the drawn one, too, is certain.
    assert (len(trees) == 1) == (drawing == "top-k" or (drawing, widths) == ("hybrid", (3,)))


@pytest.mark.covering(1)
@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 3), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize(
    ("max_nodes", "limits"),
    [(n, (0.0, 0.0)) for n in range(1, 7)] + [(n, limits) for n in (3, 5) for limits in ((0.15, 0.0), (0.0, 0.3))],
    ids=str,
)
@pytest.mark.parametrize("drawing", DRAFT_SAMPLINGS)
def test_best_first(drawing: str, max_nodes: int, limits: tuple[float, float], seeds: range) -> None:
    budget = TreeBudget(max_nodes, 3, min_path_prob=limits[0], min_gain=limits[1])
    vocab = 2 if (drawing, max_nodes) == ("iid", 6) else 3
    for seed in seeds if max_nodes < 5 else seeds[:1]:
        drafter = EnumeratedDrafter(Model(seed + 200, vocab), drawing, calibration=calibrated(seed, "a"))
        trees = every_tree_of(drafter, budget)
        assert all(tree.num_guessed <= max_nodes and tree.max_depth <= 3 for _, tree in trees)
        check(trees, Model(seed, vocab))


# Nodes of each level with children, and candidates of each; nodes of a tree; tokens.
DEVICE_TREES = [
    ((1, 2, 1), (2, 2, 2), 3, 3),
    ((1, 2, 2), (2, 2, 2), 4, 3),
    ((1, 1, 1), (3, 2, 2), 3, 3),
    ((1, 2, 2, 1), (2, 2, 2, 2), 5, 2),
    ((1, 2, 3, 2), (2, 2, 2, 2), 6, 2),
]


@pytest.mark.parametrize("min_path_prob", [0.0, 0.1])
@pytest.mark.parametrize(("frontiers", "children", "max_nodes", "vocab"), DEVICE_TREES, ids=str)
def test_best_first_on_a_device(
    frontiers: tuple[int, ...], children: tuple[int, ...], max_nodes: int, vocab: int, min_path_prob: float
) -> None:
    """All candidates are drawn before nodes are chosen, by how peaked the distributions of their parents are."""
    budget, nums_of_shapes = TreeBudget(max_nodes, len(frontiers), min_path_prob=min_path_prob), []
    for seed in range(1, 4):
        drafter = DeviceDrafter(Model(seed + 500, vocab, SURE), calibrated(seed, "a"), frontiers, children)
        trees = every_tree_of(drafter, budget)
        check(trees, Model(seed, vocab))
        nums_of_shapes.append(len({tree.parents for _, tree in trees}))
    assert max(nums_of_shapes) > 1, "what is drawn decides about nodes elsewhere in the tree"


@settings(max_examples=300)
@given(st.integers(0, 2**32), st.data())
def test_trees_of_a_device_are_those_of_tokens_drawn_one_by_one(seed: int, data: st.DataObject) -> None:
    """Probabilities are of a coarse grid, so that many are equal."""
    frontiers, children = [1], [data.draw(st.integers(1, 3))]
    for _ in range(data.draw(st.integers(0, 3))):
        frontiers.append(data.draw(st.integers(1, min(4, frontiers[-1] * children[-1]))))
        children.append(data.draw(st.integers(1, 3)))
    max_nodes = data.draw(st.integers(1, 12))

    def drawn_after(path: tuple[int, ...], _place: int) -> list[tuple[int, np.float32]]:
        generator = random.Random(f"{seed} {path}")
        tokens, sure = generator.sample(range(3), children[len(path)]), F32(generator.randrange(3))
        return [(token, sure) for token in tokens]

    def chance(rank: int, confidence: np.float32) -> np.float32:
        return F32(random.Random(f"{seed} {rank} {confidence}").randrange(5) / 4)

    wish = Wish(max_nodes, len(frontiers), 0.0, ())
    taken, _ = slow_tree(drawn_after, chance, frontiers, children, max_nodes, wish)
    assert {guess.path for guess in taken} == tree_one_by_one(drawn_after, chance, frontiers, children, max_nodes)


@pytest.mark.parametrize("drawing", DRAFT_SAMPLINGS)
def test_requests_drafted_together(drawing: str) -> None:
    """Whether another level pays is decided for all of them, so what one draws may end the other's tree."""
    for seed, (mine, others) in enumerate([(4, 1), (3, 3), (2, 4)]):
        drafter = EnumeratedDrafter(Model(seed + 400, 2), drawing, calibration=calibrated(seed + 1, "a"))
        budgets = [TreeBudget(max_nodes, 3, min_gain=0.5) for max_nodes in (mine, others)]
        check(every_tree_of(drafter, *budgets), Model(seed, 2))
        check(every_tree_of(drafter, *reversed(budgets)), Model(seed, 2))


class TellingDrafter(EnumeratedDrafter):
    """As the real one, but drawn tokens, or those chosen next to a drawn one, have their probability as confidence."""

    def __init__(self, model: Model, calibration: Calibration, reveals: str) -> None:
        super().__init__(model, "hybrid", calibration=calibration)
        self._reveals = reveals

    def _drawn(self, node: Node, orders: Sequence[Sequence[int]]) -> Candidates:
        row = super()._drawn(node, orders)
        distribution = [*self.model.distribution(node.path), 0]
        probable = np.array([[float(distribution[token]) for token in row.tokens[0]]], dtype=np.float32)
        is_drawn = row.drawn_from.places >= 0
        return replace(row, confidence=np.where(is_drawn == (self._reveals == "drawn"), probable, row.confidence))


class AnyChances:
    """A calibration where each rank and part of the confidences has a chance of its own; little is expected below."""

    def lines(self, source: str) -> Any:
        heights = [
            random.Random(f"4 {rank} {line}").random() for rank in range(RANKS) for line in range(len(MIDDLE) + 1)
        ]
        return np.array(heights), np.zeros(len(heights))

    def by_rank(self, source: str) -> Any:
        return np.full(RANKS, 0.01)


# They have tokens near the limit of what is taken.
REVEALING_PAIR = tuple(Model(seed, 2, weights=(1, 2, 4, 9)) for seed in (28, 528))


def _distances(make: Callable[[Model, Calibration], EnumeratedDrafter]) -> list[Fraction]:
    target, q = REVEALING_PAIR
    trees = every_tree_of(make(q, cast(Calibration, AnyChances())), TreeBudget(4, 3))
    return [distance(rule, trees, target) for rule in RULES]


@pytest.mark.parametrize("reveals", ["drawn", "chosen"])
def test_a_confidence_that_reveals_the_draw_is_detected(reveals: str) -> None:
    """A drawn token then loses its place if its sibling's path is as probable as its own, which depends on the draw."""
    assert min(_distances(partial(TellingDrafter, reveals=reveals))) > Fraction(1, 100)


def test_a_choice_next_to_a_draw_does_not_reveal_it() -> None:
    """What the chosen siblings are depends on the draw. If their worth did, too, it would decide about the draw."""
    distances = _distances(lambda q, calibration: EnumeratedDrafter(q, "hybrid", calibration=calibration))
    assert distances == [0] * len(RULES)


@pytest.mark.parametrize("group", [1, 2, 3])
@pytest.mark.parametrize("drawing", DRAWN)
def test_no_confidence_reveals_the_token_drawn(drawing: str, group: int) -> None:
    drafter, node = EnumeratedDrafter(Model(387, weights=SURE), drawing), Node(a_span().request, (), 3, group)

    def drawn(forks: Forks) -> tuple[Any, Any]:
        drafter.forks = forks
        row = drafter._candidates(node)
        return tuple(row.tokens[0].tolist()), tuple(row.confidence[0].tolist())

    tokens, confidences = zip(*(outcome for _, outcome in every(drawn)), strict=True)
    assert (len(set(tokens)) == 1) == ((drawing, group) == ("hybrid", 3))
    assert len(set(confidences)) == 1


def test_trees_and_rules_differ() -> None:
    """Guards the tests above: guesses are accepted, and traversal accepts more than multi-step."""
    drafter = EnumeratedDrafter(Model(100, weights=SURE), "without-replacement")
    trees = every_tree_of(drafter, TreeBudget.expansion((2, 1, 1)))
    multi_step, traversal = (
        tokens_per_step(rules.RULES[name].verify, trees, Model(0, weights=SURE))
        for name in (rules.MULTI_STEP, rules.TRAVERSAL)
    )
    assert 1.5 < multi_step < traversal < 4


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "budget", [TreeBudget.expansion((2, 1)), TreeBudget.expansion((1, 2)), TreeBudget(4, 3)], ids=str
)
@pytest.mark.parametrize("drawing", DRAFT_SAMPLINGS)
def test_a_drafter_that_guesses_among_some_tokens_only(drawing: str, budget: TreeBudget) -> None:
    for ids in ([0, 2], [1, 2, 3]):
        token_map, q = TokenMap(torch.tensor(ids), 4), Model(len(ids) + 600, 4, weights=SURE)
        drafter = EnumeratedDrafter(q, drawing, calibration=calibrated(1, "a"), token_map=token_map)
        trees = every_tree_of(drafter, budget)
        assert {token for _, tree in trees for token in tree.tokens[1:]} <= set(ids)
        distributions = [draw.distribution for _, tree in trees for draw in tree.draws if draw.distribution is not None]
        assert all(set(distribution.token_ids.tolist()) <= set(ids) for distribution in distributions)
        assert bool(distributions) == (drawing != "top-k")
        check(trees, Model(len(ids), 4))


class ForcedModel(Model):
    """A model some of whose tokens are forced after some contexts."""

    def __init__(self, seed: int, forced: Callable[[tuple[int, ...]], int | None], vocab: int = 3) -> None:
        super().__init__(seed, vocab, weights=SURE)
        self._forced = forced

    def distribution(self, context: tuple[int, ...]) -> tuple[Fraction, ...]:
        token = self._forced(context)
        return super().distribution(context) if token is None else tuple(Fraction(i == token) for i in range(3))


class ThinkingDrafter(EnumeratedDrafter):
    """It is masked by the real adjustment of its logits."""

    def __init__(self, seed: int, drawing: str, forced: Callable[[tuple[int, ...]], int | None]) -> None:
        super().__init__(Model(seed, weights=SURE), drawing, calibration=calibrated(1, "a"))
        self._masked = ForcedModel(seed, forced)

    def distribution(self, context: tuple[int, ...]) -> tuple[Fraction, ...]:
        return self._masked.distribution(context)


@pytest.mark.covering(1)
@pytest.mark.parametrize("budget", [0, 1, 2])
@pytest.mark.parametrize("tree", [TreeBudget.expansion((2, 1, 1)), TreeBudget.expansion((1, 2)), TreeBudget(4, 3)])
@pytest.mark.parametrize("drawing", DRAFT_SAMPLINGS)
def test_tokens_that_must_end_a_thought(drawing: str, tree: TreeBudget, budget: int) -> None:
    """A thought may also end by itself, with 2, before its budget is spent."""
    reasoning = Reasoning("", "c", (1, 2), is_open=True)

    def text(tokens: Sequence[int]) -> str:
        return "".join("abc"[token] for token in tokens)

    def forced(context: tuple[int, ...]) -> int | None:
        return Thought(reasoning, text, budget).forced(context)

    def draft(forks: Forks) -> TokenTree:
        drafter.forks = forks
        span = a_span()
        span.request.thought = Thought(reasoning, text, budget)
        return drafter.draft([span], [tree])[0]

    for seed in range(2):
        drafter = ThinkingDrafter(seed + 700, drawing, forced)
        trees = every_tree(draft)
        illegal = [
            path
            for _, one in trees
            for path in map(one.path_tokens, range(1, len(one)))
            if forced(path[:-1]) not in (None, path[-1])
        ]
        assert not illegal, "no draft token is wasted"
        check(trees, ForcedModel(seed, forced))


# ----------------------------------------------------------------------------------- several drafters


class Lookup:
    """A drafter whose guesses are chosen, such as an n-gram drafter."""

    name = "lookup"

    def __init__(self, *paths: Sequence[int]) -> None:
        self._paths = paths

    def draft(self, spans: Sequence[Any], budgets: Sequence[TreeBudget]) -> list[TokenTree]:
        trees = [TokenTree.merge([TokenTree.chain(0, path[: b.max_depth], self.name) for path in self._paths])
                 for b in budgets]  # fmt: skip
        return [tree.keep(range(min(b.max_nodes, tree.num_guessed) + 1))
                for tree, b in zip(trees, budgets, strict=True)]  # fmt: skip

    def observe(self, *_: Any) -> None:
        pass

    def forget(self, request_id: str) -> None:
        pass


def every_merged(drafters: Sequence[Drafter], budget: TreeBudget, *, may_choose: bool = False, step: int = 0) -> Trees:
    """The real merged drafter's trees, after `step` has made the first of its drafters the more useful one."""
    calibration = calibrated(step, *(drafter.name for drafter in drafters))
    merged = MergedDrafter(drafters, calibration, may_choose=may_choose)
    for drafter in drafters:
        if isinstance(drafter, EnumeratedDrafter):
            drafter.calibration = calibration
    span = a_span()
    for _ in range(step):
        merged._budget_split.observe(TokenTree.chain(0, [1], drafters[0].name), Acceptance((1,), 0))

    def draft(forks: Forks) -> TokenTree:
        for drafter in drafters:
            if isinstance(drafter, EnumeratedDrafter):
                drafter.forks = forks
        (tree,) = merged.draft([span], [budget])
        assert not merged.num_failures, "a drafter failed"
        return tree

    return every_tree(draft)


def pair(drawing: str, seed: int) -> list[Drafter]:
    return [EnumeratedDrafter(Model(seed + 300 + i), drawing, name) for i, name in enumerate("ab")]


@pytest.mark.covering(1)
@pytest.mark.parametrize("widths", [(1, 1), (2,), (2, 1)], ids=str)
@pytest.mark.parametrize("drawing", DRAFT_SAMPLINGS)
def test_two_merged_drafters(drawing: str, widths: tuple[int, ...]) -> None:
    for seed in range(2 if sum(widths) < 3 else 1):
        trees = every_merged(pair(drawing, seed), TreeBudget.expansion(widths, 2))
        check(trees, Model(seed))
        assert drawing == "top-k" or any(len(tree.draws) > tree.num_guessed for _, tree in trees), "made twice"


@pytest.mark.parametrize("drawing", DRAWN)
def test_three_merged_drafters(drawing: str) -> None:
    third: list[Drafter] = [EnumeratedDrafter(Model(77), "iid", "c")]
    check(every_merged([*pair(drawing, 5), *third], TreeBudget.expansion((1, 1), 3)), Model(5))


@pytest.mark.covering(1)
@pytest.mark.parametrize("step", [0, 1, 4])
@pytest.mark.parametrize("max_nodes", [2, 3, 4, 5])
@pytest.mark.parametrize("drawing", DRAWN)
def test_a_shared_budget(drawing: str, max_nodes: int, step: int) -> None:
    """What is left for the later drafters depends on what the earlier ones drew, never on their own draws."""
    drafts_of_b = 0
    for seed in range(2 if max_nodes < 4 else 1):
        trees = every_merged(pair(drawing, seed), TreeBudget(max_nodes, 2), step=step)
        check(trees, Model(seed))
        drafts_of_b += sum(draw.drafter == "b" for _, tree in trees for draw in tree.draws)
    assert drafts_of_b or max_nodes == 2 or step == 4, "the first has them all"


@pytest.mark.parametrize("drawing", DRAWN)
def test_chosen_nodes_next_to_drawn_ones(drawing: str) -> None:
    lookup = Lookup((0, 1), (2, 2, 0))
    for budget in (TreeBudget.expansion((2, 1), 2), TreeBudget(4, 3)):
        for order in (1, -1):
            drafters: list[Drafter] = [EnumeratedDrafter(Model(8), drawing), lookup]
            check(every_merged(drafters[::order], budget), Model(9))


def test_the_best_of_chosen_guesses() -> None:
    """Guesses nobody drew may be dropped by what they are worth."""
    for max_nodes in (1, 2, 3, 5):
        for step in (0, 1):
            drafters = [*pair("top-k", 3), Lookup((0, 1), (2, 2, 0))]
            trees = every_merged(drafters, TreeBudget(max_nodes, 3), may_choose=True, step=step)
            assert [tree.num_guessed for _, tree in trees] == [max_nodes]
            check(trees, Model(3))


# ------------------------------------------------------------------------------ coupled, target-only


@settings(max_examples=300)
@given(
    st.lists(st.lists(random_trees(max_nodes=8), min_size=1, max_size=3), max_size=3), st.integers(0, 2**20), st.data()
)
def test_the_coupled_walk(several: list[list[TokenTree]], seed: int, data: st.DataObject) -> None:
    """Merged and pruned trees too, many at once: what is said is what the plain walk over the set of paths says."""
    trees = []
    for parts in several:
        tree = TokenTree.merge(parts)
        kept = {0}
        for node in data.draw(st.sets(st.integers(0, len(tree) - 1))):
            kept |= set(tree.path(node))
        trees.append(tree.keep(sorted(kept)))

    def says(place: tuple[int, int]) -> int:
        return reference.splitmix64(seed + 1000 * place[0] + place[1]) % 3

    for i, (tree, acceptance) in enumerate(
        zip(trees, verify_coupled(trees, lambda at: list(map(says, at))), strict=True)
    ):
        said = (*(tree.tokens[node] for node in acceptance.path), acceptance.next_token)
        assert said == reference.walk({tree.path_tokens(node): says((i, node)) for node in range(len(tree))})


@settings(max_examples=40)
@given(random_trees(root=0, max_nodes=12), st.integers(0, 99))
def test_target_only(tree: TokenTree, seed: int) -> None:
    target = Model(seed)

    def step(forks: Forks) -> tuple[int, ...]:
        (acceptance,) = verify_coupled(
            [tree], lambda places: [forks.choose(target.distribution(tree.path_tokens(node))) for _, node in places]
        )
        return (*(tree.tokens[node] for node in acceptance.path), acceptance.next_token)

    said: dict[tuple[int, ...], Fraction] = {}
    for probability, tokens in every(step):
        said[tokens] = said.get(tokens, Fraction(0)) + probability
    assert total_variation(extended(said, target, 4), target.joint(4)) == 0
    # Chosen guesses are what the other rules make of such a tree.
    check([(Fraction(1), tree)], target)


@pytest.mark.covering(1)
@pytest.mark.parametrize("drawing", DRAFT_SAMPLINGS)
@pytest.mark.parametrize("widths", [(2, 2), (1, 1, 1), (3, 1)])
def test_contexts_after_which_nothing_may_follow(drawing: str, widths: tuple[int, ...]) -> None:
    """They end an output as often as plain decoding comes to them."""
    for seed in range(3):
        dead = frozenset({(seed % 3,), ((seed + 1) % 3, 0), ((seed + 1) % 3, 1, 2)})
        drafter = EnumeratedDrafter(Model(seed + 50, weights=SURE), drawing)
        check(every_tree_of(drafter, TreeBudget.expansion(widths)), Model(seed, weights=SURE, dead=dead))

"""Known wrong ways to speculate, most of them shipped by somebody: the exact comparison tells each apart."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from reference.enumeration import (
    DeviceDrafter,
    EnumeratedDrafter,
    Forks,
    Model,
    Rule,
    calibrated,
    distance,
    every,
    every_tree_of,
)
from reference.slow_growth import F32
from specinfer.core.tree import Distribution, Draw, TokenTree, TreeBudget
from specinfer.drafters.growth import tree_batch
from specinfer.drafters.growth.draft_sampling import Candidates
from specinfer.verify import Probs, SeededSource, algorithms, verify_multi_step, verify_traversal

RULES: tuple[Rule, ...] = (verify_multi_step, verify_traversal)
WEIGHTS = (1, 2, 4, 9)


def _each_node_once(tree: TokenTree, q: Model) -> Sequence[Draw]:
    return list({draw.node: draw for draw in reversed(tree.draws)}.values())[::-1]


def _newest_first(tree: TokenTree, q: Model) -> Sequence[Draw]:
    return tree.draws[::-1]


def _not_renormalised(tree: TokenTree, q: Model) -> Sequence[Draw]:
    return [
        draw._replace(distribution=draw.distribution and draw.distribution._replace(removed=())) for draw in tree.draws
    ]


def _without_rare_leaves(tree: TokenTree, q: Model) -> Sequence[Draw]:
    """Leaves that the drafter thought improbable are dropped once they are drawn."""

    def is_rare(draw: Draw) -> bool:
        assert draw.distribution is not None
        place = (draw.distribution.token_ids == tree.tokens[draw.node]).nonzero()[0][0]
        return bool(draw.distribution.weights()[place] <= Fraction(1, 3)) and not tree.candidates[draw.node]

    return [draw for draw in tree.draws if not is_rare(draw)]


def _as_if_drawn(tree: TokenTree, q: Model) -> Sequence[Draw]:
    distributions = {node: Distribution(np.arange(3), q.array(tree.path_tokens(node))) for node in range(len(tree))}
    return [draw._replace(distribution=distributions[tree.parents[draw.node]]) for draw in tree.draws]


@dataclass(frozen=True, slots=True)
class WrongTree:
    """A way to draft, and a way to spoil what stands on record before it is verified."""

    drawing: str
    budget: TreeBudget
    spoil: Callable[[TokenTree, Model], Sequence[Draw]]


MODELS = [(Model(seed, weights=WEIGHTS), Model(seed + 50, weights=WEIGHTS)) for seed in (2, 6, 7)]
WRONG_TREES = {
    "a duplicate is tried once": WrongTree("iid", TreeBudget.expansion((2, 1)), _each_node_once),
    "tried in reverse order": WrongTree("without-replacement", TreeBudget.expansion((2,)), _newest_first),
    "not renormalised": WrongTree("without-replacement", TreeBudget.expansion((2,)), _not_renormalised),
    "pruned after drawing": WrongTree("iid", TreeBudget.expansion((2, 1)), _without_rare_leaves),
    "adaptive siblings newest first": WrongTree("iid", TreeBudget(4, 3), _newest_first),
    "chosen, tried as drawn": WrongTree("top-k", TreeBudget.expansion((2, 1)), _as_if_drawn),
    "best first, chosen, tried as drawn": WrongTree("top-k", TreeBudget(3, 3), _as_if_drawn),
}


@pytest.mark.parametrize("name", WRONG_TREES)
def test_known_wrong_trees_are_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_batch, "BEST_FIRST_WIDTH", 2)
    wrong = WRONG_TREES[name]
    distances: dict[Rule, list[Fraction]] = {rule: [] for rule in RULES}
    for seed, (target, q) in enumerate(MODELS, start=1):
        trees = every_tree_of(EnumeratedDrafter(q, wrong.drawing, calibration=calibrated(seed, "a")), wrong.budget)
        spoilt = [(mass, TokenTree(tree.tokens, tree.parents, wrong.spoil(tree, q))) for mass, tree in trees]
        for rule in RULES:
            assert distance(rule, trees, target) == 0
            distances[rule].append(distance(rule, spoilt, target))
    assert all(max(found) > Fraction(1, 200) for found in distances.values())


class TellingDrafter(DeviceDrafter):
    """Chooses among candidates by the probability of each drawn token itself."""

    def confidence(self, row: Candidates, rank: int) -> np.float32:
        return F32(row.drawn_from.probs[0][row.drawn_from.places[0, rank]])


@pytest.mark.parametrize("rule", RULES)
def test_a_device_that_chooses_by_the_tokens_drawn_is_detected(rule: Rule) -> None:
    for seed, (target, q) in enumerate(MODELS, start=1):
        right, wrong = (
            every_tree_of(make(q, calibrated(seed, "a"), (1, 2, 1), (2, 2, 2)), TreeBudget(3, 3))
            for make in (DeviceDrafter, TellingDrafter)
        )
        assert distance(rule, right, target) == 0
        assert distance(rule, wrong, target) > Fraction(1, 200)


def _nothing_taken_out(left: Probs, *_: Any) -> Probs:
    return left.copy()


def _weight_forgotten(left: Probs, *args: Any) -> Probs:
    return verify_residual(left / left.sum(), *args)


verify_residual = algorithms.residual
WRONG_RULES: dict[str, tuple[tuple[Rule, ...], str, Callable[..., Any]]] = {
    "residual not updated": (RULES, "residual", _nothing_taken_out),
    "residual of the whole distribution": ((verify_traversal,), "residual", _weight_forgotten),
    "coin without the draft's distribution": (RULES, "weight_of", lambda *_: Fraction(1)),
}


@pytest.mark.parametrize("name", WRONG_RULES)
def test_known_wrong_rules_are_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rules, part, wrong = WRONG_RULES[name]
    for target, q in MODELS:
        trees = every_tree_of(EnumeratedDrafter(q, "without-replacement"), TreeBudget.expansion((2, 1)))
        with monkeypatch.context() as patch:
            assert all(distance(rule, trees, target) == 0 for rule in rules)
            patch.setattr(algorithms, part, wrong)
            assert all(distance(rule, trees, target) > Fraction(1, 1000) for rule in rules)


# --------------------------------------------------------------------------------------------- coins


class ForkedUniforms:
    """Coins of few values, as real ones have 2**53: 0 among them, 1 not."""

    def __init__(self, forks: Forks, num_values: int) -> None:
        self._forks, self._num_values = forks, num_values

    def next_uniform(self) -> Fraction:
        return Fraction(self._forks.choose([Fraction(1, self._num_values)] * self._num_values), self._num_values)


class CarelessSource(SeededSource):
    """As the real one, but a coin of 0 accepts, and finds, what is impossible."""

    def accepts(self, p: Any, q: Any) -> bool:
        return bool(self._uniforms.next_uniform() * q <= p)

    def sample(self, distribution: Probs) -> int:
        return int(np.searchsorted(distribution.cumsum(), self._uniforms.next_uniform(), side="left"))


def _chances(make: type[SeededSource], use: Callable[[SeededSource], int]) -> dict[int, Fraction]:
    chances: dict[int, Fraction] = {}
    for probability, outcome in every(lambda forks: use(make(ForkedUniforms(forks, 12)))):  # type: ignore[arg-type]
        chances[outcome] = chances.get(outcome, Fraction(0)) + probability
    return chances


DISTRIBUTIONS = [Model(seed, 4, (0, 1, 2, 3, 6)).distribution(()) for seed in range(60)]
TWELFTHS = [distribution for distribution in DISTRIBUTIONS if all(12 % p.denominator == 0 for p in distribution)]


def test_random_sources_have_the_stated_probabilities() -> None:
    """The real chance, with every coin: on a grid that the distributions fit, nothing is rounded and nothing is off."""
    assert len(TWELFTHS) > 10
    assert any(distribution[0] == 0 for distribution in TWELFTHS)
    for distribution in TWELFTHS:
        wanted = {token: p for token, p in enumerate(distribution) if p}
        assert (
            _chances(
                SeededSource,
                lambda chance, distribution=distribution: chance.sample(np.array(distribution, dtype=object)),
            )
            == wanted
        )
    for k in range(15):
        p, q = Fraction(k, 24), Fraction(1, 2)
        accepted = _chances(SeededSource, lambda chance, p=p, q=q: chance.accepts(p, q)).get(True, Fraction(0))
        assert accepted == min(1, p / q)


def test_careless_random_sources_are_detected() -> None:
    assert _chances(CarelessSource, lambda chance: chance.accepts(Fraction(0), Fraction(1, 2)))[True] > 0
    distribution = np.array([Fraction(0), Fraction(1, 2), Fraction(1, 2)], dtype=object)
    assert _chances(CarelessSource, lambda chance: chance.sample(distribution))[0] > 0

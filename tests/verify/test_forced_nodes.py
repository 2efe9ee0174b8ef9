"""Forced nodes next to drawn and chosen ones: outputs have exactly the target's distribution within its grammar.

The grammar, its drafter, the merge and the rules are the real ones; what can happen is enumerated in fractions.
"""

import random
from collections.abc import Sequence
from fractions import Fraction

import pytest

from drafting import span_of
from reference.enumeration import (
    ROOT,
    Distribution,
    EnumeratedDrafter,
    Forks,
    Model,
    Path,
    calibrated,
    distance,
    every_tree,
)
from specinfer import SamplingParams, StructuredOutputsParams
from specinfer.core import rules
from specinfer.core.grammar.compiler import GrammarCompiler
from specinfer.core.grammar.state import Grammar
from specinfer.core.lookups import GRAMMAR
from specinfer.core.request import Request
from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.drafters.base import Drafter
from specinfer.drafters.growth import tree_batch
from specinfer.drafters.lookup.grammar import GrammarDrafter
from specinfer.drafters.merge.merged import MergedDrafter
from tiny import EOS, VOCAB, make_request, make_tokenizer

COMPILER = GrammarCompiler(make_tokenizer(), VOCAB, (EOS,))
# One text is forced; two branches; a token that the tokenizer merges across the end of what is forced.
GRAMMARS = ["xyz(v|w)xyz", "(vx|wyy)z{5}", "x(th|a)z{6}"]


class Constrained(Model):
    """A model that gives weight to the tokens that a grammar allows."""

    def __init__(self, seed: int, grammar: Grammar, weights: Sequence[int] = (1, 2, 3, 5)) -> None:
        super().__init__(seed, VOCAB, weights)
        self._grammar = grammar

    def distribution(self, context: Path) -> Distribution:
        if context not in self._distributions:
            legal = self._grammar.mask(context).nonzero().flatten().tolist()
            generator = random.Random(f"{self.seed} {context}")
            weights = {token: generator.choice(self._weights) for token in legal[:4] or [EOS]}
            total = sum(weights.values())
            self._distributions[context] = tuple(Fraction(weights.get(token, 0), total) for token in range(VOCAB))
        return self._distributions[context]


def _request(regex: str) -> Request:
    grammar = COMPILER.compile(StructuredOutputsParams(regex=regex))
    return make_request("0", [ROOT], SamplingParams(max_tokens=8), grammar=grammar)


def _trees(request: Request, drafters: Sequence[Drafter], budget: TreeBudget) -> list[tuple[Fraction, TokenTree]]:
    calibration = calibrated(0)
    merged = MergedDrafter(drafters, calibration, may_choose=False)

    def draft(forks: Forks) -> TokenTree:
        for drafter in drafters:
            if isinstance(drafter, EnumeratedDrafter):
                drafter.forks, drafter.calibration = forks, calibration
        (tree,) = merged.draft([span_of(request)], [budget])
        assert not merged.num_failures, "a drafter failed"
        return tree

    return list(every_tree(draft))


@pytest.fixture(autouse=True)
def _narrow_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_batch, "BEST_FIRST_WIDTH", 2)


@pytest.mark.covering(2)
@pytest.mark.parametrize("regex", GRAMMARS)
@pytest.mark.parametrize("drawing", [None, "iid", "without-replacement", "hybrid", "top-k"])
@pytest.mark.parametrize("budget", [TreeBudget.expansion((2, 1), 2), TreeBudget(4, 3), TreeBudget(6, 4)], ids=str)
def test_forced_nodes_keep_the_distribution(regex: str, drawing: str | None, budget: TreeBudget) -> None:
    request = _request(regex)
    assert request.grammar is not None
    target = Constrained(3, request.grammar)
    drafters: list[Drafter] = [GrammarDrafter()]
    if drawing is not None:
        drafters.append(EnumeratedDrafter(Constrained(4, request.grammar), drawing))
    trees = _trees(request, drafters, budget)
    assert any(draw.drafter == GRAMMAR for _, tree in trees for draw in tree.draws)
    for name in rules.random_rules():
        assert distance(rules.RULES[name].verify, trees, target) == 0, name

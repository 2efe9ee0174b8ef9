"""Which chosen guesses a merged tree keeps: held equal to a plain weighing of one tree after the other."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specinfer.core.request import Request
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree import Draw, TokenTree, TreeBudget
from specinfer.drafters.growth.calibration import RANKS, Calibration, source
from specinfer.drafters.merge.pruning import Pruning
from specinfer.verify import Acceptance
from tiny import make_request, paths_of, trees


def _request(number: int, temperature: float) -> Request:
    return make_request(str(number), [7], SamplingParams(temperature=temperature), seed=number)


def _trained(seed: int) -> Calibration:
    """Different chances for each source, rank and confidence."""
    calibration = Calibration()
    for i in range(600):
        number = (i * 7919 + seed * 104729) % 1009
        name = source("abc"[i % 3], _request(0, float(i % 2)))
        calibration.count(name, number % RANKS, number / 1009, kept=number % (2 + i % 3) == 0)
    return calibration


def _plain_path_probs(request: Request, tree: TokenTree, calibration: Calibration) -> list[float]:
    """Of each node, as if what is learned about rivals were still what their drafters say."""
    missed = [1.0] * len(tree)
    ranks: dict[tuple[int, str], int] = {}
    for draw in tree.draws:
        key = tree.parents[draw.node], draw.drafter
        ranks[key] = rank = ranks.get(key, -1) + 1
        missed[draw.node] *= (
            1.0 - calibration.acceptance_prob(source(draw.drafter, request), [rank], [draw.confidence])[0]
        )
    path_probs = [1.0] * len(tree)
    for node, parent in enumerate(tree.parents[1:], start=1):
        siblings = sorted(tree.children[parent].values(), key=missed.__getitem__)
        chance = Calibration(trust=1.0).acceptance_prob("", [siblings.index(node)], [1.0 - missed[node]])[0]
        path_probs[node] = path_probs[parent] * chance
    return path_probs


@st.composite
def _merged(draw: st.DrawFn) -> TokenTree:
    """Of up to three drafters; nodes of one drafter as sure as their tokens and depths have it."""
    several = []
    for name in draw(st.lists(st.sampled_from("abc"), min_size=1, unique=True)):
        tree = draw(trees(max_nodes=12, name=name))
        confidence = draw(st.lists(st.floats(0, 1), min_size=len(tree), max_size=len(tree)))
        draws = tuple(Draw(node, name, None, confidence[node]) for node in range(1, len(tree)))
        several.append(TokenTree(tree.tokens, tree.parents, draws))
    return TokenTree.merge(several)


@given(
    st.lists(
        st.tuples(_merged(), st.sampled_from([0.0, 1.0]), st.integers(1, 12), st.sampled_from([0.0, 0.05, 0.3])),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 9),
)
def test_pruning_keeps_the_nodes_of_highest_path_probability(
    batch: list[tuple[TokenTree, float, int, float]], seed: int
) -> None:
    calibration = _trained(seed)
    requests = [_request(i, temperature) for i, (_, temperature, _, _) in enumerate(batch)]
    budgets = [TreeBudget(nodes, 99, min_path_prob=least) for _, _, nodes, least in batch]
    before = [tree for tree, _, _, _ in batch]
    after = Pruning(calibration).keep_best(requests, before, budgets)
    for request, budget, tree, kept in zip(requests, budgets, before, after, strict=True):
        path_probs = _plain_path_probs(request, tree, calibration)
        by_path = dict(zip(paths_of(tree), path_probs, strict=True))
        mine = [by_path[path] for path in paths_of(kept)]
        able = sorted((w for w in path_probs[1:] if w >= budget.min_path_prob), reverse=True)[: budget.max_nodes]
        assert sorted(mine[1:], reverse=True) == pytest.approx(able)
        paths, kept_paths = paths_of(tree), paths_of(kept)
        of_kept = {path: [d[1:] for d in tree.draws if paths[d.node] == path] for path in kept_paths}
        assert of_kept == {path: [d[1:] for d in kept.draws if kept_paths[d.node] == path] for path in of_kept}


def test_rivals_that_err_together_are_found_out() -> None:
    """Two drafters sure of different tokens: the one that is kept each time wins the place."""
    request, pruning = _request(0, 0.0), Pruning(Calibration())
    chains = [TokenTree.chain(7, [token], name, sure) for token, name, sure in ((1, "a", 0.93), (2, "b", 0.75))]
    tree, budget = TokenTree.merge(chains), TreeBudget(2, 1, min_path_prob=0.25)
    (first,) = pruning.keep_best([request], [tree], [budget])
    assert paths_of(first) == [(), (1,), (2,)]
    for _ in range(50):
        (kept,) = pruning.keep_best([request], [tree], [replace(budget, min_path_prob=0.0)])
        pruning.observe(request, kept, Acceptance((1,), 0))
    (last,) = pruning.keep_best([request], [tree], [budget])
    assert paths_of(last) == [(), (1,)], "beside the better guess the other one is worth little"


def test_what_was_not_walked_teaches_nothing() -> None:
    request, pruning = _request(0, 0.0), Pruning(Calibration())
    tree = TokenTree.chain(7, [1, 2], "a", 0.5)
    (kept,) = pruning.keep_best([request], [tree], [TreeBudget(2, 2)])
    pruning.observe(request, TokenTree.root(7), Acceptance((), 1))  # another tree, cut to fit
    pruning.observe(request, kept, Acceptance((1,), 1))  # seen already
    pruning.keep_best([request], [tree], [TreeBudget(2, 2)])
    pruning.forget(request.request_id)
    pruning.observe(request, kept, Acceptance((1,), 1))
    assert pruning._rivals.by_rank("all")[0] == Calibration().by_rank("all")[0]

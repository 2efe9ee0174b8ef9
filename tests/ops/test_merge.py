"""Trees that are merged and pruned in one native call are those that are merged one by one and pruned plainly."""

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from reference.pruning import kept_nodes, weigh
from specinfer.core.request import Request
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree import Distribution, Draw, TokenTree, TreeBudget
from specinfer.drafters.growth.calibration import RANKS, Calibration, source
from specinfer.drafters.merge.pruning import Pruning
from specinfer.verify import Acceptance
from tiny import as_values, make_request, trees

LAW = Distribution(np.array([1, 2, 0]), np.array([0.5, 0.25, 0.25]))


@st.composite
def _drawn(draw: st.DrawFn) -> list[TokenTree]:
    """Trees of up to three drafters, with duplicates on record, some of them drawn."""
    several, is_drawn = [], draw(st.booleans())
    for name in draw(st.lists(st.sampled_from("abc"), min_size=1, unique=True)):
        tree = draw(trees(max_nodes=12, name=name))
        nodes = [one.node for one in tree.draws]
        nodes += draw(st.lists(st.sampled_from(nodes), max_size=3)) if nodes else []
        laws = draw(st.lists(st.booleans(), min_size=len(nodes), max_size=len(nodes)))
        sure = draw(st.lists(st.floats(0, 1), min_size=len(nodes), max_size=len(nodes)))
        draws = [
            Draw(node, name, LAW if law and is_drawn else None, one)
            for node, law, one in zip(nodes, laws, sure, strict=True)
        ]
        several.append(TokenTree(tree.tokens, tree.parents, draws))
    return several


def _trained(seed: int, requests: Sequence[Request]) -> Calibration:
    calibration = Calibration()
    rng = np.random.default_rng(seed)
    for i in range(300):
        name = source("abc"[i % 3], requests[i % len(requests)])
        calibration.count(name, int(rng.integers(RANKS)), float(rng.random()), kept=bool(rng.integers(2)))
    return calibration


@given(
    st.lists(
        st.tuples(_drawn(), st.sampled_from([0.0, 1.0]), st.integers(1, 12), st.sampled_from([0.0, 0.05, 0.3])),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 9),
)
def test_the_plain_code_keeps_the_same_nodes_and_draws(
    batch: list[tuple[list[TokenTree], float, int, float]], seed: int
) -> None:
    requests = [make_request(str(i), [7], SamplingParams(temperature=one[1]), seed=i) for i, one in enumerate(batch)]
    budgets = [TreeBudget(nodes, 99, min_path_prob=least) for _, _, nodes, least in batch]
    groups = [several for several, *_ in batch]
    is_pruned = [all(one.distribution is None for tree in several for one in tree.draws) for several in groups]
    calibration = _trained(seed, requests)
    merging = Pruning(calibration)
    for _ in range(2):  # the second time with what was learned of the first
        merged = merging.merge(requests, groups, budgets, is_pruned)
        for request, budget, several, prunes, tree in zip(requests, budgets, groups, is_pruned, merged, strict=True):
            wanted = TokenTree.merge(several)
            if prunes:
                weighed = weigh(request, wanted, calibration, merging.rivals)
                nodes = kept_nodes(weighed.path_prob, budget)
                wanted = wanted.keep(nodes)
                kept = merging.pruned[request.request_id]
                assert kept.ranks[1:].tolist() == [weighed.ranks[node] for node in nodes[1:]]
                assert kept.alone[1:].tolist() == [weighed.alone[node] for node in nodes[1:]]
            assert as_values(tree) == as_values(wanted)
            assert tree.depths == wanted.depths
        for request, tree in zip(requests, merged, strict=True):
            merging.observe(request, tree, Acceptance(tree.path(len(tree) - 1), 0))


def test_merged_trees_merge_again_with_their_distributions() -> None:
    """What a draw was drawn from is found through the pools of several merged trees."""
    parts = [TokenTree([7, token], [-1, 0], [Draw(1, name, LAW)]) for name, token in (("a", 1), ("b", 2), ("c", 0))]
    request, budget = make_request("0", [7], SamplingParams(temperature=1.0)), TreeBudget(9, 9)
    merging = Pruning(Calibration())
    (two,) = merging.merge([request], [parts[:2]], [budget], [False])
    (three,) = merging.merge([request], [[two, parts[2]]], [budget], [False])
    assert as_values(three) == as_values(TokenTree.merge(parts))

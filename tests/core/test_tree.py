"""Token trees: what a tree says of itself, against its set of token paths; merging, leaving out, and budgets."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specinfer.core.tree import OFF, Distribution, Draw, TokenTree, TreeBudget, expansion_nodes
from tiny import paths_of, trees


def _paths(tree: TokenTree) -> list[tuple[int, ...]]:
    """For each node its token path, by following parents upwards."""
    paths = []
    for node in range(len(tree)):
        path = []
        while node:
            path.append(tree.tokens[node])
            node = tree.parents[node]
        paths.append(tuple(reversed(path)))
    return paths


@given(trees())
def test_every_view_agrees_with_the_token_paths(tree: TokenTree) -> None:
    paths = _paths(tree)
    assert paths_of(tree) == paths
    assert len(tree) == tree.num_guessed + 1 == len(set(paths))
    assert tree.depths == [len(path) for path in paths]
    assert tree.max_depth == max(map(len, paths))
    for node, path in enumerate(paths):
        assert tuple(tree.tokens[n] for n in tree.path(node)) == path
        wanted = {p[-1]: n for n, p in enumerate(paths) if p and p[:-1] == path}
        assert tree.children[node] == wanted
        assert tree.candidates[node] == [draw for draw in tree.draws if tree.parents[draw.node] == node]
    ancestry = tree.ancestry()
    for (a, path_a), (b, path_b) in itertools.product(enumerate(paths), repeat=2):
        assert ancestry[a, b] == (path_a[: len(path_b)] == path_b)


@given(st.lists(trees(), min_size=1, max_size=4))
def test_merging_is_the_union_of_paths(several: list[TokenTree]) -> None:
    merged = TokenTree.merge(several)
    paths = _paths(merged)
    assert len(set(paths)) == len(paths)
    assert set(paths) == {path for tree in several for path in _paths(tree)}
    assert merged.tokens[0] == 7
    drawn = [_paths(tree)[draw.node] for tree in several for draw in tree.draws]
    assert [paths[draw.node] for draw in merged.draws] == drawn, "every draw stays, in order"


DISTRIBUTION = Distribution(np.array([1, 2, 3]), np.array([0.5, 0.25, 0.25]))


@st.composite
def _drawn_trees(draw: st.DrawFn) -> TokenTree:
    """Trees with duplicates on record, each draw told apart by its confidence."""
    tree = draw(trees(max_nodes=6))
    nodes = [d.node for d in tree.draws]
    again = draw(st.lists(st.sampled_from(nodes), max_size=4)) if nodes else []
    sure = [draw(st.floats(0, 1, allow_subnormal=False)) for _ in (*nodes, *again)]
    draws = [Draw(node, "a", DISTRIBUTION if i % 2 else None, sure[i]) for i, node in enumerate((*nodes, *again))]
    return TokenTree(tree.tokens, tree.parents, tuple(draws))


@given(st.lists(_drawn_trees(), min_size=1, max_size=4))
def test_merging_keeps_every_draw_and_duplicates_too(several: list[TokenTree]) -> None:
    merged = TokenTree.merge(several)
    wanted = [
        (tree.path_tokens(d.node), d.drafter, d.distribution, d.confidence) for tree in several for d in tree.draws
    ]
    assert [(merged.path_tokens(d.node), d.drafter, d.distribution, d.confidence) for d in merged.draws] == wanted
    for node in range(len(merged)):
        at_node = [(path, sure) for path, _, _, sure in wanted if path[:-1] == merged.path_tokens(node)]
        assert [(merged.path_tokens(d.node), d.confidence) for d in merged.candidates[node]] == at_node


@given(trees(), st.data())
def test_a_tree_of_fewer_nodes_keeps_their_draws(tree: TokenTree, data: st.DataObject) -> None:
    wanted = set(data.draw(st.lists(st.integers(0, len(tree) - 1), max_size=4)))
    nodes = sorted({0} | {n for node in wanted for n in tree.path(node)})
    pruned = tree.keep(nodes)
    assert paths_of(pruned) == [tree.path_tokens(node) for node in nodes]
    assert [pruned.path_tokens(d.node) for d in pruned.draws] == [
        tree.path_tokens(d.node) for d in tree.draws if d.node in nodes
    ]
    assert tree.keep(range(len(tree))) == tree


def test_a_draw_with_a_distribution_may_not_be_left_out() -> None:
    """What a rejected draw leaves to others is part of the distribution: without it the output would be another."""
    tree = TokenTree((7, 1, 2), (-1, 0, 0), (Draw(1, "a", DISTRIBUTION), Draw(2, "a")))
    assert tree.keep([0, 1]).draws == (Draw(1, "a", DISTRIBUTION),)
    with pytest.raises(AssertionError, match="must stay on record"):
        tree.keep([0, 2])


def test_distributions_without_the_tokens_drawn_before() -> None:
    assert DISTRIBUTION.weights().tolist() == [0.5, 0.25, 0.25]
    assert DISTRIBUTION._replace(removed=(0,)).weights().tolist() == [0, 0.5, 0.5]
    assert DISTRIBUTION._replace(removed=(0, 2)).weights().tolist() == [0, 1, 0]
    assert DISTRIBUTION.probs.tolist() == [0.5, 0.25, 0.25], "not changed"


@pytest.mark.parametrize("order", [1, -1])
def test_merged_nodes_belong_to_the_first_drafter(order: int) -> None:
    """The largest tree keeps the numbers of its nodes; draws stay in the order of the trees."""
    trees = TokenTree.chain(7, [1, 2], "one"), TokenTree.chain(7, [1, 3, 4], "two")
    merged = TokenTree.merge(trees[::order])
    assert merged.tokens == (7, 1, 3, 4, 2)
    assert merged.parents == (-1, 0, 1, 2, 1)
    assert merged.drafters() == [None, "one" if order == 1 else "two", "two", "two", "one"]
    first, second = [[(1, "one"), (4, "one")], [(1, "two"), (2, "two"), (3, "two")]][::order]
    assert [(draw.node, draw.drafter) for draw in merged.draws] == [*first, *second]


def test_trees_of_different_roots_do_not_merge() -> None:
    with pytest.raises(AssertionError, match="one root"):
        TokenTree.merge([TokenTree.root(1), TokenTree.root(2)])


@pytest.mark.parametrize(
    ("tokens", "parents"),
    [((), ()), ((1,), (0,)), ((1, 2), (-1,)), ((1, 2), (-1, 1)), ((1, 2, 3), (-1, 2, 0)), ((1, 2), (-1, -1))],
)
def test_parents_stand_before_children(tokens: tuple[int, ...], parents: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError):
        TokenTree(tokens, parents)


def test_roots_and_chains() -> None:
    assert TokenTree.root(5) == TokenTree((5,), (-1,))
    chain = TokenTree.chain(5, [6, 6, 8], "x")
    assert paths_of(chain) == [(), (6,), (6, 6), (6, 6, 8)]
    assert chain.drafters() == [None, "x", "x", "x"]
    assert {draw.confidence for draw in TokenTree.chain(5, [6, 8], "x", 0.25).draws} == {0.25}
    assert TokenTree.chain(5, []) == TokenTree.root(5)
    assert np.array_equal(chain.ancestry(), np.tri(4, dtype=bool))


# --------------------------------------------------------------------------------------------- budgets


def _num_nodes(widths: tuple[int, ...]) -> int:
    return sum(len(list(itertools.product(*(range(w) for w in widths[:d])))) for d in range(1, len(widths) + 1))


WIDTHS = st.lists(st.integers(1, 4), max_size=4).map(tuple)


@given(WIDTHS, st.integers(1, 3), st.integers(-1, 6), st.integers(-1, 300))
def test_a_fixed_expansion_is_cut_to_its_deepest_beginning(
    widths: tuple[int, ...], num_drafters: int, max_depth: int, max_nodes: int
) -> None:
    budget = TreeBudget.expansion(widths, num_drafters)
    assert expansion_nodes(widths) == _num_nodes(widths)
    assert (budget.max_nodes, budget.max_depth) == (num_drafters * _num_nodes(widths), len(widths))
    cut = budget.cut(max_depth, max_nodes)
    assert cut.widths == widths[: len(cut.widths)]
    assert cut == TreeBudget.expansion(cut.widths, num_drafters if widths else 1)
    assert cut.max_nodes <= max(max_nodes, 0)
    fits = [d for d in range(len(widths) + 1) if d <= max_depth and num_drafters * _num_nodes(widths[:d]) <= max_nodes]
    assert len(cut.widths) == max(fits, default=0)


@given(st.integers(1, 40), st.integers(1, 9), st.integers(-2, 12), st.integers(-2, 50))
def test_best_first_is_cut_to_its_limits(nodes: int, depth: int, max_depth: int, max_nodes: int) -> None:
    budget = TreeBudget(nodes, depth, min_path_prob=0.1, min_gain=0.2)
    cut = budget.cut(max_depth, max_nodes)
    if max_depth < 1 or max_nodes < 1:
        assert cut == OFF
    else:
        assert (cut.max_nodes, cut.max_depth) == (min(nodes, max_nodes), min(depth, max_depth))
        assert (cut.widths, cut.min_path_prob, cut.min_gain) == ((), 0.1, 0.2)
    assert cut.cut(max_depth, max_nodes) == cut


def test_shares_of_several_drafters() -> None:
    """Each grows the whole expansion; best first they get what is given to them, and no more than there is."""
    fixed = TreeBudget.expansion((2, 1), num_drafters=3)
    assert fixed.max_nodes == 12
    assert fixed.share(1) == fixed.share(100) == TreeBudget.expansion((2, 1))
    best_first = TreeBudget(8, 4, min_path_prob=0.1)
    assert best_first.share(5) == TreeBudget(5, 4, min_path_prob=0.1)
    assert best_first.share(100) == best_first
    assert best_first.share(0) == OFF == OFF.share(9)

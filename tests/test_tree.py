"""Token trees: what a tree says of itself, against its set of token paths; budgets and merging."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specinfer.tree import TokenTree, TreeBudget
from tiny import trees


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
    assert tree.path_tokens() == paths
    assert len(tree) == tree.num_guessed + 1 == len(set(paths))
    assert tree.depths() == [len(path) for path in paths]
    for node, path in enumerate(paths):
        assert tuple(tree.tokens[n] for n in tree.path(node)) == path
        wanted = {p[-1]: n for n, p in enumerate(paths) if p and p[:-1] == path}
        assert tree.children()[node] == wanted
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


@given(st.lists(trees(), min_size=1, max_size=3), st.integers(0, 12))
def test_merging_within_a_budget_favours_earlier_trees(several: list[TokenTree], limit: int) -> None:
    merged = TokenTree.merge(several, limit)
    whole, kept = _paths(TokenTree.merge(several)), _paths(merged)
    assert merged.num_guessed == min(limit, len(whole) - 1)
    assert kept == whole[: len(kept)], "the first nodes in the order of the trees"
    assert all(0 < draw.node < len(merged) for draw in merged.draws)


def test_merged_nodes_belong_to_who_guessed_first() -> None:
    one, two = TokenTree.chain(7, [1, 2], "one"), TokenTree.chain(7, [1, 3, 4], "two")
    merged = TokenTree.merge([one, two])
    assert merged.tokens == (7, 1, 2, 3, 4)
    assert merged.parents == (-1, 0, 1, 1, 3)
    assert merged.drafters() == [None, "one", "one", "two", "two"]
    assert [(draw.node, draw.drafter) for draw in merged.draws] == [
        (1, "one"),
        (2, "one"),
        (1, "two"),
        (3, "two"),
        (4, "two"),
    ]


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
    assert chain.path_tokens() == [(), (6,), (6, 6), (6, 6, 8)]
    assert chain.drafters() == [None, "x", "x", "x"]
    assert TokenTree.chain(5, []) == TokenTree.root(5)
    assert np.array_equal(chain.ancestry(), np.tri(4, dtype=bool))


def _num_nodes(widths: tuple[int, ...]) -> int:
    return sum(len(list(itertools.product(*(range(w) for w in widths[:d])))) for d in range(1, len(widths) + 1))


@given(st.lists(st.integers(1, 4), max_size=4).map(tuple), st.integers(-1, 6), st.integers(-1, 100))
def test_budgets(widths: tuple[int, ...], max_depth: int, max_nodes: int) -> None:
    assert TreeBudget(widths).num_nodes == _num_nodes(widths)
    cut = TreeBudget(widths).cut(max_depth, max_nodes).widths
    assert cut == widths[: len(cut)]
    fits = [d for d in range(len(widths) + 1) if d <= max_depth and _num_nodes(widths[:d]) <= max_nodes]
    assert len(cut) == max(fits, default=0)

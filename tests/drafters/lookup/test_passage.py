"""Passages that an output repeats with changes: where it goes on, and which changes are expected again."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.drafters.lookup.passage import Alignment, as_text
from specinfer.drafters.lookup.suffix_growth import grow

BUDGET = TreeBudget(8, 8)


def _tree(alignment: Alignment, root: int, budget: TreeBudget = BUDGET) -> TokenTree:
    return grow(root, alignment.matches("text"), budget)


def _passes(before: Sequence[int], after: Sequence[int], budget: TreeBudget = BUDGET) -> int:
    """Return the passes in which an output follows a text before a change."""
    alignment, num_output, passes = Alignment(before, begins=True), 0, 0
    while num_output < len(after):
        tree, node, start, passes = _tree(alignment, 0, budget), 0, num_output, passes + 1
        assert tree.num_guessed <= budget.max_nodes
        while num_output < len(after):
            token, num_output = after[num_output], num_output + 1
            if token not in tree.children[node]:
                break
            node = tree.children[node][token]
        alignment.read(after[start:num_output])
    return passes


def _replaced(text: Sequence[int], old: Sequence[int], new: Sequence[int]) -> list[int]:
    result, i = list[int](), 0
    while i < len(text):
        is_here = list(text[i : i + len(old)]) == list(old)
        result += new if is_here else [text[i]]
        i += len(old) if is_here else 1
    return result


@given(st.integers(1, 30), st.integers(0, 4), st.lists(st.just(999), max_size=4), st.booleans())
def test_the_text_behind_a_change_is_proposed_after_two_tokens_of_it(
    place: int, num_old: int, new: list[int], by_token: bool
) -> None:
    text = list(range(60))
    output = [*text[:place], *new, *text[place + num_old : place + num_old + 2]]
    alignment = Alignment(text, begins=True)
    for part in [[token] for token in output] if by_token else [output]:
        alignment.read(part)
    tree = _tree(alignment, 0)
    assert list(tree.path_tokens(tree.depths.index(5))) == text[place + num_old + 2 : place + num_old + 7]


def test_behind_a_changed_token_both_ends_of_the_change_are_proposed() -> None:
    alignment = Alignment(range(30), begins=True)
    alignment.read([0, 1, 2, 99])
    assert list(_tree(alignment, 99).children[0]) == [4, 3], "the token was replaced, or put in"


@pytest.mark.parametrize(
    ("old", "new"),
    [((70,), (90,)), ((70, 71), (90,)), ((70,), (90, 91)), ((70, 71), (90, 91, 92)), ((71,), (90,))],
)
def test_a_rename_costs_one_divergence(old: Sequence[int], new: Sequence[int]) -> None:
    source = random.Random(1)
    text = [token for i in range(20) for token in [*(source.randrange(60) for _ in range(5 + i % 4)), 70, 71]]
    passes = _passes(text, _replaced(text, old, new))
    assert passes <= len(text) / 8 + 12
    assert passes < _passes(text, [*_replaced(text, old, new)[:9], *_replaced(text, old, [93] * len(new))[9:]])


def test_an_argument_that_was_added_is_added_at_further_calls() -> None:
    source = random.Random(2)
    text = [token for _ in range(12) for token in [*(source.randrange(60) for _ in range(7)), 80, 81]]
    after = _replaced(text, [80, 81], [80, 90, 91, 92, 81])
    assert _passes(text, after) <= len(after) / 8 + 8


def test_a_change_that_is_not_made_again_is_expected_less() -> None:
    text = [70, 1, 2, 3, 70, 4, 5, 6, 70, 7, 8, 9, 70, 10, 11]
    alignment = Alignment(text, begins=True)
    alignment.read([90, 1, 2, 3])
    tree = _tree(alignment, 3)
    assert list(tree.children[0]) == [90, 70], "what was replaced is expected to be replaced again"
    alignment.read([70, 4, 5, 6, 70, 7, 8, 9])
    assert next(iter(_tree(alignment, 9).children[0])) == 70


def test_a_text_is_entered_where_it_is_repeated_last() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5, 6, 8]
    alignment = Alignment(text, begins=False)
    assert alignment.matches("text") == []
    alignment.read([1, 2, 3, 4, 5], 6)
    assert alignment.matches("text") == []
    alignment.read([6], 6)
    assert _tree(alignment, 6, TreeBudget(1, 1)).tokens == (6, 8)


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=30),
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=6), max_size=12),
    st.booleans(),
)
def test_any_output_gets_paths_of_the_text_and_of_changes(
    text: list[int], parts: list[list[int]], begins: bool
) -> None:
    alignment, output = Alignment(text, begins=begins), list[int]()
    for part in parts:
        alignment.read(part)
        output += part
        assert alignment.num_read == len(output)
        tree = _tree(alignment, part[-1], TreeBudget(12, 6))
        assert tree.num_guessed <= 12
        assert set(tree.tokens) <= {*text, *output}


def test_one_token_over_and_over_is_read_in_little_time() -> None:
    alignment = Alignment([7] * 50_000, begins=True)
    for _ in range(200):
        alignment.read([8, *[7] * 40])
        assert _tree(alignment, 7).num_guessed


def test_any_token_id_has_a_character() -> None:
    ids = [0, 0xD800, 0xDFFF, 0x10FFFF, 0x110000, 2**31 - 1]
    text = as_text(ids)
    assert [ord(character) for character in text] == [token % 0x110000 for token in ids]
    alignment = Alignment([*ids, 5, 6], begins=True)
    alignment.read(ids)
    (match,) = alignment.matches("a")
    assert match.text.continuations(match.state, 2) == ((5, match.state + 1),)

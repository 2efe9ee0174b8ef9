"""Prompt lookup: the continuation of the last n-gram, by hand and by searching backwards."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafting import draft_expansion, draft_within
from specinfer.core.sampling import SamplingParams
from specinfer.core.tree import TreeBudget
from specinfer.drafters import (
    NGramDrafter,
)
from tiny import make_request


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
    tree = draft_expansion(NGramDrafter(), make_request("0", tokens), 1, 1, 1)
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
        tree = draft_within(drafter, request, TreeBudget(9, 4))
        assert list(tree.tokens[1:]) == _lookup(request.token_ids, 4)
        request.append(token, None)
    drafter.forget("0")
    drafter.forget("0")


def test_ngram_forgets_a_request() -> None:
    """Another request of the same name must not be served from the first one's text."""
    drafter = NGramDrafter()
    assert draft_expansion(drafter, make_request("0", [1, 2, 3, 1, 2]), 1).num_guessed == 1
    drafter.forget("0")
    assert draft_expansion(drafter, make_request("0", [9, 9, 4, 1, 2]), 1).num_guessed == 0


@pytest.mark.parametrize(("low", "high"), [(0, 2), (3, 2), (-1, -1)])
def test_ngram_sizes(low: int, high: int) -> None:
    with pytest.raises(ValueError, match="n-gram sizes"):
        NGramDrafter(low, high)

"""Thoughts: where they begin and end, their tokens, and the tokens that must end them, on the output and on paths."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import reference
from specinfer.core.thought import Phase, Reasoning, Thought

END_IDS = (2, 7, 2, 3, 4)


def _letters(tokens: Sequence[int]) -> str:
    return "".join(chr(ord("a") + token) for token in tokens)


def _bytes(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode(errors="replace")


def _thought(text: str, budget: int | None = None, **fields: Any) -> Thought:
    """After a text of one byte for each token."""
    marks: dict[str, Any] = {"start": "<t>", "end": "</t>", "end_ids": tuple(b"</t>"), "is_open": False}
    thought = Thought(Reasoning(**marks | fields), _bytes, budget)
    for token in text.encode():
        thought.advance(token)
    return thought


@pytest.mark.parametrize(
    ("text", "phase", "num_tokens"),
    [
        ("", Phase.UNDECIDED, 0),
        (" \n\n \t", Phase.UNDECIDED, 0),
        ("\n<t", Phase.UNDECIDED, 0),
        ("<t>", Phase.THOUGHT, 0),
        ("\n<t>why</t", Phase.THOUGHT, 6),
        ("<t>why<t></t></t>", Phase.ANSWER, 6),
        ("<t></t>", Phase.ANSWER, 0),
        ("<t>why</t>\n<t>so</t>", Phase.ANSWER, 3),
        ("<that", Phase.ONLY_ANSWER, 0),
        ("so <t>why</t>", Phase.ONLY_ANSWER, 0),
        ("</t>", Phase.ONLY_ANSWER, 0),
    ],
)
def test_a_thought_is_what_is_between_its_markers(text: str, phase: Phase, num_tokens: int) -> None:
    thought = _thought(text)
    assert (thought.phase, thought.num_tokens) == (phase, num_tokens)
    assert thought.is_over == (phase in (Phase.ANSWER, Phase.ONLY_ANSWER))


def test_a_prompt_may_end_within_a_thought() -> None:
    assert _thought("", is_open=True).phase is Phase.THOUGHT
    assert _thought("<t>a</t>", is_open=True).num_tokens == 4


def test_characters_of_markers_may_be_split_over_tokens() -> None:
    marks = {"start": "\u25c1think\u25b7", "end": "\u25c1/think\u25b7"}
    text = "\u25c1think\u25b7\u20ac\u25c1/think\u25b7"
    phases = [_thought(text, **marks)]
    for count in range(len(text.encode())):
        thought = Thought(Reasoning(**marks, end_ids=(1,), is_open=False), _bytes)
        for token in text.encode()[:count]:
            thought.advance(token)
        phases.append(thought)
    assert [state.phase for state in phases[1:]] == [Phase.UNDECIDED] * 11 + [Phase.THOUGHT] * 15
    assert (phases[0].phase, phases[0].num_tokens) == (Phase.ANSWER, 3)


def _forced(thought: Thought, *path: str) -> list[int | None]:
    return [thought.forced(tuple(text.encode())) for text in path]


def test_a_thought_whose_budget_is_spent_is_ended() -> None:
    thought = _thought("<t>ab", 3)
    assert _forced(thought, "", "c", "c<", "c</", "c</t", "c</t>", "c</t>d") == [None, *b"</t>", None, None]
    assert _forced(_thought("<t>", 0), "", "</t>") == [ord("<"), None]
    assert _forced(_thought("", 0, is_open=True), "", "<", "</t>") == [*b"</", None]


def test_a_budget_may_end_within_the_marker() -> None:
    thought = _thought("<t>ab<", 3)
    assert _forced(thought, "", "/", "/t", "/t>") == [*b"/t>", None]
    for token in b"/t>":
        thought.advance(token)
    assert (thought.phase, thought.num_tokens) == (Phase.ANSWER, 2)


def test_what_ends_a_thought_may_be_more_than_its_marker() -> None:
    thought = _thought("<t>ab", 2, end_ids=tuple(b"\n</t>\n\n"))
    for token in b"\n</t>\n\n":
        assert thought.forced(()) == token
        thought.advance(token)
    assert (thought.phase, thought.num_tokens, thought.forced(())) == (Phase.ANSWER, 2, None)


@pytest.mark.parametrize("budget", [None, 0])
def test_nothing_is_forced_without_a_thought_or_a_budget_or_a_way_to_end_it(budget: int | None) -> None:
    assert _forced(_thought("so", budget), "", "<t>ab") == [None, None]
    assert _forced(_thought("", budget, is_open=True, end_ids=()), "", "abc") == [None, None]
    assert (_forced(_thought("", budget), "<t>", "x<t>", "<t>a") == [None] * 3) == (budget is None)


@given(
    st.sampled_from([None, 0, 1, 3, 6]),
    st.lists(st.integers(0, 8), max_size=8),
    st.lists(st.integers(0, 8), max_size=6),
    st.booleans(),
)
def test_paths_are_as_outputs(budget: int | None, output: list[int], path: list[int], is_open: bool) -> None:
    """What is forced after a path is what is forced once it has been generated; far from the budget nothing is."""
    there, here = (Thought(Reasoning("ab", "cd", END_IDS, is_open=is_open), _letters, budget) for _ in range(2))
    for token in output:
        here.advance(token)
        there.advance(token)
    for length in range(len(path) + 1):
        forced = here.forced(path[:length])
        assert forced == there.forced(())
        assert forced is None or here.may_force(length)
        if is_open and budget is not None and len(output) + length <= budget:
            assert forced == reference.forced_token([*output, *path[:length]], budget, "cd", END_IDS, _letters)
        if length < len(path):
            there.advance(path[length])

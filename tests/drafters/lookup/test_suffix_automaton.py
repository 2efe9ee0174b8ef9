"""The suffix automaton against all stretches of its texts, one by one."""

import random
import time
import tracemalloc
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specinfer.drafters.lookup.suffix_automaton import MAX_COUNT, NONE, SuffixAutomaton

TEXT = st.lists(st.integers(0, 2), max_size=14)


def _stretches(texts: list[list[int]]) -> Counter[tuple[int, ...]]:
    """How often each stretch of one or more tokens occurs."""
    return Counter(tuple(text[i:j]) for text in texts for i in range(len(text)) for j in range(i + 1, len(text) + 1))


def _state(automaton: SuffixAutomaton, stretch: tuple[int, ...]) -> int:
    state = 0
    for token in stretch:
        state = automaton.follow(state, token)
        if state == NONE:
            return NONE
    return state


def _read(texts: list[list[int]]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for text in texts:
        automaton.start_text()
        automaton.extend(text)
    return automaton


@given(st.lists(TEXT, max_size=4))
def test_states_are_the_stretches_with_their_counts(texts: list[list[int]]) -> None:
    automaton, stretches = _read(texts), _stretches(texts)
    assert automaton.num_tokens == sum(map(len, texts))
    assert len(automaton) <= max(2 * automaton.num_tokens, 1)
    assert automaton.counts[0] == 0
    for stretch, times in stretches.items():
        state = _state(automaton, stretch)
        assert state > 0
        assert automaton.counts[state] == times
        assert automaton.lengths[automaton.links[state]] < len(stretch) <= automaton.lengths[state]
        followers = [token for token in range(4) if (*stretch, token) in stretches]
        assert sorted(token for token, _ in automaton.continuations(state, 9)) == followers
        for token, target in automaton.continuations(state, 9):
            assert target == _state(automaton, (*stretch, token))
        for token in range(4):
            assert (automaton.follow(state, token) > 0) == (token in followers)


@given(st.lists(TEXT, min_size=1, max_size=3))
def test_links_lead_to_the_longest_suffix_that_also_ends_at_another_place(texts: list[list[int]]) -> None:
    automaton, stretches = _read(texts), _stretches(texts)
    for stretch in stretches:
        state, times = _state(automaton, stretch), stretches[stretch]
        shorter = stretch
        while shorter and stretches[shorter] == times:
            shorter = shorter[1:]
        assert automaton.links[state] == _state(automaton, shorter)
        assert automaton.lengths[automaton.links[state]] == len(shorter)


@given(st.lists(st.integers(0, 2), max_size=30))
def test_the_longest_repeated_suffix_after_each_token(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for end, token in enumerate(text, start=1):
        automaton.append(token)
        said = text[:end]
        repeated = [n for n in range(end) if any(said[i : i + n] == said[end - n :] for i in range(end - n))]
        assert automaton.lengths[automaton.links[automaton.last]] == max(repeated)
        assert automaton.lengths[automaton.last] == end


@given(st.lists(TEXT, max_size=3), st.lists(st.integers(0, 3), max_size=12))
def test_a_match_is_the_longest_known_suffix(texts: list[list[int]], tokens: list[int]) -> None:
    automaton, stretches = _read(texts), _stretches(texts)
    known = [n for n in range(1, len(tokens) + 1) if tuple(tokens[len(tokens) - n :]) in stretches]
    length = max(known, default=0)
    assert automaton.match(tokens) == (_state(automaton, tuple(tokens[len(tokens) - length :])), length)


@given(TEXT, st.data())
def test_reading_in_between_changes_nothing(text: list[int], data: st.DataObject) -> None:
    """Counts are right after each token, not only at the end."""
    automaton = SuffixAutomaton()
    for end, token in enumerate(text, start=1):
        automaton.append(token)
        stretches = _stretches([text[:end]])
        stretch = data.draw(st.sampled_from(sorted(stretches)))
        assert automaton.counts[_state(automaton, stretch)] == stretches[stretch]


def test_continuations_are_limited_and_the_first_seen_come_first() -> None:
    automaton = _read([[1, 9, 1, 4, 1, 7, 1, 4]])
    state = _state(automaton, (1,))
    assert [token for token, _ in automaton.continuations(state, 2)] == [9, 4]
    assert [token for token, _ in automaton.continuations(state, 9)] == [9, 4, 7]
    assert list(automaton.continuations(automaton.last, 9)) == []


def test_counts_stop_where_they_are_full() -> None:
    automaton = _read([[5] * 500])
    for length in (1, 2, 100, 400, 500):
        assert automaton.counts[_state(automaton, (5,) * length)] == min(501 - length, MAX_COUNT)


@pytest.mark.parametrize("period", [[7], [7, 8], [7, 7, 8]], ids=str)
def test_one_token_over_and_over_is_read_in_linear_time(period: list[int]) -> None:
    automaton = SuffixAutomaton()
    begin = time.perf_counter()
    automaton.extend((period * 40_000)[:40_000])
    assert time.perf_counter() - begin < 30  # about half a second; a quadratic one would take minutes
    assert len(automaton) <= 80_000


def test_memory_of_a_token() -> None:
    """About 125 bytes a token for source code; random tokens are the dearest."""
    source = random.Random(0)
    text = [source.randrange(10_000) for _ in range(20_000)]
    tracemalloc.start()
    automaton = _read([text])
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert automaton.num_tokens == 20_000
    assert used / 20_000 < 300

"""Text that grows token by token: characters split over tokens, stop strings, what a stream may show."""

import time
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specinfer.core.text import TextBuffer
from specinfer.core.thought import Reasoning, Thought
from tiny import VOCAB, make_tokenizer

TOKENIZER = make_tokenizer()


def _decode(tokens: Sequence[int]) -> str:
    return TOKENIZER.decode(tokens, skip_special_tokens=True)


def _bytes(tokens: Sequence[int]) -> str:
    """A decoder with one byte a token, valid or not."""
    return bytes(tokens).decode(errors="replace")


def _words(tokens: Sequence[int]) -> str:
    """A decoder that joins words with spaces, as SentencePiece does: a token alone has no leading space."""
    return " ".join("abc"[token % 3] * (1 + token // 3) for token in tokens)


@given(st.lists(st.integers(0, VOCAB - 1), max_size=30))
def test_the_whole_text_is_the_decoded_output(tokens: list[int]) -> None:
    buffer = TextBuffer(_decode)
    shown = ""
    for token in tokens:
        buffer.push(token)
        assert buffer.text.startswith(shown), "text once shown is not taken back"
        shown = buffer.text
    buffer.finish()
    assert buffer.text == _decode(tokens)


def _some_words(tokens: Sequence[int]) -> str:
    """A decoder with tokens that have no text."""
    return _words([token for token in tokens if token < 7])


BROKEN = st.sampled_from([0x41, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x99, 0xFF])
DECODERS = ((_bytes, BROKEN), (_words, st.integers(0, 8)), (_some_words, st.integers(0, 8)))


@pytest.mark.parametrize(("decode", "token"), DECODERS, ids=["broken bytes", "words", "tokens without text"])
@given(data=st.data())
def test_text_comes_out_as_in_one_go(
    decode: Callable[[Sequence[int]], str], token: st.SearchStrategy[int], data: st.DataObject
) -> None:
    buffer, tokens = TextBuffer(decode), data.draw(st.lists(token, max_size=12))
    for each in tokens:
        buffer.push(each)
    buffer.finish()
    assert buffer.text == decode(tokens)


@pytest.mark.parametrize("character", ["\u00e9", "\u20ac", "\U0001f642"])
def test_half_a_character_is_not_emitted(character: str) -> None:
    buffer = TextBuffer(_decode)
    seen = []
    for token in TOKENIZER.encode(f"a{character}b"):
        assert buffer.push(token) is None
        seen.append(buffer.text)
    size = len(character.encode())
    assert seen == ["a"] * size + [f"a{character}", f"a{character}b"]


def test_an_unfinished_character_is_shown_at_the_end() -> None:
    buffer = TextBuffer(_decode)
    for token in TOKENIZER.encode("a\u20ac")[:-1]:
        buffer.push(token)
    assert buffer.text == "a"
    buffer.finish()
    assert buffer.text == "a\ufffd"


@pytest.mark.parametrize(
    ("stop", "include", "text", "match"),
    [
        (["cd"], False, "ab", "cd"),
        (["cd"], True, "abcd", "cd"),
        (["a"], False, "", "a"),
        (["abcdef"], False, "", "abcdef"),
        (["de", "cd"], False, "ab", "cd"),
        (["xy"], False, "abcdef", None),
        (["ba"], False, "abcdef", None),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_stop_strings_over_any_cut_into_tokens(
    stop: list[str], include: bool, text: str, match: str | None, size: int
) -> None:
    pieces = ["abcdef"[i : i + size] for i in range(0, 6, size)]
    buffer = TextBuffer(lambda tokens: "".join(pieces[t] for t in tokens), stop, include_stop=include)
    results = []
    for token in range(len(pieces)):
        results.append(buffer.push(token))
        if results[-1] is not None:
            break
    assert buffer.text == text
    assert results[-1] == match
    assert not any(results[:-1])


def test_of_two_stop_strings_in_one_token_the_first_cuts() -> None:
    buffer = TextBuffer(lambda tokens: "one two three" if tokens else "", ["three", "two"])
    assert buffer.push(0) == "two"
    assert buffer.text == "one "


def test_a_stop_string_is_not_found_in_the_middle_of_a_character() -> None:
    buffer = TextBuffer(_decode, ["\u20ac"])
    tokens = TOKENIZER.encode("a\u20acb")
    assert [buffer.push(token) for token in tokens[:4]] == [None, None, None, "\u20ac"]
    assert buffer.text == "a"


@given(
    st.lists(st.sampled_from(["a", "b", "ab", "ba", "aab"]), max_size=12),
    st.lists(st.sampled_from(["ab", "aab", "ba", "bb", "abab"]), min_size=1, max_size=3),
)
def test_settled_text_is_never_taken_back(pieces: list[str], stop: list[str]) -> None:
    buffer = TextBuffer(lambda tokens: "".join(pieces[t] for t in tokens), stop)
    shown = ""
    for token in range(len(pieces)):
        stopped = buffer.push(token) is not None
        assert buffer.text.startswith(shown)
        if stopped:
            break
        shown = buffer.settled()
        assert buffer.text.startswith(shown)
    assert not any(s in buffer.text for s in stop)


def test_settled_holds_back_only_what_may_begin_a_stop_string() -> None:
    buffer = TextBuffer(lambda tokens: "".join("x stop"[t] for t in tokens), [" stop!", "to"])
    seen = []
    for token in range(4):
        buffer.push(token)
        seen.append(buffer.settled())
    assert seen == ["x", "x", "x", "x"]
    assert buffer.push(4) == "to"


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=6), max_size=3))
def test_settled_holds_back_the_longest_beginning_of_a_stop_string(text: str, stops: list[str]) -> None:
    buffer = TextBuffer(lambda _: "", stops)
    buffer.text = text
    held = [n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])]
    assert buffer.settled() == text[: len(text) - max(held, default=0)]


def test_many_long_stop_strings_are_searched_quickly() -> None:
    buffer = TextBuffer(lambda _: "", [f"a{i}" + "b" * 1000 for i in range(64)])
    buffer.text = "b" * 2000

    def seconds() -> float:
        start = time.process_time()
        for _ in range(10):
            assert buffer.settled() == buffer.text
        return time.process_time() - start

    assert min(seconds() for _ in range(5)) < 0.05  # by one length after the other it took 0.1 seconds


def test_tokens_that_show_nothing_are_not_read_again_and_again() -> None:
    read: list[int] = []

    def decode(tokens: Sequence[int]) -> str:
        read.append(len(tokens))
        return "".join(chr(token) for token in tokens if token)

    buffer = TextBuffer(decode)
    for token in [97, 98, *[0] * 500, 99, *[0] * 500]:
        buffer.push(token)
    buffer.finish()
    assert buffer.text == "abc"
    assert len(buffer.ends) == 1003
    assert max(read) < 20


def _generated(text: str, stop: list[str], size: int, *, is_open: bool, shows: bool = True) -> tuple[str | None, str]:
    """What ends an output that is generated so many characters at a time, and its text; what was shown stays."""
    pieces = [text[i : i + size] for i in range(0, len(text), size)]

    def decode(tokens: Sequence[int]) -> str:
        whole = "".join(pieces[token] for token in tokens)
        return whole if shows else whole.replace("<t>", "").replace("</t>", "")

    reasoning = Reasoning("<t>", "</t>", (0,), is_open=is_open)
    thought = Thought(reasoning, lambda tokens: "".join(pieces[token] for token in tokens))
    buffer, shown = TextBuffer(decode, stop, thought=thought), ""
    for token in range(len(pieces)):
        thought.advance(token)
        match = buffer.push(token)
        settled = buffer.text if match else buffer.settled()
        assert settled.startswith(shown)
        shown = settled
        if match:
            return match, buffer.text
    return None, buffer.text


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("text", "stop", "match", "left"),
    [
        ("<t>a.b</t>c.d", ".", ".", "<t>a.b</t>c"),
        ("<t>a.b</t>c", ".", None, "<t>a.b</t>c"),
        ("<t>a.b", ".", None, "<t>a.b"),
        ("<t>a</t>\n\nb\n\nc", "\n\n", "\n\n", "<t>a</t>\n\nb"),  # what parts the answer from the thought is neither
        ("\n<t>a</t>b", "\n", None, "\n<t>a</t>b"),
        ("<t>a</t>b", "</", None, "<t>a</t>b"),
        ("<t>a</t>b<", "<", "<", "<t>a</t>b"),
        ("<t>a</t>>b", "t>>", None, "<t>a</t>>b"),  # it would begin before the answer
        ("<tb.c", ".", ".", "<tb"),
        ("<tb", "<", "<", ""),  # no thought after all
        ("\n<tb", "\n", "\n", ""),
    ],
)
def test_stop_strings_count_after_a_thought(text: str, stop: str, match: str | None, left: str, size: int) -> None:
    assert _generated(text, [stop], size, is_open=False) == (match, left)
    if text.startswith("<t>"):
        open_text, open_left = text.removeprefix("<t>"), left.removeprefix("<t>")
        assert _generated(open_text, [stop], size, is_open=True) == (match, open_left)


def test_stop_strings_count_after_a_thought_whose_marker_is_not_shown() -> None:
    assert _generated("a.a.</t>b.c.", ["."], 4, is_open=True, shows=False) == (".", "a.a.b")


def test_text_that_may_begin_a_thought_is_held_back_where_stop_strings_might_cut_it() -> None:
    thought = Thought(Reasoning("<t>", "</t>", (0,), is_open=False), lambda tokens: "<"[: len(tokens)])
    for stop, settled in (((), "<"), (("<",), "")):
        buffer = TextBuffer(lambda tokens: "<"[: len(tokens)], stop, thought=thought)
        assert buffer.push(0) is None
        assert buffer.settled() == settled

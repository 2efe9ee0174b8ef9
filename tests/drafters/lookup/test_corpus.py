"""The corpus of the suffix drafter against a search by hand, what is drafted from it, and files that are refused."""

import json
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drafting import draft_within
from specinfer.core.tree import TreeBudget
from specinfer.drafters.lookup.corpus import END, MIN_MATCH, Corpus, CorpusFileError, write_corpus
from specinfer.drafters.lookup.suffix import CORPUS, SuffixDrafter
from specinfer.drafters.lookup.suffix_growth import Match, grow
from tiny import make_request

VOCAB = 300
TOKENS = st.lists(st.integers(0, 2), max_size=14)


def _corpus(path: Path, texts: Sequence[Sequence[int]]) -> Corpus:
    write_corpus(path / "corpus", texts, "tokenizer", "model")
    return Corpus(path / "corpus", "tokenizer", VOCAB)


def _next_tokens(texts: Sequence[Sequence[int]], stretch: Sequence[int]) -> list[int]:
    """What follows a stretch in the texts; `END` behind one that a text ends with."""
    size, found = len(stretch), []
    for text in texts:
        for start in range(len(text) - size + 1):
            if list(text[start : start + size]) == list(stretch):
                found.append([*text, END][start + size])
    return found


@given(texts=st.lists(TOKENS, min_size=1, max_size=4), tail=TOKENS)
@settings(max_examples=150, suppress_health_check=list(HealthCheck), deadline=None)
def test_a_match_is_the_longest_and_followed_by_what_followed_it(
    texts: list[list[int]], tail: list[int], tmp_path: Path
) -> None:
    match = _corpus(tmp_path, texts).match(tail, CORPUS)
    lengths = [size for size in range(MIN_MATCH, len(tail) + 1) if _next_tokens(texts, tail[-size:])]
    if not lengths:
        assert match is None
        return
    assert match is not None
    assert match.length == max(lengths)
    _check_state(match, texts, tail[-match.length :])


@given(texts=st.lists(TOKENS, min_size=1, max_size=4), tail=TOKENS)
@settings(max_examples=150, suppress_health_check=list(HealthCheck), deadline=None)
def test_each_draft_token_followed_a_stretch_that_is_long_enough(
    texts: list[list[int]], tail: list[int], tmp_path: Path
) -> None:
    match = _corpus(tmp_path, texts).match(tail, CORPUS)
    if match is None:
        return
    tree = grow(tail[-1], [match], TreeBudget(max_nodes=32, max_depth=8))
    for node in range(1, len(tree)):
        text = [*tail, *tree.path_tokens(node)]
        assert text[-1] in _next_tokens(texts, text[-1 - MIN_MATCH : -1])


def _check_state(match: Match, texts: Sequence[Sequence[int]], stretch: Sequence[int], depth: int = 3) -> None:
    text, state = match.text, match.state
    followed = Counter(_next_tokens(texts, stretch))
    assert text.lengths[state] == len(stretch)
    assert text.counts[state] == followed.total()
    expected = {token: count for token, count in followed.items() if token != END}
    assert {token: text.counts[target] for token, target in text.continuations(state, 32)} == expected
    assert text.only_tokens[state] == (next(iter(followed)) if len(followed) == 1 and expected else -1)
    for token in range(4):
        target = text.follow(state, token)
        assert (target >= 0) == (token in expected)
        if target >= 0 and depth:
            _check_state(match._replace(state=target), texts, [*stretch, token], depth - 1)
    if text.only_tokens[state] >= 0:
        assert text.lengths[text.only_targets[state]] == len(stretch) + 1
    link = text.links[state]
    if link >= 0:
        shorter = stretch[-text.lengths[link] :]
        assert MIN_MATCH <= len(shorter) < len(stretch)
        assert text.counts[link] == len(_next_tokens(texts, shorter))


def test_what_a_corpus_has_is_drafted_under_its_name(tmp_path: Path) -> None:
    text = list(range(40, 90))
    drafter = SuffixDrafter(corpus=_corpus(tmp_path, [range(5), text, range(100, 120)]))
    tree = draft_within(drafter, make_request("a", [1, 2, *text[:6]]), TreeBudget(10, 10))
    assert list(tree.tokens) == text[5:16]
    assert {draw.drafter for draw in tree.draws} == {CORPUS}
    end = draft_within(drafter, make_request("b", [1, 2, *text[-6:]]), TreeBudget(10, 10))
    assert len(end) == 1, "nothing follows the end of a text"


def test_the_own_text_counts_for_more_than_a_corpus_at_the_same_length(tmp_path: Path) -> None:
    drafter = SuffixDrafter(corpus=_corpus(tmp_path, [[11, 12, 13, 14, 50]] * 30))
    own = draft_within(drafter, make_request("a", [11, 12, 13, 14, 60, 61, 11, 12, 13, 14]), TreeBudget(4, 4))
    assert list(own.tokens[:3]) == [14, 60, 61]
    longer = draft_within(drafter, make_request("b", [13, 14, 60, 61, 11, 12, 13, 14]), TreeBudget(4, 4))
    assert 50 in longer.tokens


def test_salts_and_finished_requests_change_nothing_of_a_corpus(tmp_path: Path) -> None:
    text = list(range(40, 90))
    drafter = SuffixDrafter(corpus=_corpus(tmp_path, [text]))
    before = (tmp_path / "corpus").read_bytes()
    for name, salt in (("a", None), ("b", "x"), ("c", "")):
        request = make_request(name, [1, 2, *text[:6]])
        request.cache_salt = salt
        assert list(draft_within(drafter, request, TreeBudget(4, 4)).tokens) == text[5:10]
        drafter.forget(name)
    assert (tmp_path / "corpus").read_bytes() == before


def _again(data: bytes, change: Callable[[bytearray], object]) -> bytes:
    """A file after a change of all behind its checksum, with the right checksum."""
    rest = bytearray(data[12:])
    change(rest)
    return data[:8] + zlib.crc32(rest).to_bytes(4, "big") + bytes(rest)


def _with_header(data: bytes, **changes: object) -> bytes:
    size = int.from_bytes(data[12:16], "big")
    header = json.dumps(json.loads(data[16 : 16 + size]) | changes).encode()
    header += b" " * (-len(header) % 8)
    return _again(data, lambda rest: rest.__setitem__(slice(0, 4 + size), len(header).to_bytes(4, "big") + header))


def _put(rest: bytearray, place: int, number: int) -> None:
    rest[place : place + 4] = number.to_bytes(4, "big" if place < -40 else sys.byteorder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"", "cannot be read .it is empty.; make one"),
        (
            lambda data: b"def function():\n    pass\n" * 9,
            "is no corpus; make one for this target: specinfer corpus build",
        ),
        (lambda data: data[:14], "is no corpus"),
        (lambda data: data[:12] + b"\xff" * 4 + data[16:], "is no corpus"),
        (lambda data: data[:16] + b"[" + data[17:], "is damaged"),
        (lambda data: data[:-4], "is cut or damaged"),
        (lambda data: data + b"\0" * 8, "is cut or damaged"),
        (lambda data: data[:-30] + bytes([data[-30] ^ 1]) + data[-29:], "its checksum does not agree"),
        (lambda data: _with_header(data, num_tokens=-1), "is cut or damaged"),
        (lambda data: _with_header(data, num_tokens=2**40), "is cut or damaged"),
        (lambda data: _with_header(data, num_tokens="10"), "is cut or damaged"),
        (lambda data: _with_header(data, byte_order="middle"), "from another kind of machine"),
        (lambda data: _with_header(data, tokenizer="another"), "made with the tokenizer of 'model', which is not that"),
        (lambda data: _again(data, lambda rest: _put(rest, -80, VOCAB)), "tokens or places that do not exist"),
        (lambda data: _again(data, lambda rest: _put(rest, -8, 10)), "tokens or places that do not exist"),
    ],
)
def test_a_file_that_is_no_corpus_for_this_target_is_refused(
    damage: Callable[[bytes], bytes], message: str, tmp_path: Path
) -> None:
    _corpus(tmp_path, [range(9)])
    file = tmp_path / "corpus"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(CorpusFileError, match=message):
        Corpus(file, "tokenizer", VOCAB)


def test_a_wrong_order_of_suffixes_costs_only_drafts(tmp_path: Path) -> None:
    _corpus(tmp_path, [list(range(200)) * 2])
    file = tmp_path / "corpus"
    data = file.read_bytes()

    def shuffle(rest: bytearray) -> None:
        places = [rest[i : i + 4] for i in range(len(rest) - 4 * 401, len(rest), 4)]
        rest[-4 * 401 :] = b"".join(places[1::2] + places[::2])

    file.write_bytes(_again(data, shuffle))
    drafter = SuffixDrafter(corpus=Corpus(file, "tokenizer", VOCAB))
    for start in range(0, 190, 7):
        request = make_request(str(start), [250, *range(start, start + 5)])
        tree = draft_within(drafter, request, TreeBudget(16, 16))
        assert all(0 <= token < VOCAB for token in tree.tokens)


def test_suffixes_of_repeated_texts_are_sorted(tmp_path: Path) -> None:
    texts = [[7] * 300, [1, 2] * 200, [7] * 300]
    corpus = _corpus(tmp_path, texts)
    stretches = [corpus.pattern(rank, 64) for rank in range(corpus.num_tokens)]
    assert stretches == sorted(stretches)
    assert sorted(corpus.places) == list(range(corpus.num_tokens))

"""Values that a prompt words: names that are asked for, and what is copied from a message byte by byte."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specinfer.core.grammar.wording import Wording, open_string

TOOLS = (
    b'{"name": "create_event", "description": "Add an event to the calendar."}\n'
    b'{"name": "cancel_order", "description": "Cancel an order of a customer."}\n'
    b'{"name": "send_mail", "description": "Send an e-mail."}'
)


def _wording(asked: bytes) -> Wording:
    return Wording(b"\xff[7]system\n" + TOOLS + b"\xff[8]\n\xff[7]user\n" + asked + b"\xff[8]\n\xff[7]assistant\n")


@pytest.mark.parametrize(
    ("known", "value"),
    [
        (b'{"a": "Am', b"Am"),
        (b'{"a": "', b""),
        (b'{"a": "x \\"y', b'x \\"y'),
        (b'{"a": "Am"', None),
        (b'["b", "c', b"c"),
        (b'{"a": 3', None),
        (b"", None),
    ],
)
def test_the_open_string_at_the_end_of_json_is_known(known: bytes, value: bytes | None) -> None:
    assert open_string(known) == value


@pytest.mark.parametrize(
    ("asked", "likeliest"),
    [
        (b"Please put the meeting into my calendar.", b"c"),
        (b"Send a mail to Kim.", b"s"),
        (b"Tell Kim by e-mail.", b"s"),
    ],
)
def test_the_name_of_what_is_asked_for_weighs_most(asked: bytes, likeliest: bytes) -> None:
    weights = _wording(asked).weights(b'{"name": "', [b"c", b"s"])
    assert max(zip(weights, [b"c", b"s"], strict=True))[1] == likeliest


def test_a_name_is_chosen_by_its_description_where_names_part() -> None:
    nexts = [b"r", b"a"]
    weights = _wording(b"The customer wants none of it any more, cancel it.").weights(b'{"name": "c', nexts)
    assert weights[1] > weights[0]
    assert _wording(b"Hello there, you two.").weights(b'{"name": "c', nexts) == [1.0, 1.0], "nothing is asked for"


@pytest.mark.parametrize(
    ("known", "follows"),
    [
        (b'{"who": ["Am', b"ina"),
        (b'{"who": ["Amina', b" Diallo"),
        (b'{"who": ["Amina Diallo', b'"'),
        (b'{"who": ["Amina Diallo", "B', b"o"),
        (b'{"day": "2', b"026-04-16"),
        (b'{"to": "b', b"o@example.com"),
        (b'{"to": "bo@example.com', b'"'),
        (b'{"minutes": 4', b"5"),
    ],
)
def test_the_rest_of_a_value_is_copied(known: bytes, follows: bytes) -> None:
    asked = b"Meet Amina Diallo and Bo Jensen (bo@example.com) on 2026-04-16 for 45 minutes."
    assert _wording(asked).copies(known)[0][0] == follows


def test_values_are_copied_in_the_order_of_the_message() -> None:
    wording = _wording(b"The fair begins on 2026-03-02 and ends on 2026-03-16.")
    assert wording.copies(b'{"start": "2026-03-')[0][0] == b"02"
    assert wording.copies(b'{"start": "2026-03-02", "end": "2026-03-')[0][0] == b"16"


@pytest.mark.parametrize("known", [b'{"who": "', b'{"who": "Zoe', b'{"who": 7', b'{"who"', b"", b"\xff[7]"])
def test_nothing_is_copied_without_a_beginning_in_the_prompt(known: bytes) -> None:
    assert _wording(b"Meet Amina Diallo.").copies(known) == []


def test_no_copy_leaves_the_string() -> None:
    wording = _wording(b'He said "Stop \\ here" and went {home} to [rest], a\x00b.')
    for known in (b'{"a": "Stop', b'{"a": "went', b'{"a": "to', b'{"a": "a'):
        for text, prob in wording.copies(known):
            assert 0 < prob <= 1
            assert text == b'"' or not set(text) & set(b'"\\\n\x00')


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from([b"Ann", b" ", b'"', b"\\", b': "', b', "', b"7", b".", b"\xff[1]", b"\xc3", b"[", b"\n"]))
)
def test_any_text_can_be_read(parts: list[bytes]) -> None:
    text = b"".join(parts)
    wording = Wording(text)
    for length in range(len(text) + 1):
        copies = wording.copies(text[:length])
        assert all(copy and 0 < prob <= 1 for copy, prob in copies)
        assert min(wording.weights(text[:length], [b"A", b'"'])) >= 1.0


@pytest.mark.parametrize("part", [b"a", b'"', b'"a" ', b"\xff[", b"a ", b'"ab", '])
def test_hostile_prompts_take_little_time(part: bytes) -> None:
    begun = time.process_time()
    wording = Wording(part * 100_000)
    for known in (b'{"a": "a', b'["' + b"a" * 96, b'["' + b"a " * 48, b'"abc", ' * 1000 + b'"a'):
        wording.copies(known)
        wording.weights(known, [b"a", b"b"])
    assert time.process_time() - begun < 0.5


def test_probabilities_of_copies_add_up_to_no_more_than_one() -> None:
    wording = _wording(b"Ann and Anna and Annabel met Ann Smith, Ann Jones and an aunt.")
    for known in (b'{"a": "A', b'{"a": "Ann', b'{"a": "Ann ', b'{"a": "and An'):
        assert sum(prob for _, prob in wording.copies(known)) <= 1.0

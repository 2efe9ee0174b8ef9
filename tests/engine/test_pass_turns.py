"""Turns of requests in several passes at once."""

from specinfer.engine.pass_turns import PassTurns
from tiny import make_request


def test_passes_take_even_parts_and_the_longest_without_a_pass_first() -> None:
    a, b, c = running = [make_request(name, [1]) for name in "abc"]
    turns = PassTurns()
    assert turns.group(running, 1) == running
    assert turns.group(running, 2) == [a, b]
    turns.begin([a, b])
    assert turns.group(running, 2) == [c]
    turns.begin([c])
    assert turns.group(running, 2) == []
    assert turns.end([a, b]) == [a, b]
    turns.begin([b])
    turns.end([b])
    turns.end([c])
    assert turns.group(running, 2) == [a, c], "b was in the last pass"


def test_only_what_is_in_flight_ends() -> None:
    a, b = (make_request(name, [1]) for name in "ab")
    turns = PassTurns()
    turns.begin([a])
    assert turns.idle([a, b]) == [b]
    assert turns.end([a, b]) == [a]
    assert turns.end([a, b]) == []
    assert turns.idle([a, b]) == [a, b]


def test_a_request_that_runs_anew_has_had_no_turn() -> None:
    a, b, c = running = [make_request(name, [1]) for name in "abc"]
    turns = PassTurns()
    for request in (a, b, c):
        turns.begin([request])
        turns.end([request])
    turns.forget(c)
    assert turns.group(running, 3) == [c]

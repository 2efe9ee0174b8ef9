"""Turns of requests: in several passes at once, and those with grammars, by the credit of their tenants."""

from specinfer import StructuredOutputsParams
from specinfer.core.grammar.compiler import GrammarCompiler
from specinfer.core.grammar.limits import MaskTime
from specinfer.core.request import Request
from specinfer.engine import turns
from specinfer.engine.turns import GrammarTurns, PassTurns
from tiny import EOS, VOCAB, make_request, make_tokenizer

GRAMMAR = GrammarCompiler(make_tokenizer(), VOCAB, (EOS,)).compile(StructuredOutputsParams(regex="(the)+"))


def _request_of(tenant: str) -> Request:
    request = make_request(tenant, [3], tenant=tenant)
    request.grammar = GRAMMAR.copy()
    request.grammar._time = MaskTime(5.0)  # as of clients
    return request


def test_passes_take_even_parts_and_the_longest_without_a_pass_first() -> None:
    a, b, c = running = [make_request(name, [1]) for name in "abc"]
    pass_turns = PassTurns()
    assert pass_turns.group(running, 1) == running
    assert pass_turns.group(running, 2) == [a, b]
    pass_turns.begin([a, b])
    assert pass_turns.group(running, 2) == [c]
    pass_turns.begin([c])
    assert pass_turns.group(running, 2) == []
    assert pass_turns.end([a, b]) == [a, b]
    pass_turns.begin([b])
    pass_turns.end([b])
    pass_turns.end([c])
    assert pass_turns.group(running, 2) == [a, c], "b was in the last pass"


def test_only_what_is_in_flight_ends() -> None:
    a, b = (make_request(name, [1]) for name in "ab")
    pass_turns = PassTurns()
    pass_turns.begin([a])
    assert pass_turns.idle([a, b]) == [b]
    assert pass_turns.end([a, b]) == [a]
    assert pass_turns.end([a, b]) == []
    assert pass_turns.idle([a, b]) == [a, b]


def test_a_request_that_runs_anew_has_had_no_turn() -> None:
    a, b, c = running = [make_request(name, [1]) for name in "abc"]
    pass_turns = PassTurns()
    for request in (a, b, c):
        pass_turns.begin([request])
        pass_turns.end([request])
    pass_turns.forget(c)
    assert pass_turns.group(running, 3) == [c]


def test_requests_run_while_more_tenants_come_than_credits_are_kept() -> None:
    grammar_turns = GrammarTurns()
    requests = [_request_of(str(number)) for number in range(turns._MAX_TENANTS + 2)]
    for request in requests:
        grammar_turns.add(request)
    assert grammar_turns.choose(requests) == requests
    last = requests[-1].grammar
    assert last is not None
    assert last.credit is not None
    last.credit.add(-100.0)
    assert grammar_turns.choose(requests) == requests[:-1]

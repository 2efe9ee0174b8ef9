"""Turns of requests with grammars: the credit of their tenants, however many there are."""

from specinfer import StructuredOutputsParams
from specinfer.core.grammar.compiler import GrammarCompiler
from specinfer.core.grammar.limits import MaskTime
from specinfer.core.request import Request
from specinfer.engine import grammar_turns
from specinfer.engine.grammar_turns import GrammarTurns
from tiny import EOS, VOCAB, make_request, make_tokenizer

GRAMMAR = GrammarCompiler(make_tokenizer(), VOCAB, (EOS,)).compile(StructuredOutputsParams(regex="(the)+"))


def _request_of(tenant: str) -> Request:
    request = make_request(tenant, [3], tenant=tenant)
    request.grammar = GRAMMAR.copy()
    request.grammar._time = MaskTime(5.0)  # as of clients
    return request


def test_requests_run_while_more_tenants_come_than_credits_are_kept() -> None:
    turns = GrammarTurns()
    requests = [_request_of(str(number)) for number in range(grammar_turns._MAX_TENANTS + 2)]
    for request in requests:
        turns.add(request)
    assert turns.choose(requests) == requests
    last = requests[-1].grammar
    assert last is not None
    assert last.credit is not None
    last.credit.add(-100.0)
    assert turns.choose(requests) == requests[:-1]

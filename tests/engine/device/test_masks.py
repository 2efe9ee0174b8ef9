"""Steps on the device of requests with grammars and bad words, which the host masks amid the step."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from on_device import Pair, check_left, executor_of, load_plain, make_device_engine, plain_tokens, run_on_device
from specinfer import SamplingParams, StructuredOutputsParams
from specinfer.core.grammar import limits
from specinfer.core.grammar.compiler import GrammarCompiler
from specinfer.core.request import FinishReason, Request
from specinfer.core.tree import TreeBudget
from specinfer.model.load import LoadedModel
from tests.engine.device.late_stream import LateStream, make_executor_late
from tiny import EOS, VOCAB, make_request, make_tokenizer, random_prompts, run

TREES = {
    "off": None,
    "2,2,1": TreeBudget.expansion((2, 2, 1)),
    "best-first": TreeBudget(max_nodes=11, max_depth=4),
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=18)
SAMPLED = SamplingParams(temperature=0.9, max_tokens=18)
TOKENIZER = make_tokenizer()
COMPILER = GrammarCompiler(TOKENIZER, VOCAB, (EOS,))
PROMPTS = random_prompts([3, 20, 9, 14, 6, 11], seed=6)


def _request(number: int, params: SamplingParams, bad_words: Sequence[Sequence[int]] = (), **asked: Any) -> Request:
    request = make_request(str(number), PROMPTS[number], params, seed=number)
    request.eos_token_ids = (EOS,)
    request.bad_words_ids = [tuple(word) for word in bad_words]
    if asked:
        request.grammar = COMPILER.compile(StructuredOutputsParams(**asked))
    return request


def _requests() -> list[Request]:
    """Some with grammars, one of which ends its output, some with bad words that are likely; and one with neither."""
    bad_words = [(token,) for token in range(20, 60)] + [(5, token) for token in range(VOCAB)]
    return [
        _request(0, GREEDY, regex="[a-m]+( [n-z]+)*"),
        _request(1, SAMPLED, regex="(the|a[n-t]*){2,4}"),
        _request(2, GREEDY),
        _request(3, replace(SAMPLED, top_k=20, logprobs=2), bad_words),
        _request(4, replace(SAMPLED, repetition_penalty=1.3), bad_words, grammar='start: /[e-k ]+/ "." start?'),
        _request(5, replace(GREEDY, min_tokens=4), regex="[a-z]{1,30}"),
    ]


def _wanted(target: LoadedModel) -> list[Any]:
    requests = _requests()
    plain_tokens(target, requests)
    return _outputs(requests)


def _outputs(requests: Sequence[Request]) -> list[Any]:
    return [(one.output_ids, one.finish_reason, [set(known) for known in one.logprobs]) for one in requests]


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("lookups", [(), ("ngram",)])
def test_masked_requests_have_the_tokens_of_plain_decoding(tree: str, lookups: tuple[str, ...], pair: Pair) -> None:
    engine = make_device_engine(pair[0], pair[1] if TREES[tree] else None, TREES[tree], lookups=lookups)
    requests = _requests()
    served = run_on_device(engine, requests)
    assert _outputs(requests) == _wanted(pair[0])
    assert served == set(requests), "one holds back ends in its first steps"
    assert requests[1].finish_reason is FinishReason.STOP
    text = TOKENIZER.decode(requests[0].output_ids)
    assert text
    assert set(text) <= set("abcdefghijklmnopqrstuvwxyz ")
    assert not {*range(20, 60)} & set(requests[3].output_ids)
    if TREES[tree]:
        assert all(request.speculation.num_accepted_draft_tokens > 0 for request in requests[:5])
    check_left(engine)


@pytest.mark.parametrize("family", ["gemma2", "lfm2"])
def test_other_targets(family: str, model_folder: Callable[..., Path]) -> None:
    target, small = load_plain(model_folder(family)), load_plain(model_folder("llama", 0, 0.05))
    engine, requests = make_device_engine(target, small, TREES["2,2,1"]), _requests()
    assert run_on_device(engine, requests) == set(requests)
    assert _outputs(requests) == _wanted(target)
    check_left(engine)


def test_the_first_draft_tokens_are_allowed_ones(pair: Pair, trees: dict[str, list[Any]]) -> None:
    """Those of host steps are at every level; the device learns of the first one only."""
    request = _request(0, GREEDY, regex="[a-m]+")
    engine = make_device_engine(*pair, TREES["2,2,1"])
    assert run_on_device(engine, [request]) == {request}
    firsts = {path[0] for paths, _ in trees["0"] for path in paths if path} - {EOS}
    assert len(firsts) > 1
    assert set("".join(TOKENIZER.decode([first]) for first in firsts)) <= set("abcdefghijklm")


def test_a_step_waits_for_the_device_twice_and_uses_no_memory_too_early(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, stream = _wanted(pair[0]), LateStream()
    for tree in TREES.values():
        stream.num_waits = 0
        with monkeypatch.context() as patch:
            make_executor_late(stream, patch)
            engine, requests = make_device_engine(pair[0], pair[1] if tree else None, tree), _requests()
            run_on_device(engine, requests)
        assert _outputs(requests) == wanted
        assert stream.num_waits <= (2 if tree else 1) * executor_of(engine).num_launched
        check_left(engine)


@pytest.mark.parametrize("rule", ["multi-step", "traversal"])
def test_rules_with_random_numbers_leave_sampled_masked_requests_to_host_steps(rule: str, pair: Pair) -> None:
    found = []
    for has_device_executor in (False, True):
        requests = _requests()
        engine = make_device_engine(*pair, TREES["2,2,1"], verification=rule, has_device_executor=has_device_executor)
        if has_device_executor:
            served = run_on_device(engine, requests)
            assert {requests.index(request) for request in served} == {0, 2, 5}
        else:
            run(engine, requests)
        found.append(_outputs(requests))
    assert found[0] == found[1]


def test_a_request_without_credit_for_masks_leaves_and_comes_back(pair: Pair) -> None:
    def resting() -> Request:
        return _request(0, replace(GREEDY, max_tokens=40), regex="[a-m]+( [n-z]+)*")

    [wanted] = plain_tokens(pair[0], [resting()])
    first, *others = [resting(), *_requests()[1:]]
    assert first.grammar is not None
    first.grammar._time.most = 5.0  # as of clients
    engine = make_device_engine(*pair, TREES["2,2,1"])
    for request in (first, *others):
        engine.add(request)
    credit = first.grammar.credit
    assert credit is not None
    served, lengths = list[bool](), list[int]()
    while engine.has_work:
        if len(served) in (3, 12):
            credit.add({3: -100.0, 12: 200.0}[len(served)])
        engine.step()
        served.append(first in executor_of(engine).requests)
        lengths.append(first.num_output)
    assert served[2]
    assert not any(served[4:12])
    assert any(served[12:])
    assert lengths[4] == lengths[11] < len(wanted)
    assert all(one.is_finished for one in others)
    assert first.output_ids == wanted
    check_left(engine)


def test_no_more_requests_with_grammars_are_served_at_a_time_than_the_credit_of_their_tenant_pays(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "_SHARE", 0.0)  # however long a step takes

    def alike() -> list[Request]:
        return [_request(i, replace(GREEDY, max_tokens=30), regex="[a-m]+( [n-z]+)*") for i in range(4)]

    wanted = plain_tokens(pair[0], alike())
    engine, requests = make_device_engine(*pair, TREES["2,2,1"]), alike()
    grammars = [request.grammar for request in requests if request.grammar is not None]
    for request, grammar in zip(requests, grammars, strict=True):
        grammar._time.most = 5.0  # as of clients
        engine.add(request)
    credit = grammars[0].credit
    assert credit is not None
    served = list[int]()
    while engine.has_work:
        if len(served) in (4, 5, 6):
            credit.add(0.05 - credit.left)
            for grammar in grammars:
                grammar.last_seconds = 0.08  # the last one
        engine.step()
        served.append(sum(grammar.last_seconds < 0.08 for grammar in grammars))
    assert served[3] == 4
    assert all(1 <= count <= 2 for count in served[4:7]), "one on the device, and one in a host step"
    assert [request.output_ids for request in requests] == wanted
    check_left(engine)


@pytest.mark.parametrize("is_deep", [False, True])
def test_masks_that_fail_concern_their_request_alone(
    is_deep: bool, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, requests = _wanted(pair[0]), _requests()
    grammar = requests[0].grammar
    assert grammar is not None
    bits = grammar.bits

    def failing(path: Sequence[int]) -> Any:
        if requests[0].num_output > 8 and (path or not is_deep):
            raise MemoryError
        return bits(path)

    monkeypatch.setattr(grammar, "bits", failing)
    engine = make_device_engine(*pair, TREES["2,2,1"])
    assert run_on_device(engine, requests) == set(requests)
    if is_deep:  # host steps go on without draft tokens
        assert _outputs(requests) == wanted
    else:
        assert requests[0].error == "the engine failed on this request: MemoryError"
        assert _outputs(requests)[1:] == wanted[1:]
    assert len(engine.executors) == 2, "others keep their steps on the device"
    check_left(engine)


def test_a_text_after_which_no_token_is_allowed_fails_alone(pair: Pair) -> None:
    requests = _requests()
    requests[3].bad_words_ids = [(token,) for token in range(VOCAB)]
    engine = make_device_engine(*pair, TREES["best-first"])
    run_on_device(engine, requests)
    assert (requests[3].error or "").startswith("no token may follow: the grammar, allowed_token_ids, bad_words")
    assert [one for i, one in enumerate(_outputs(requests)) if i != 3] == [
        one for i, one in enumerate(_wanted(pair[0])) if i != 3
    ]
    check_left(engine)

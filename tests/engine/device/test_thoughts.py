"""Steps on the device of requests whose thoughts have budgets: the tokens that end them are masked amid a step."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from on_device import WAYS, Pair, check_left, executor_of, load_plain, make_device_engine, plain_tokens, run_on_device
from specinfer import SamplingParams, StructuredOutputsParams
from specinfer.core.grammar.compiler import GrammarCompiler
from specinfer.core.request import Request
from specinfer.core.thought import Reasoning, Thought
from specinfer.core.tree import TreeBudget
from specinfer.engine.device.masks import TokenMasks
from specinfer.model.load import LoadedModel
from tests.engine.device.late_stream import LateStream, make_executor_late
from tiny import EOS, VOCAB, make_request, make_tokenizer, random_prompts, run

TREES = {"off": None, "2,2,1": TreeBudget.expansion((2, 2, 1)), "best-first": TreeBudget(max_nodes=11, max_depth=4)}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, thinking_token_budget=9)
SAMPLED = replace(GREEDY, temperature=0.9)
TOKENIZER = make_tokenizer()
COMPILER = GrammarCompiler(TOKENIZER, VOCAB, (EOS,))
PROMPTS = random_prompts([3, 20, 9, 14, 6, 11, 8], seed=6)
END_IDS = tuple(TOKENIZER.encode("\n!?", add_special_tokens=False))


def _request(number: int, params: SamplingParams, **asked: Any) -> Request:
    request = make_request(str(number), PROMPTS[number], params, seed=number)
    thought = Reasoning("", "!?", END_IDS, is_open=True)
    request.thought = Thought(thought, TOKENIZER.decode, params.thinking_token_budget)
    if asked:
        request.grammar = COMPILER.compile(StructuredOutputsParams(**asked))
    return request


def _requests() -> list[Request]:
    return [
        _request(0, GREEDY),
        _request(1, replace(SAMPLED, thinking_token_budget=0)),
        _request(2, replace(GREEDY, thinking_token_budget=None)),
        _request(3, replace(SAMPLED, top_k=20, logprobs=2, allowed_token_ids=range(40), thinking_token_budget=13)),
        _request(4, replace(SAMPLED, repetition_penalty=1.3, thinking_token_budget=2), regex=r"[a-z .,]*\n!\?[a-z ]+"),
        _request(5, replace(GREEDY, min_tokens=16, logit_bias={END_IDS[1]: -100.0})),
        _request(6, replace(SAMPLED, thinking_token_budget=40)),
    ]


def _outputs(requests: Sequence[Request]) -> list[Any]:
    return [(one.output_ids, one.finish_reason, [set(known) for known in one.logprobs]) for one in requests]


def _wanted(target: LoadedModel) -> list[Any]:
    requests = _requests()
    plain_tokens(target, requests)
    for request in requests:
        assert request.thought is not None
        budget = request.thought.budget
        if budget is not None and budget < 24:
            assert tuple(request.output_ids[budget : budget + len(END_IDS)]) == END_IDS
            assert request.thought.num_tokens == budget
            assert request.num_output > budget + len(END_IDS)
    return _outputs(requests)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("lookups", [(), ("ngram",)])
def test_budgets_give_the_tokens_of_plain_decoding(tree: str, lookups: tuple[str, ...], pair: Pair) -> None:
    engine = make_device_engine(pair[0], pair[1] if TREES[tree] else None, TREES[tree], lookups=lookups)
    requests = _requests()
    assert run_on_device(engine, requests) == set(requests)
    assert _outputs(requests) == _wanted(pair[0])
    check_left(engine)


def test_other_targets(model_folder: Callable[..., Path]) -> None:
    target, small = load_plain(model_folder("lfm2")), load_plain(model_folder("llama", 0, 0.05))
    engine, requests = make_device_engine(target, small, TREES["2,2,1"]), _requests()
    assert run_on_device(engine, requests) == set(requests)
    assert _outputs(requests) == _wanted(target)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_way_to_draft(way: dict[str, bool], pair: Pair) -> None:
    requests = _requests()
    engine = make_device_engine(*pair, TREES["best-first"], **way)
    run(engine, requests)
    assert _outputs(requests) == _wanted(pair[0])
    check_left(engine)


@pytest.mark.parametrize("rule", ["multi-step", "traversal"])
@pytest.mark.parametrize("way", WAYS[1:], ids=str)
def test_rules_with_random_numbers_draw_as_host_steps(way: dict[str, bool], rule: str, pair: Pair) -> None:
    """Sampled requests leave the device while their thoughts are near the ends of their budgets."""
    found = []
    for options in (WAYS[0], way):
        engine, requests = make_device_engine(*pair, TREES["2,2,1"], verification=rule, **options), _requests()
        for request in requests:  # which step has draft tokens depends on the other requests
            run(engine, [request])
        found.append(_outputs(requests))
    assert found[0] == found[1]


@pytest.mark.parametrize("rule", ["multi-step", "traversal"])
def test_budgets_hold_under_rules_with_random_numbers(rule: str, pair: Pair) -> None:
    engine, requests, wanted = make_device_engine(*pair, TREES["2,2,1"], verification=rule), _requests(), _requests()
    run(engine, requests)
    plain_tokens(pair[0], wanted)
    for request, other in zip(requests, wanted, strict=True):
        budget = request.params.thinking_token_budget
        if request.params.is_greedy:
            assert request.output_ids == other.output_ids
        elif budget is not None and budget < 24:
            assert tuple(request.output_ids[budget : budget + len(END_IDS)]) == END_IDS
    check_left(engine)


def test_requests_whose_tokens_are_drawn_come_back_after_their_thought(pair: Pair) -> None:
    engine = make_device_engine(*pair, TREES["2,2,1"], verification="multi-step")
    request = _request(0, replace(SAMPLED, max_tokens=100, thinking_token_budget=50))
    engine.add(request)
    served: dict[int, bool] = {}
    while engine.has_work:
        engine.step()
        served[request.num_output] = request in executor_of(engine).requests
    assert any(is_here for count, is_here in served.items() if count < 12)
    assert not any(is_here for count, is_here in served.items() if 50 < count < 50 + len(END_IDS))
    assert any(is_here for count, is_here in served.items() if 70 < count < 95)
    check_left(engine)


def test_steps_far_from_the_budget_have_no_masks_and_wait_for_nothing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = list[int]()
    send = TokenMasks.send_roots

    def noted(self: TokenMasks, requests: Sequence[Request], nodes: int) -> None:
        lengths.append(request.num_output)
        send(self, requests, nodes)

    monkeypatch.setattr(TokenMasks, "send_roots", noted)
    request = _request(0, replace(GREEDY, max_tokens=60, thinking_token_budget=30))
    engine, in_flight = make_device_engine(*pair, TREES["2,2,1"]), dict[int, int]()
    executor = executor_of(engine)
    score = executor.score

    def noted_begin(batch: Any) -> None:
        score(batch)
        in_flight[request.num_output] = executor.num_in_flight

    monkeypatch.setattr(executor, "score", noted_begin)
    engine.add(request)
    while engine.has_work:
        engine.step()
    assert {in_flight[count] for count in in_flight if count < 15 or 40 < count < 56} == {2}
    assert 30 - 12 < min(lengths) <= 30
    assert max(lengths) <= 30 + len(END_IDS)


def test_a_late_device_has_the_same_tokens(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, stream = _wanted(pair[0]), LateStream()
    for tree in TREES.values():
        with monkeypatch.context() as patch:
            make_executor_late(stream, patch)
            engine, requests = make_device_engine(pair[0], pair[1] if tree else None, tree), _requests()
            run_on_device(engine, requests)
        assert _outputs(requests) == wanted
        check_left(engine)

"""The engine: requests that join, leave, are aborted, interrupted or broken, and what is left behind."""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

from specinfer.core.noise import UniformStream
from specinfer.core.request import FinishReason, Request, Span
from specinfer.core.sampling import SamplingParams
from specinfer.core.text import TextBuffer
from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.drafters import MergedDrafter, NGramDrafter, SmallModelDrafter, make_drafter
from specinfer.engine.engine import Engine
from specinfer.model.batch import Piece
from specinfer.model.runner import ModelRunner
from specinfer.policy.base import FixedPolicy
from specinfer.policy.request_policy import RequestPolicy
from specinfer.verify import Acceptance
from tiny import (
    EOS,
    VOCAB,
    arrive_in_turn,
    load_runner,
    make_engine,
    make_model,
    make_request,
    make_tokenizer,
    random_prompts,
    resized,
    run,
    save_model,
)

Runners = Callable[..., ModelRunner]
GREEDY = SamplingParams(temperature=0.0, max_tokens=15)
PROMPTS = random_prompts([3, 26, 12, 40])
PARAMS = [GREEDY, SamplingParams(max_tokens=14), GREEDY, SamplingParams(max_tokens=11, top_p=0.9, temperature=0.7)]


def _requests(**fields: Any) -> list[Request]:
    return [make_request(str(i), p, q, seed=i, **fields) for i, (p, q) in enumerate(zip(PROMPTS, PARAMS, strict=True))]


def _engine(runners: Runners, num_slots: int = 600, kind: str = "tree", **limits: int) -> Engine:
    target = resized(runners("llama"), num_slots)
    if kind == "plain":
        return make_engine(target, **limits)
    small = SmallModelDrafter(resized(runners("llama", 0, 0.15), 600), VOCAB, "small")
    return make_engine(target, MergedDrafter([small, NGramDrafter()]), (2, 1, 1), **limits)


@pytest.fixture
def plain(runner_of: Runners) -> list[list[int]]:
    return run(_engine(runner_of, kind="plain"), _requests())


def _left(engine: Engine) -> bool:
    """Whether the engine and its caches hold anything of any request."""
    return engine.has_work or engine.target.cache.num_owned > 0


# --------------------------------------------------------------------------------------------- steps


def test_a_step_without_work_does_nothing(runner_of: Runners) -> None:
    engine = _engine(runner_of)
    assert not engine.has_work
    assert engine.step() == []
    assert engine.metrics.num_steps == 0


@pytest.mark.parametrize(("tenant", "prioritized"), [("new", True), ("busy", False)])
def test_a_first_token_does_not_wait_for_draft_tokens_of_other_tenants(
    runner_of: Runners, plain: list[list[int]], tenant: str, prioritized: bool
) -> None:
    engine, requests = _engine(runner_of), _requests()
    requests[0].tenant, requests[2].tenant = "busy", tenant

    def step() -> int:
        engine.step()
        return engine.metrics.recent[-1].num_guessed

    engine.add(requests[0])
    assert step(), "alone, it drafts at once"
    engine.add(requests[2])
    assert (step() == 0) is prioritized
    assert requests[2].num_output
    assert step(), "one pass in a few goes without draft tokens"
    while engine.has_work:
        step()
    assert [requests[i].output_ids for i in (0, 2)] == [plain[i] for i in (0, 2)]


def test_a_request_that_arrives_while_trees_are_drafted_joins_the_pass(
    runner_of: Runners, plain: list[list[int]]
) -> None:
    engine, requests = _engine(runner_of), _requests()
    engine.add(requests[0])
    engine.host.take_arrivals = lambda: engine.add(requests[2])
    assert engine.step() == [requests[0], requests[2]]
    assert engine.metrics.recent[-1].num_guessed, "those who were there keep their trees"
    engine.host.take_arrivals = lambda: None
    while engine.has_work:
        engine.step()
    assert [requests[i].output_ids for i in (0, 2)] == [plain[i] for i in (0, 2)]


@pytest.mark.parametrize("limits", [{}, {"num_slots": 64}, {"max_num_seqs": 2}, {"max_num_batched_tokens": 12}])
def test_requests_that_arrive_while_trees_are_drafted_get_what_they_would_alone(
    limits: dict[str, int], runner_of: Runners, plain: list[list[int]]
) -> None:
    engine, requests = _engine(runner_of, **limits), _requests()
    engine.add(requests[0])
    arrive_in_turn(engine, requests[1:])
    while engine.has_work:
        engine.step()
        record = engine.metrics.recent[-1]
        assert record.num_rows - record.num_guessed <= limits.get("max_num_batched_tokens", math.inf)
        assert len(engine.scheduler.running) <= limits.get("max_num_seqs", math.inf)
    assert [request.output_ids for request in requests] == plain
    assert not _left(engine)


@pytest.mark.parametrize(("length", "waits"), [(26, True), (40, False)])
def test_a_first_token_does_not_wait_until_the_drafter_has_read_a_long_prompt(
    length: int, waits: bool, runner_of: Runners, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specinfer.engine.host_executor.MAX_CHUNK", 30)
    engine = _engine(runner_of)
    request = make_request("0", random_prompts([length])[0], GREEDY)
    engine.add(request)
    engine.step()
    assert request.num_output > 0
    assert (engine.metrics.recent[-1].num_read > 0) is waits
    engine.step()
    assert request.drafting.is_read
    assert (engine.metrics.recent[-1].num_read > 0) is not waits


def test_a_step_returns_the_requests_that_got_tokens(runner_of: Runners) -> None:
    engine = _engine(runner_of, max_num_batched_tokens=20)
    short, long = make_request("s", PROMPTS[0], GREEDY), make_request("l", PROMPTS[3], GREEDY)
    engine.add(long)
    assert engine.step() == [], "20 of the long prompt's 40 tokens"
    engine.add(short)
    said = []
    while engine.has_work:
        before = {r: r.num_output for r in (short, long)}
        returned = engine.step()
        assert {r for r in (short, long) if r.num_output > before[r]} == set(returned)
        said += returned
    assert {r.request_id for r in said} == {"s", "l"}


def test_times_are_in_order(runner_of: Runners) -> None:
    requests = _requests()
    run(_engine(runner_of), requests)
    for request in requests:
        assert request.times.first_token is not None
        assert request.times.finished is not None
        assert 0 < request.times.arrival <= request.times.first_token <= request.times.finished


@pytest.mark.parametrize("kind", ["plain", "tree"])
def test_the_record_of_each_step_adds_up(kind: str, runner_of: Runners) -> None:
    engine, requests = _engine(runner_of, kind=kind, max_num_batched_tokens=24), _requests()
    run(engine, requests)
    records = engine.metrics.recent
    assert len(records) == engine.metrics.num_steps
    assert sum(record.num_generated for record in records) == sum(request.num_output for request in requests)
    assert sum(record.num_guessed for record in records) == sum(r.speculation.num_draft_tokens for r in requests)
    known = sum(record.num_rows - record.num_guessed for record in records)
    accepted = sum(min(r.num_output, r.speculation.num_accepted_draft_tokens) for r in requests)
    assert known >= sum(map(len, PROMPTS))
    if kind == "plain":
        assert accepted == 0
        assert known == sum(len(request.token_ids) - 1 for request in requests), "the last token is never computed"
        assert {record.num_levels for record in records} == {0}
    else:
        assert accepted > 0
        assert max(record.num_levels for record in records) == 3
    assert all(record.time == record.draft_time + record.target_time + record.rest_time > 0 for record in records)


def test_logprobs_are_those_of_the_bare_logits(runner_of: Runners) -> None:
    """The same with speculation, for each token of an accepted path."""

    def requests() -> list[Request]:
        fields = {"max_tokens": 12, "logprobs": 3, "temperature": 0.0, "repetition_penalty": 1.3}
        return [make_request("0", PROMPTS[1], SamplingParams(**fields))]

    (alone,), (guessed,) = requests(), requests()
    run(_engine(runner_of, kind="plain"), [alone])
    run(_engine(runner_of), [guessed])
    assert guessed.speculation.num_accepted_draft_tokens > 0
    assert alone.output_ids == guessed.output_ids
    for request in (alone, guessed):
        assert len(request.logprobs) == 12
        for token, row in zip(request.output_ids, request.logprobs, strict=True):
            assert next(iter(row)) == token
            assert 3 <= len(row) <= 4
            assert max(known.logprob for known in row.values()) <= 0.0
    for a, b in zip(alone.logprobs, guessed.logprobs, strict=True):
        assert {t: known.logprob for t, known in a.items()} == pytest.approx(
            {t: known.logprob for t, known in b.items()}, abs=1e-4
        )
    assert any(row[token].rank > 1 for token, row in zip(alone.output_ids, alone.logprobs, strict=True)), (
        "the penalty moved some choice away from the best token"
    )


# -------------------------------------------------------------------------------------- prompt logprobs


def _exact_prompt_logprobs(prompt: list[int], count: int) -> list[dict[int, float] | None]:
    """From one whole pass of transformers' own model."""
    with torch.no_grad():
        logits = make_model("llama")(input_ids=torch.tensor([prompt]), use_cache=False).logits[0]
    rows: list[dict[int, float] | None] = [None]
    for token, logprobs in zip(prompt[1:], logits.float().log_softmax(dim=-1)[:-1], strict=True):
        best = logprobs.topk(count).indices.tolist()
        rows.append({kind: logprobs[kind].item() for kind in (token, *best)})
    return rows


def _check_prompt_logprobs(request: Request, count: int) -> None:
    wanted = _exact_prompt_logprobs(request.prompt_ids, count)
    assert len(request.prompt_logprobs) == len(wanted)
    for token, row, exact in zip(request.prompt_ids, request.prompt_logprobs, wanted, strict=True):
        assert (row is None) == (exact is None)
        if row is not None and exact is not None:
            assert next(iter(row)) == token, "the prompt's own token first"
            assert {kind: known.logprob for kind, known in row.items()} == pytest.approx(exact, abs=2e-4)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", ["plain", "tree"])
@pytest.mark.parametrize("num_batched", [1, 7, 13, 512])
@pytest.mark.parametrize("count", [0, 3])
def test_prompt_logprobs_are_those_of_one_whole_pass(
    kind: str, num_batched: int, count: int, runner_of: Runners
) -> None:
    """Read in one pass or in chunks, beside requests that say tokens or do not want to know."""
    prompts = [*PROMPTS, [5], [5, 6]]
    params = SamplingParams(temperature=0.0, max_tokens=9, prompt_logprobs=count)
    asked = [make_request(f"asked {i}", prompt, params) for i, prompt in enumerate(prompts)]
    others = _requests()
    engine = _engine(runner_of, kind=kind, max_num_batched_tokens=num_batched)
    outputs = run(engine, [request for pair in zip(asked, others, strict=False) for request in pair] + asked[4:])
    for request in asked:
        _check_prompt_logprobs(request, count)
    assert all(request.prompt_logprobs == [] for request in others)
    alone = [make_request(str(i), prompt, GREEDY) for i, prompt in enumerate(PROMPTS)]
    run(_engine(runner_of, kind="plain"), alone)
    assert outputs[::2][:4] == [request.output_ids[:9] for request in alone], "asking changes no token"


@pytest.mark.parametrize("kind", ["plain", "tree"])
def test_prompt_logprobs_of_requests_that_are_put_back(kind: str, runner_of: Runners) -> None:
    """Read again from the start, but each token's are noted once."""
    params = SamplingParams(temperature=0.0, max_tokens=25, prompt_logprobs=2)
    prompts = random_prompts([20, 33, 8, 40, 1, 27], seed=3)
    requests = [make_request(str(i), prompt, params) for i, prompt in enumerate(prompts)]
    engine = _engine(runner_of, 70, kind=kind, max_num_batched_tokens=9)
    run(engine, requests)
    assert engine.metrics.num_preempted > 3
    for request in requests:
        _check_prompt_logprobs(request, 2)


@pytest.mark.parametrize("place", ["target", "committing"])
def test_prompt_logprobs_after_an_interrupt(place: str, runner_of: Runners, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, prompt_logprobs=2)
    for at in (0, 1, 2, 4, 6):
        engine, request = _engine(runner_of, max_num_batched_tokens=7), make_request("0", PROMPTS[3], params)
        owner, name = PLACES[place](engine)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, _interrupting(getattr(owner, name), at, Stop))
            with pytest.raises(Stop):
                run(engine, [request])
        while engine.has_work:
            engine.step()
        _check_prompt_logprobs(request, 2)


# ------------------------------------------------------------------------------ rules that use random numbers

TOSSING = ("multi-step", "traversal")
SHAPES = {"expansion": (2, 1, 1), "best first": TreeBudget(8, 4)}


def _tossing(
    runners: Runners, rule: str, shape: str = "expansion", drawing: str = "without-replacement",
    num_slots: int = 800, noise: float = 0.15, **limits: int,
) -> Engine:  # fmt: skip
    drafter = make_drafter([resized(runners("llama", 0, noise), 800), "ngram"], VOCAB, ["small", "ngram"], drawing)
    return make_engine(resized(runners("llama"), num_slots), drafter, SHAPES[shape], verification=rule, **limits)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("drawing", ["without-replacement", "iid", "hybrid", "top-k"])
@pytest.mark.parametrize("rule", TOSSING)
def test_rules_that_use_random_numbers_serve_all_kinds_of_requests(
    rule: str, drawing: str, shape: str, runner_of: Runners
) -> None:
    engine, requests = _tossing(runner_of, rule, shape, drawing, max_num_batched_tokens=24), _requests()
    run(engine, requests)
    for request, params in zip(requests, PARAMS, strict=True):
        assert request.num_output == params.max_tokens == len(request.origins)
        assert request.finish_reason == FinishReason.LENGTH
        assert all(0 <= token < VOCAB for token in request.output_ids)
        assert request.speculation.num_generated == request.num_output
    assert sum(r.speculation.num_accepted_draft_tokens for r in requests if not r.params.is_greedy) > 0
    assert {origin for r in requests for origin in r.origins} >= {None, "small"}
    assert not _left(engine)


@pytest.mark.parametrize("shape", SHAPES)
def test_under_auto_one_batch_has_requests_of_both_rules(shape: str, runner_of: Runners) -> None:
    engine, requests = _tossing(runner_of, "auto", shape, "auto", max_num_batched_tokens=24), _requests()
    plain = _requests()
    run(make_engine(runner_of("llama"), None, TreeBudget()), plain)
    timed = set()
    note = Mock(
        side_effect=lambda request, tree, acceptance, *_: timed.add((request.verification, acceptance.seconds > 0))
    )
    engine.observers.append(Mock(reads_logits=False, on_tokens=note))
    run(engine, requests)
    assert engine.metrics.num_draft_failures == 0
    assert timed == {(None, False), ("coupled", False), ("traversal", True)}
    sampled = [request for request in requests if not request.params.is_greedy]
    assert {request.verification for request in sampled} == {"coupled", "traversal"}
    for rule in ("coupled", "traversal"):
        assert sum(r.speculation.num_accepted_draft_tokens for r in sampled if r.verification == rule) > 0
    greedy = [(a.output_ids, b.output_ids) for a, b in zip(requests, plain, strict=True) if a.params.is_greedy]
    assert greedy
    assert all(found == wanted for found, wanted in greedy)
    assert not _left(engine)


def _sampled(count: int = 8, max_tokens: int = 20) -> list[Request]:
    prompts = random_prompts([3 + 4 * i for i in range(count)], seed=2)
    params = [SamplingParams(max_tokens=max_tokens, temperature=0.6 + 0.1 * i) for i in range(count)]
    return [make_request(str(i), p, q, seed=i) for i, (p, q) in enumerate(zip(prompts, params, strict=True))]


@pytest.mark.covering(1)
@pytest.mark.parametrize("drawing", ["without-replacement", "iid", "hybrid", "top-k"])
@pytest.mark.parametrize("rule", TOSSING)
def test_the_same_seed_generates_the_same_tokens_in_any_batch(rule: str, drawing: str, runner_of: Runners) -> None:
    """With the same drafters and a fixed tree: coins and draws are a request's own."""
    together = _sampled()
    run(_tossing(runner_of, rule, drawing=drawing), together)
    wanted = {request.request_id: (request.output_ids, request.origins) for request in together}
    assert any(origin for _, origins in wanted.values() for origin in origins)
    backwards = _sampled()[::-1]
    run(_tossing(runner_of, rule, drawing=drawing, max_num_seqs=3, max_num_batched_tokens=16), backwards)
    alone = _sampled()
    for request in alone:
        run(_tossing(runner_of, rule, drawing=drawing), [request])
    for request in (*backwards, *alone):
        assert (request.output_ids, request.origins) == wanted[request.request_id]
    other = _sampled()
    for request in other:
        request.seed += 100
        request.uniforms = UniformStream(request.seed)
    run(_tossing(runner_of, rule, drawing=drawing), other)
    assert [request.output_ids for request in other] != [request.output_ids for request in together]


@pytest.mark.parametrize("rule", TOSSING)
def test_requests_that_want_no_guesses_are_decoded_plainly_under_any_rule(rule: str, runner_of: Runners) -> None:
    def requests(tree: str | None) -> list[Request]:
        return [
            make_request(str(i), prompt, SamplingParams(max_tokens=12, tree=tree), seed=i)
            for i, prompt in enumerate(PROMPTS)
        ]

    plain, off, on = requests(None), requests("off"), requests(None)
    run(_engine(runner_of, kind="plain"), plain)
    engine = _tossing(runner_of, rule)
    engine.policy = RequestPolicy(engine.policy, FixedPolicy, 3)
    for request in on:
        request.request_id += " on"
    run(engine, [*off, *on])
    assert [request.output_ids for request in off] == [request.output_ids for request in plain]
    assert all(request.speculation.num_draft_tokens == 0 for request in off)
    assert all(request.speculation.num_draft_tokens > 0 for request in on)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", TOSSING)
def test_an_end_inside_an_accepted_path_under_rules_that_use_random_numbers(
    rule: str, shape: str, runner_of: Runners
) -> None:
    """A copy of the target: of the guesses drawn for it nearly all are accepted."""
    inside = 0
    for fields in ({"stop": ["e", "ti"]}, {"stop_token_ids": list(range(20, 40))}, {"logit_bias": {EOS: 3.0}}):
        params = SamplingParams(max_tokens=30, **fields)
        requests = _text_requests(params)
        run(_tossing(runner_of, rule, shape, noise=0.0), requests)
        for request in requests:
            ends = [
                i
                for i, token in enumerate(request.output_ids)
                if token == EOS or token in params.stop_tokens
            ]  # fmt: skip
            assert ends in ([], [request.num_output - 1]), "nothing is said after an end"
            assert request.num_output <= 30
            assert len(request.origins) == request.num_output == request.speculation.num_generated
            assert request.text is not None
            if request.finish_reason == FinishReason.STOP and params.stop:
                assert not any(stop in request.text.text for stop in params.stop)
            inside += request.finish_reason == FinishReason.STOP and request.origins[-1] is not None
    assert inside > 0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", TOSSING)
def test_preempted_requests_go_on_under_rules_that_use_random_numbers(
    rule: str, shape: str, runner_of: Runners
) -> None:
    engine, requests = _tossing(runner_of, rule, shape, num_slots=75, max_num_batched_tokens=16), _sampled(8, 30)
    run(engine, requests)
    assert engine.metrics.num_preempted > 3
    assert [request.num_output for request in requests] == [30] * 8
    assert all(request.error is None for request in requests)
    assert not _left(engine)


# --------------------------------------------------------------------------------- ends inside a path

TOKENIZER = make_tokenizer()
TEXT_PROMPTS = ["the cat and the story of", "ing", "that is all, and", "\u20ac\u00e9 in"]


def _text_requests(params: SamplingParams) -> list[Request]:
    return [
        make_request(
            str(i),
            TOKENIZER.encode(text),
            params,
            seed=i,
            eos_token_ids=(EOS,),
            text=TextBuffer(TOKENIZER.decode, params.stop_strings, include_stop=params.include_stop_str_in_output),
        )
        for i, text in enumerate(TEXT_PROMPTS)
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": ["e", "ti"]},
        {"stop": ["a", "st", "\u20ac"], "include_stop_str_in_output": True},
        {"stop": ["er", "x"], "min_tokens": 6},
        {"stop_token_ids": list(range(20, 40))},
        {"logit_bias": {EOS: 3.0}},
        {"logit_bias": {EOS: 4.0}, "min_tokens": 5, "ignore_eos": False},
    ],
    ids=repr,
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_end_inside_an_accepted_path_cuts_it(fields: dict[str, Any], temperature: float, runner_of: Runners) -> None:
    """A copy of the target guesses all: each pass accepts seven tokens, and most ends lie inside."""
    params = SamplingParams(temperature=temperature, max_tokens=40, **fields)
    alone, guessed = _text_requests(params), _text_requests(params)
    run(_engine(runner_of, kind="plain"), alone)
    target = runner_of("llama")
    engine = make_engine(target, SmallModelDrafter(resized(target, 600), VOCAB), (1,) * 7)
    run(engine, guessed)
    for a, b in zip(alone, guessed, strict=True):
        assert (a.output_ids, a.finish_reason, a.stop_reason) == (b.output_ids, b.finish_reason, b.stop_reason)
        assert a.text is not None
        assert b.text is not None
        assert a.text.text == b.text.text
        assert len(b.origins) == b.num_output
        if b.finish_reason == FinishReason.STOP and b.num_output > 1:
            assert b.speculation.num_target_passes < b.num_output
    if temperature:
        assert any(r.finish_reason == FinishReason.STOP and r.num_output % 8 for r in guessed), "an end inside a path"


# -------------------------------------------------------------------------------------------- aborts


@pytest.mark.parametrize("kind", ["plain", "tree"])
def test_abort_at_any_step(kind: str, runner_of: Runners, plain: list[list[int]]) -> None:
    """Waiting, half read, saying tokens or finished: the others go on as if nothing had been."""
    steps = 0
    while True:
        engine, requests = _engine(runner_of, kind=kind, max_num_seqs=3, max_num_batched_tokens=16), _requests()
        for request in requests:
            engine.add(request)
        for _ in range(steps):
            engine.step()
        victim = requests[steps % 4]
        was_finished = victim.is_finished
        engine.abort(victim)
        assert victim.finish_reason == (victim.finish_reason if was_finished else FinishReason.ABORT)
        assert victim.is_finished
        assert not len(engine.target.cache.slots(victim.request_id))
        said = victim.output_ids
        engine.abort(victim)
        while engine.has_work:
            assert victim not in engine.step()
        assert victim.output_ids == said == plain[steps % 4][: len(said)]
        for i, request in enumerate(requests):
            if request is not victim:
                assert request.output_ids == plain[i]
        assert not _left(engine)
        if was_finished and all(r.is_finished for r in requests):
            break
        steps += 1
    assert steps > 6


class Stop(BaseException):
    """As an interrupt: no `except Exception` catches it."""


def _interrupting(function: Callable[..., Any], at: int, error: type[BaseException]) -> Callable[..., Any]:
    calls = iter(range(10**6))

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == at:
            raise error
        return function(*args, **kwargs)

    return call


PLACES = {
    "target": lambda engine: (engine.target, "forward"),
    "drafting": lambda engine: (engine.drafter, "draft"),
    "small model": lambda engine: (engine.drafter.drafters[0]._cache, "note_read"),
    "observing": lambda engine: (engine.drafter, "observe"),
    "reserving": lambda engine: (engine.target.cache, "reserve"),
    "committing": lambda engine: (engine.target.cache, "commit"),
}


def _run_until_interrupted(
    place: str, at: int, runner_of: Runners, monkeypatch: pytest.MonkeyPatch
) -> tuple[Engine, list[Request]]:
    """An engine whose `at`-th call in this place was interrupted, and its unfinished requests."""
    engine, requests = _engine(runner_of, max_num_batched_tokens=32), _requests()
    owner, name = PLACES[place](engine)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, _interrupting(getattr(owner, name), at, Stop))
        with pytest.raises(Stop):
            run(engine, requests)
    return engine, requests


@pytest.mark.parametrize("place", PLACES)
def test_an_interrupt_anywhere_leaves_nothing_behind(
    place: str, runner_of: Runners, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for at in (0, 1, 2, 4):
        engine, requests = _run_until_interrupted(place, at, runner_of, monkeypatch)
        for request in requests:
            engine.abort(request)
        assert not _left(engine)
        assert run(engine, _requests()) == plain, "and the engine works on"


@pytest.mark.parametrize("kind", ["plain", "tree"])
def test_no_slot_is_read_before_it_is_written(kind: str, runner_of: Runners, plain: list[list[int]]) -> None:
    engine = _engine(runner_of, kind=kind, max_num_batched_tokens=32)
    for pool in (*engine.target.tensors.keys, *engine.target.tensors.values):
        pool.fill_(math.nan)
    assert run(engine, _requests()) == plain


def test_counters_end_where_the_request_ends(runner_of: Runners, plain: list[list[int]]) -> None:
    """A request that ends inside an accepted path did not take the rest of it."""
    perfect = SmallModelDrafter(resized(runner_of("llama"), 600), VOCAB)
    prompt = _requests()[0].prompt_ids
    for length in range(1, 8):
        stop = plain[0][length - 1]
        length = plain[0].index(stop) + 1
        request = make_request("a", prompt, SamplingParams(temperature=0.0, max_tokens=40, stop_token_ids=[stop]))
        run(make_engine(resized(runner_of("llama"), 600), perfect, (1, 1, 1, 1)), [request])
        stats = request.speculation
        assert request.num_output == length == stats.num_generated
        assert stats.num_accepted_draft_tokens == sum(origin is not None for origin in request.origins)
        assert stats.tokens_per_pass == length / stats.num_target_passes


@pytest.mark.parametrize("place", PLACES)
def test_requests_go_on_unharmed_after_an_interrupt(
    place: str, runner_of: Runners, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One caller's failure must not leave slots that nobody wrote in another's cache."""
    for at in (0, 1, 3, 5):
        engine, requests = _run_until_interrupted(place, at, runner_of, monkeypatch)
        while engine.has_work:
            engine.step()
        assert [request.output_ids for request in requests] == plain


# ------------------------------------------------------------------------------------- broken drafters


class Broken:
    """A bare drafter, not merged with others, that fails in the steps it is told to."""

    name = "broken"

    def __init__(self, inner: NGramDrafter, fails: Callable[[int], bool]) -> None:
        self._inner, self._fails, self._calls = inner, fails, 0

    def draft(self, spans: Sequence[Span], budgets: Sequence[TreeBudget]) -> list[TokenTree]:
        self._calls += 1
        if self._fails(self._calls):
            raise ValueError("on purpose")
        return self._inner.draft(spans, budgets)

    def observe(self, request: Request, tree: TokenTree, acceptance: Acceptance) -> None:
        self._inner.observe(request, tree, acceptance)

    def forget(self, request_id: str) -> None:
        self._inner.forget(request_id)


@pytest.mark.parametrize("every", [1, 2, 3])
def test_a_drafter_that_raises_costs_its_guesses_only(
    every: int, runner_of: Runners, plain: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    drafter = Broken(NGramDrafter(), lambda call: call % every == 0)
    engine = make_engine(resized(runner_of("llama"), 600), drafter, (1, 1))
    with caplog.at_level(logging.ERROR, logger="specinfer"):
        assert run(engine, _requests()) == plain
    assert engine.metrics.num_draft_failures > 0
    assert "on purpose" in caplog.text


# ---------------------------------------------------------------------------------------------- NaN


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the target compute NaN for one request from its n-th saying pass on."""

    def spoil(engine: Engine, victim: str, after: int = 0, column: int | None = None, row: int | None = None) -> None:
        forward, seen = engine.target.forward, iter(range(10**6))

        def spoiled(pieces: Sequence[Piece]) -> Tensor:
            logits, start = forward(pieces).clone(), 0
            for piece in pieces:
                end = start + piece.num_logits
                mine = np.array_equal(piece.slots, engine.target.cache.reserved(victim)) and len(piece.slots)
                if mine and piece.num_logits and next(seen) >= after:
                    rows = slice(start, end) if row is None else start + min(row, piece.num_logits - 1)
                    logits[rows, slice(None) if column is None else column] = math.nan
                start = end
            return logits

        monkeypatch.setattr(engine.target, "forward", spoiled)

    return spoil


@pytest.mark.parametrize("kind", ["plain", "tree"])
@pytest.mark.parametrize("victim", [0, 1, 3])
@pytest.mark.parametrize(("after", "column"), [(0, None), (2, None), (1, 5)])
def test_nan_ends_only_the_request_it_belongs_to(
    kind: str,
    victim: int,
    after: int,
    column: int | None,
    runner_of: Runners,
    plain: list[list[int]],
    spoil: Callable[..., None],
) -> None:
    engine, requests = _engine(runner_of, kind=kind), _requests()
    spoil(engine, str(victim), after, column)
    run(engine, requests)
    for i, request in enumerate(requests):
        if i != victim:
            assert (request.output_ids, request.error) == (plain[i], None)
            continue
        assert request.finish_reason == FinishReason.ERROR
        assert "not numbers" in (request.error or "")
        assert request.output_ids == plain[i][: request.num_output], "what was said before stands"
        assert request.num_output >= after
        assert request.num_output < len(plain[i])
    assert not _left(engine)


@pytest.mark.parametrize("rule", TOSSING)
@pytest.mark.parametrize("victim", [0, 5])
@pytest.mark.parametrize("after", [0, 2])
def test_nan_under_rules_that_use_random_numbers(
    rule: str, victim: int, after: int, runner_of: Runners, spoil: Callable[..., None]
) -> None:
    fine, requests = _sampled(), _sampled()
    run(_tossing(runner_of, rule), fine)
    engine = _tossing(runner_of, rule)
    spoil(engine, str(victim), after)
    run(engine, requests)
    for request, wanted in zip(requests, fine, strict=True):
        if request.request_id != str(victim):
            assert (request.output_ids, request.error) == (wanted.output_ids, None)
            continue
        assert request.finish_reason == FinishReason.ERROR
        assert "not numbers" in (request.error or "")
        assert request.output_ids == wanted.output_ids[: request.num_output], "what was said before stands"
        assert after <= request.num_output < len(wanted.output_ids)
    assert not _left(engine)


@pytest.mark.parametrize("rule", ["coupled", *TOSSING])
def test_nan_that_a_guess_brought_ends_no_request(rule: str, runner_of: Runners, spoil: Callable[..., None]) -> None:
    """Guesses are given up for this request, and it goes on plainly."""
    requests = _sampled(3)
    drawing = "shared-noise" if rule == "coupled" else "without-replacement"
    engine = _tossing(runner_of, rule, drawing=drawing, noise=0.0)
    forward = engine.target.forward

    def spoiled(pieces: Sequence[Piece]) -> Tensor:
        logits, start = forward(pieces).clone(), 0
        for piece in pieces:
            if np.array_equal(piece.slots, engine.target.cache.reserved("1")) and piece.num_logits > 1:
                logits[start + 1 : start + piece.num_logits] = math.nan
            start += piece.num_logits
        return logits

    engine.target.forward = spoiled  # type: ignore[method-assign]
    run(engine, requests)
    assert [request.drafting.is_allowed for request in requests] == [True, False, True]
    assert [request.error for request in requests] == [None] * 3
    assert [request.num_output for request in requests] == [20] * 3
    assert requests[1].speculation.num_accepted_draft_tokens == 0


@pytest.mark.covering(1)
@pytest.mark.parametrize("rule", ["plain", "coupled", *TOSSING])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("word", "said"), [((3,), []), ((3, 3), [3]), ((3, 3, 3, 3), [3, 3, 3])])
def test_where_no_token_may_follow_only_that_request_ends(
    word: tuple[int, ...], said: list[int], temperature: float, rule: str, runner_of: Runners
) -> None:
    """At once, or after some tokens, guessed ones among them."""
    params = SamplingParams(temperature=temperature, max_tokens=9, allowed_token_ids=[3])
    stuck = make_request("stuck", PROMPTS[1], params, bad_words_ids=(word,))
    others, alone = _sampled(3), _sampled(3)
    if rule == "plain":
        engine, other = _engine(runner_of, kind="plain"), _engine(runner_of, kind="plain")
    else:
        drawing = "shared-noise" if rule == "coupled" else "without-replacement"
        engine, other = (_tossing(runner_of, rule, drawing=drawing) for _ in range(2))
    run(engine, [others[0], stuck, *others[1:]])
    assert stuck.finish_reason == FinishReason.ERROR
    assert stuck.output_ids == said
    assert (stuck.error or "").startswith("no token may follow: the grammar, allowed_token_ids, bad_words")
    run(other, alone)
    assert [(r.output_ids, r.error) for r in others] == [(r.output_ids, None) for r in alone]
    assert not _left(engine)


def test_nan_where_nobody_goes_is_no_error(runner_of: Runners, spoil: Callable[..., None]) -> None:
    """A guess that is not kept may be anything: plain decoding would never have computed it."""
    target = runner_of("llama")
    (wanted,) = run(make_engine(resized(target, 600)), [make_request("0", PROMPTS[0], GREEDY)])

    class Wrong:
        name = "wrong"

        def draft(self, spans: Sequence[Span], budgets: Sequence[TreeBudget]) -> list[TokenTree]:
            (span,) = spans
            guess = (wanted[span.request.num_output] + 1) % VOCAB
            return [TokenTree.chain(span.request.token_ids[-1], [guess] * budgets[0].max_depth)]

        def observe(self, request: Request, tree: TokenTree, acceptance: Acceptance) -> None: ...

        def forget(self, request_id: str) -> None: ...

    engine = make_engine(resized(target, 600), Wrong(), (1,))
    # Only the last row of each pass is spoiled: that of the guess, as long as there is one. The last token of
    # all is said without a guess, and is not reached here.
    spoil(engine, "0", row=1)
    request = make_request("0", PROMPTS[0], GREEDY)
    run(engine, [request])
    assert request.output_ids == wanted[:14]
    assert request.speculation.num_spec_steps == 14


@pytest.mark.parametrize("kind", ["plain", "tree"])
def test_a_model_that_breaks_on_one_token_breaks_one_request(kind: str, tmp_path: Any) -> None:
    """Not only its logits: its keys and values are NaN too, in slots that padded calls may read."""
    model = load_runner(save_model(tmp_path, "gpt2", tie_word_embeddings=False), 400)
    broken_token = 90
    prompts = [[broken_token, 4, 5, 6, 7, 8], [1, 2], [3, 4, 5]]
    params = SamplingParams(temperature=0.0, max_tokens=8, logit_bias={broken_token: -100.0})
    drafter = SmallModelDrafter(resized(model, 400), VOCAB) if kind == "tree" else None
    widths = (1, 1) if kind == "tree" else ()
    wanted = run(
        make_engine(resized(model, 400)), [make_request(str(i), p, params) for i, p in enumerate(prompts) if i]
    )
    with torch.no_grad():
        model.loaded.model.transformer.wte.weight[broken_token] = 3e38
    requests = [make_request(str(i), p, params) for i, p in enumerate(prompts)]
    run(make_engine(model, drafter, widths), requests)
    assert requests[0].finish_reason == FinishReason.ERROR
    assert [request.output_ids for request in requests[1:]] == wanted
    later = make_request("later", prompts[1], params)
    assert run(make_engine(model), [later]) == [wanted[0]], "slots that held NaN are used again"


# -------------------------------------------------------------------------------------------- budgets


def test_trees_never_reach_past_the_end(runner_of: Runners, monkeypatch: pytest.MonkeyPatch) -> None:
    """No guess stands where no token may be said: past max_tokens, or past the model's context."""
    engine = _engine(runner_of)
    seen: list[tuple[int, int]] = []
    drafter = engine.drafter
    assert drafter is not None
    draft = drafter.draft

    def watched(spans: Sequence[Span], budgets: Sequence[TreeBudget]) -> list[TokenTree]:
        seen.extend(
            (span.request.max_new_tokens, budget.max_depth) for span, budget in zip(spans, budgets, strict=True)
        )
        return draft(spans, budgets)

    monkeypatch.setattr(drafter, "draft", watched)
    unlimited = SamplingParams(temperature=0.0, max_tokens=None)
    requests = [*_requests(), make_request("full", PROMPTS[3], unlimited, max_model_len=256)]
    run(engine, requests)
    assert requests[-1].num_output == 256 - 40
    assert all(depth <= left - 1 for left, depth in seen)
    assert {depth for _, depth in seen} >= {1, 2, 3}


def test_trees_leave_slots_for_every_request(runner_of: Runners, plain: list[list[int]]) -> None:
    """Few free slots: budgets shrink, and no reservation fails."""
    for num_slots in range(55, 130, 5):
        assert run(_engine(runner_of, num_slots), _requests()) == plain


def test_drafters_forget_preempted_requests(runner_of: Runners, plain: list[list[int]]) -> None:
    """A waiting request holds nothing, in the target's cache or in a drafter's."""
    target, small = resized(runner_of("llama"), 70), resized(runner_of("llama", 0, 0.15), 600)
    engine = make_engine(target, SmallModelDrafter(small, VOCAB), (2, 1))
    requests = _requests()
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
        for request in engine.scheduler.waiting:
            assert not len(small.cache.slots(request.request_id))
    assert engine.metrics.num_preempted > 0
    assert [request.output_ids for request in requests] == plain


def test_a_fault_after_tokens_were_taken_takes_none_twice(runner_of: Runners, plain: list[list[int]]) -> None:
    """A drafter that fails to observe and to forget: its request ends, and the others' step is not done again."""

    class Broken(SmallModelDrafter):
        def observe(self, request: Request, tree: TokenTree, acceptance: Acceptance) -> None:
            if request.request_id == "1":
                raise RuntimeError("cannot observe")
            super().observe(request, tree, acceptance)

        def forget(self, request_id: str) -> None:
            super().forget(request_id)
            if request_id == "1":
                raise RuntimeError("cannot forget")

    drafter = Broken(resized(runner_of("llama", 0, 0.15), 600), VOCAB, "small")
    engine = make_engine(resized(runner_of("llama"), 600), drafter, (2, 1, 1))
    requests = _requests()
    said = run(engine, requests)
    assert requests[1].finish_reason is FinishReason.ERROR
    assert [said[i] for i in (0, 2, 3)] == [plain[i] for i in (0, 2, 3)]
    assert not _left(engine)

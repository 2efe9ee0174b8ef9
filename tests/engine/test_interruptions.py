"""Steps of first tokens amid passes of other tenants."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from specinfer.core.request import Request
from specinfer.core.sampling import SamplingParams
from specinfer.drafters import MergedDrafter, NGramDrafter, SmallModelDrafter
from specinfer.engine.engine import Engine
from specinfer.engine.executor import StepResult
from specinfer.engine.first_tokens import PASSES_PER_TURN, FirstTokens
from specinfer.model.runner import ModelRunner
from tiny import VOCAB, arrive_in_turn, load_runner, make_engine, make_request, random_prompts, resized, run

PROMPTS = random_prompts([12, 3, 2, 5, 9])
TENANTS = ("busy", "new", "other", "new", "busy")


class _Costs:
    """Passes that take as long as their tokens, and what reading the weights takes beside."""

    def __init__(self, reading: float = 0.0) -> None:
        self._reading = reading

    def pass_seconds(self, num_tokens: int) -> float:
        return self._reading + num_tokens

    def may_admit(self, running: object) -> bool:
        return True

    def max_tokens(self, decoding: object, reading: object, most: int) -> int:
        return most


@pytest.fixture
def target(model_folder: Callable[..., Any]) -> ModelRunner:
    """A target of its own: a pause is a part of it."""
    return load_runner(model_folder("llama", num_hidden_layers=5))


@pytest.fixture
def serving(target: ModelRunner, runner_of: Callable[..., ModelRunner]) -> Callable[..., Engine]:
    """An engine with passes that may be interrupted, and what it delivered amid them."""

    def make(costs: Any = None, num_slots: int = 600, **limits: int) -> Engine:
        small = SmallModelDrafter(resized(runner_of("llama", 0, 0.15), 600), VOCAB, "small")
        engine = make_engine(resized(target, num_slots), MergedDrafter([small, NGramDrafter()]), (2, 2, 1), **limits)
        engine.scheduler.planner = costs or _Costs()  # type: ignore[assignment]
        return engine

    return make


def _requests() -> list[Request]:
    return [
        make_request(str(i), prompt, tenant=tenant)
        for i, (prompt, tenant) in enumerate(zip(PROMPTS, TENANTS, strict=True))
    ]


@pytest.fixture
def plain(target: ModelRunner) -> list[list[int]]:
    return run(make_engine(resized(target, 600)), _requests())


def _arriving(engine: Engine, requests: list[Request], at_call: int = 2) -> list[list[Request]]:
    """Let requests arrive when a pass asks for them the nth time; returns what is delivered amid passes."""
    delivered: list[list[Request]] = []
    num_calls = 0

    def take_arrivals() -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == at_call:
            for request in requests:
                engine.add(request)

    engine.host.take_arrivals = take_arrivals
    engine.interrupt_passes(lambda ended: delivered.append(list(ended)))
    return delivered


@pytest.mark.parametrize("at_call", [1, 2, 4], ids=["before the pass", "early in it", "late in it"])
def test_a_first_token_is_delivered_before_the_pass_of_another_tenant_ends(
    serving: Callable[..., Engine], plain: list[list[int]], at_call: int
) -> None:
    engine, requests = serving(), _requests()[:2]
    engine.add(requests[0])
    engine.step()
    delivered = _arriving(engine, requests[1:], at_call)
    assert engine.step() == requests[:1]
    assert delivered == [requests[1:]]
    assert requests[1].num_output == 1
    while engine.has_work:
        engine.step()
    assert [request.output_ids for request in requests] == plain[:2]
    assert not engine.target.cache.num_owned


@pytest.mark.parametrize("reason", ["same tenant", "reading decides", "long prompt", "not allowed"])
def test_a_pass_is_not_interrupted_where_that_is_unfair_or_hardly_shorter(
    serving: Callable[..., Engine], plain: list[list[int]], reason: str
) -> None:
    engine, requests = serving(_Costs(1000.0) if reason == "reading decides" else None), _requests()[:2]
    if reason == "same tenant":
        requests[1].tenant = requests[0].tenant
    if reason == "long prompt":
        requests[1] = make_request("1", [*PROMPTS[0], *PROMPTS[0]], tenant="new")
    engine.add(requests[0])
    engine.step()
    delivered = _arriving(engine, requests[1:])
    if reason == "not allowed":
        engine.host._commit_now = None
    engine.step()
    assert not delivered
    while engine.has_work:
        engine.step()
    assert not delivered
    assert requests[0].output_ids == plain[0]


def test_time_of_an_interruption_is_not_counted_as_that_of_the_pass(
    serving: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the measured costs of passes would grow."""
    engine, requests, now = serving(), _requests()[:2], [0.0]
    engine.add(requests[0])
    engine.step()
    _arriving(engine, requests[1:])
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    commit = engine.host._commit_now

    def slowly(result: StepResult) -> None:
        now[0] += 100.0
        assert commit is not None
        commit(result)

    engine.host._commit_now = slowly
    engine.step()
    early, interrupted = list(engine.metrics.recent)[-2:]
    assert early.num_guessed == 0 < interrupted.num_guessed
    assert interrupted.target_time < 1.0
    while engine.has_work:
        engine.step()


def test_a_step_amid_another_that_fails_is_repeated_later(
    serving: Callable[..., Engine], plain: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    engine, requests = serving(), _requests()[:2]
    engine.add(requests[0])
    engine.step()
    _arriving(engine, requests[1:])
    engine.host._commit_now = lambda _: 1 / 0
    with caplog.at_level(logging.ERROR):
        assert engine.step() == requests[:1]
    assert "a step amid another failed" in caplog.text
    assert not requests[1].num_output
    while engine.has_work:
        engine.step()
    assert [request.output_ids for request in requests] == plain[:2]
    assert not engine.target.cache.num_owned


def test_an_interrupt_amid_a_step_amid_another_leaves_no_slots(serving: Callable[..., Engine]) -> None:
    engine, requests = serving(), _requests()[:2]
    engine.add(requests[0])
    engine.step()
    _arriving(engine, requests[1:])

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    engine.host._commit_now = interrupt
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    for request in requests:
        engine.abort(request)
    assert not engine.target.cache.num_owned
    assert not engine.has_work


@pytest.mark.parametrize("limits", [{}, {"num_slots": 64}, {"max_num_seqs": 2}, {"max_num_batched_tokens": 12}])
def test_requests_that_arrive_at_any_time_get_what_they_would_alone(
    serving: Callable[..., Engine], plain: list[list[int]], limits: dict[str, int]
) -> None:
    engine, requests = serving(**limits), _requests()
    engine.add(requests[0])
    engine.interrupt_passes(lambda _: None)
    arrive_in_turn(engine, requests[1:])
    while engine.has_work:
        engine.step()
    assert [request.output_ids for request in requests] == plain
    assert not engine.target.cache.num_owned


def test_tenants_that_always_begin_interrupt_others_in_their_turns_only() -> None:
    first_tokens, costs = FirstTokens(), _Costs()
    busy = [make_request(name, [1, 2], tenant=name) for name in "abc"]
    for request in busy:
        request.token_ids.append(1)
    chosen = 0
    for _ in range(100):
        first_tokens.choose(list(busy), 6, costs)  # type: ignore[arg-type]
        greedy = make_request("greedy", [1], tenant="greedy")
        chosen += len(first_tokens.choose_amid([greedy], [*busy, greedy], 12, costs))  # type: ignore[arg-type]
    assert chosen == 100 // (PASSES_PER_TURN * 4) + 1


def test_tenants_that_do_not_run_in_the_pass_under_way_have_their_turns_too() -> None:
    first_tokens, costs = FirstTokens(), _Costs()
    tenants, busy, chosen = "abcdef", make_request("busy", [1, 2], tenant="busy"), 0
    busy.token_ids.append(1)
    for i in range(140):
        beginning = [make_request(name, [1], tenant=name) for name in tenants]
        first_tokens.choose([busy], 1, costs)  # type: ignore[arg-type]
        arrived = [beginning[i % len(tenants)]]
        chosen += len(first_tokens.choose_amid(arrived, [busy, *beginning], 12, costs))  # type: ignore[arg-type]
    assert chosen <= 140 // PASSES_PER_TURN + len(tenants)


def test_learners_can_keep_what_they_compute_amid_a_pass(serving: Callable[..., Engine]) -> None:
    engine, requests, modes = serving(), _requests()[:2], list[bool]()
    engine.add(requests[0])
    engine.step()
    _arriving(engine, requests[1:])
    commit = engine.host._commit_now

    def noted(result: StepResult) -> None:
        modes.append(torch.is_inference_mode_enabled())
        assert commit is not None
        commit(result)

    engine.host._commit_now = noted
    while engine.has_work:
        engine.step()
    assert modes == [False]


def test_a_request_of_one_token_ends_amid_a_pass(serving: Callable[..., Engine], plain: list[list[int]]) -> None:
    engine, requests = serving(), _requests()[:2]
    requests[1] = make_request("1", PROMPTS[1], SamplingParams(temperature=0.0, max_tokens=1), tenant="new")
    engine.add(requests[0])
    engine.step()
    delivered = _arriving(engine, requests[1:], at_call=4)
    while engine.has_work:
        engine.step()
    assert delivered == [requests[1:]]
    assert [request.output_ids for request in requests] == [plain[0], plain[1][:1]]
    assert not engine.target.cache.num_owned

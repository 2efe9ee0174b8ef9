"""Several passes of the target in flight: the same tokens, nothing lost, nothing left behind."""

import asyncio
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specinfer import LLM, AsyncLLM, SamplingParams
from specinfer.core.errors import EngineDeadError, WeightsError
from specinfer.core.request import FinishReason
from specinfer.core.rules import RULES
from specinfer.drafters import make_drafter
from specinfer.engine import timer
from specinfer.engine.engine import Engine
from specinfer.engine.recovery import MAX_FAILED_STEPS
from specinfer.engine.scheduler import Scheduler
from specinfer.model.kv_cache import KVCache
from specinfer.model.runner import ModelRunner
from tests.engine.delayed import Delayed
from tiny import VOCAB, make_engine, make_request, random_prompts, requests_of, resized, run

Runners = Callable[..., ModelRunner]
Fault = Callable[[int], BaseException | None]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
PROMPTS = random_prompts([3, 26, 12, 40, 7], seed=4)
PARAMS = [GREEDY, SamplingParams(max_tokens=14), GREEDY, SamplingParams(max_tokens=9, top_p=0.9), GREEDY]


_requests = requests_of(PROMPTS, PARAMS)


def _engine(
    runners: Runners,
    max_in_flight: int,
    fault: Fault = lambda _: None,
    *,
    num_slots: int = 600,
    rule: str = "coupled",
    guesses: bool = True,
    **limits: int,
) -> tuple[Engine, Delayed]:
    target = Delayed(resized(runners("llama"), num_slots), max_in_flight, fault)
    if not guesses:
        return make_engine(target, **limits), target
    small = resized(runners("llama", 0, 0.15), 600)
    drafter = make_drafter([small, "ngram"], VOCAB, ["small", "ngram"], RULES[rule].draft_samplings[0])
    return make_engine(target, drafter, (2, 1, 1), verification=rule, **limits), target


@pytest.fixture
def plain(runner_of: Runners) -> list[list[int]]:
    return run(make_engine(resized(runner_of("llama"), 600)), _requests())


def _left(engine: Engine) -> bool:
    return engine.has_work or engine.target.cache.num_owned > 0 or bool(engine.scheduler.turns.in_flight)


# -------------------------------------------------------------------------------------------- tokens


@pytest.mark.covering(1)
@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
@pytest.mark.parametrize("guesses", [False, True])
def test_the_same_tokens(max_in_flight: int, guesses: bool, runner_of: Runners, plain: list[list[int]]) -> None:
    engine, target = _engine(runner_of, max_in_flight, guesses=guesses, max_num_batched_tokens=16)
    requests = _requests()
    assert run(engine, requests) == plain
    assert max(target.numbers_in_flight) == max_in_flight
    assert not _left(engine)
    if guesses:
        assert sum(request.speculation.num_accepted_draft_tokens for request in requests) > 0


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "coupled"])
def test_seeded_requests_under_rules_that_use_random_numbers(rule: str, runner_of: Runners) -> None:
    wanted = run(_engine(runner_of, 1, rule=rule)[0], _requests())
    assert run(_engine(runner_of, 3, rule=rule)[0], _requests()) == wanted


def test_few_slots(runner_of: Runners, plain: list[list[int]]) -> None:
    num_preempted = 0
    for num_slots in range(56, 130, 6):
        engine, _ = _engine(runner_of, 2 + num_slots % 4 // 2, num_slots=num_slots, max_num_batched_tokens=24)
        assert run(engine, _requests()) == plain
        num_preempted += engine.metrics.num_preempted
        assert not _left(engine)
    assert num_preempted > 0


@pytest.mark.usefixtures("small_demo")
@pytest.mark.parametrize("max_in_flight", [2, 3])
def test_grammars_and_several_outputs(max_in_flight: int) -> None:
    params = [
        SamplingParams(max_tokens=20, temperature=1, seed=2, structured_outputs={"regex": "[0-9]{3}( [0-9]{3}){2}"}),
        SamplingParams(max_tokens=16, temperature=0.0, prompt_logprobs=0, logprobs=1),
        SamplingParams(max_tokens=16, seed=1, n=3, stop=["e "]),
    ]
    prompts = ["# numbers\n", "Once upon a time", "def main("]
    with LLM("demo", tree="2,1,1") as llm:
        wanted = llm.generate(prompts, params)
        llm.engine.host.target = target = Delayed(llm.target, max_in_flight)
        outputs = llm.generate(prompts, params)
        assert max(target.numbers_in_flight) == max_in_flight
    for output, want in zip(outputs, wanted, strict=True):
        assert [one.token_ids for one in output.outputs] == [one.token_ids for one in want.outputs]
        assert [one.finish_reason for one in output.outputs] == [one.finish_reason for one in want.outputs]
    assert outputs[1].prompt_logprobs is not None
    assert len(outputs[1].prompt_logprobs) == len(outputs[1].prompt_token_ids)


def test_passes_are_begun_until_all_stages_have_one(runner_of: Runners) -> None:
    engine, target = _engine(runner_of, 3, guesses=False)
    for request in _requests():
        engine.add(request)
    engine.step()
    assert target.log == ["begin 0", "begin 1", "begin 2", "end 0"]
    engine.step()
    assert target.log[4:] == ["begin 3", "end 1"]
    groups = [{span.request.request_id for span in in_flight_step.spans} for in_flight_step in engine.host._steps]
    assert sorted(map(len, groups)) == [1, 2], "five requests: two, two and one"
    assert not groups[0] & groups[1]
    while engine.has_work:
        engine.step()


# -------------------------------------------------------------------------------------------- aborts


@pytest.mark.parametrize("error", [None, "told to"])
def test_an_abort_at_any_moment(error: str | None, runner_of: Runners, plain: list[list[int]]) -> None:
    """Callers see the end at once; the slots that are still written to come back when the pass has ended."""
    seen_in_flight = 0
    for steps in range(18):
        engine, _ = _engine(runner_of, 2, max_num_seqs=4, max_num_batched_tokens=16)
        requests = _requests()
        for request in requests:
            engine.add(request)
        for _ in range(steps):
            engine.step()
        victim = requests[steps % len(requests)]
        was_finished, said = victim.is_finished, victim.output_ids
        is_in_flight = victim in engine.scheduler.turns.in_flight
        seen_in_flight += is_in_flight
        engine.abort(victim, error)
        assert victim.is_finished
        assert victim not in list(engine.scheduler.requests())
        if is_in_flight:
            assert len(engine.target.cache.reserved(victim.request_id))
        while engine.has_work:
            assert victim not in engine.step()
        assert victim.output_ids == said
        assert was_finished or victim.finish_reason in (FinishReason.ABORT, FinishReason.ERROR)
        for request, wanted in zip(requests, plain, strict=True):
            if request is not victim:
                assert request.output_ids == wanted
        assert not _left(engine)
    assert seen_in_flight > 3


def test_an_identity_may_be_used_again_while_its_last_pass_is_in_flight(
    runner_of: Runners, plain: list[list[int]]
) -> None:
    engine, _ = _engine(runner_of, 2)
    requests = _requests()
    for request in requests:
        engine.add(request)
    for _ in range(3):
        engine.step()
    victim = next(request for request in requests if request in engine.scheduler.turns.in_flight)
    engine.abort(victim)
    again = _requests()[requests.index(victim)]
    engine.add(again)
    while engine.has_work:
        engine.step()
    assert again.output_ids == plain[requests.index(victim)]


def test_when_nobody_waits_any_more_nothing_is_in_flight(runner_of: Runners, plain: list[list[int]]) -> None:
    engine, target = _engine(runner_of, 3)
    requests = _requests()
    for request in requests:
        engine.add(request)
    engine.step()
    assert engine.host.num_in_flight
    for request in requests:
        engine.abort(request)
    assert not _left(engine)
    assert run(engine, _requests()) == plain, "stages end what was forgotten first"
    assert len(target.log) > 3


# -------------------------------------------------------------------------------------------- faults


@pytest.mark.covering(1)
@pytest.mark.parametrize("max_in_flight", [2, 3])
@pytest.mark.parametrize("at", range(6))
def test_a_pass_that_fails_is_made_up_for(
    at: int, max_in_flight: int, runner_of: Runners, plain: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    engine, target = _engine(runner_of, max_in_flight, lambda number: ValueError("lost") if number == at else None)
    assert run(engine, _requests()) == plain
    assert "each is tried alone" in caplog.text
    begun = [int(line.split()[1]) for line in target.log if line.startswith("begin")]
    ends = [int(line.split()[1]) for line in target.log if line.startswith("end")]
    assert begun == ends == sorted(begun), "each pass ends once, in order"


def test_only_the_one_to_blame_ends(runner_of: Runners, plain: list[list[int]]) -> None:
    """A request whose passes always fail, whoever is with it."""
    engine, target = _engine(runner_of, 2)

    def fails(_: int) -> Exception | None:
        return ValueError("cannot") if target.ending & {*target.cache.reserved("2").tolist()} else None

    target.fault = fails
    requests = _requests()
    run(engine, requests)
    assert requests[2].finish_reason is FinishReason.ERROR
    assert [request.output_ids for i, request in enumerate(requests) if i != 2] == plain[:2] + plain[3:]
    assert not _left(engine)


def test_lost_weights_end_the_requests_of_their_pass_only(runner_of: Runners, plain: list[list[int]]) -> None:
    engine, _ = _engine(runner_of, 2, lambda number: WeightsError("weights: gone") if number == 3 else None)
    requests = _requests()
    run(engine, requests)
    failed = [request for request in requests if request.error]
    assert 0 < len(failed) < len(requests)
    assert all(request.error == "the engine failed on this request: weights: gone" for request in failed)
    for request, wanted in zip(requests, plain, strict=True):
        assert request in failed or request.output_ids == wanted
    assert not _left(engine)


def test_a_target_that_is_gone_ends_the_step_at_once(runner_of: Runners) -> None:
    engine, target = _engine(runner_of, 3, lambda number: EngineDeadError("rank 1 is gone") if number >= 2 else None)
    requests = _requests()
    with pytest.raises(EngineDeadError, match="rank 1"):
        run(engine, requests)
    assert target.log[-1] == "end 2", "nothing is tried again"
    assert not engine.host.num_in_flight
    for request in requests:
        engine.abort(request, "the engine failed")
    assert not _left(engine)


def test_a_target_that_always_fails_is_at_fault_itself(runner_of: Runners) -> None:
    engine, _ = _engine(runner_of, 2, lambda _: ValueError("always"), max_num_seqs=4)
    requests = [make_request(str(i), [1, 2, 3], GREEDY) for i in range(20)]
    with pytest.raises(RuntimeError, match=f"{MAX_FAILED_STEPS} steps in a row failed for every request"):
        run(engine, requests)
    for request in requests:
        engine.abort(request)
    assert not _left(engine)


def test_failed_steps_count_only_if_they_follow_each_other(runner_of: Runners) -> None:
    engine, target = _engine(runner_of, 1)
    for fails in [*[True] * (MAX_FAILED_STEPS - 1), False] * 3:
        target.fault = (lambda _: ValueError("now and then")) if fails else (lambda _: None)
        (request,) = requests = [make_request("0", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=1))]
        run(engine, requests)
        assert (request.finish_reason is FinishReason.ERROR) == fails
    assert not _left(engine)


@pytest.mark.parametrize("at", [0, 1, 2, 5])
def test_an_interrupt_leaves_nothing_half_done(at: int, runner_of: Runners, plain: list[list[int]]) -> None:
    engine, _ = _engine(runner_of, 2, lambda number: KeyboardInterrupt() if number == at else None)
    requests = _requests()
    with pytest.raises(KeyboardInterrupt):
        run(engine, requests)
    assert not engine.host.num_in_flight
    while engine.has_work:
        engine.step()
    assert [request.output_ids for request in requests] == plain


def test_a_pass_that_cannot_be_begun_fails_when_it_is_its_turn(
    runner_of: Runners, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, target = _engine(runner_of, 2)
    begin, calls = target.begin, iter(range(1000))

    def refuses(pieces: Any) -> Any:
        if next(calls) == 3:
            raise ValueError("cannot be sent")
        return begin(pieces)

    monkeypatch.setattr(target, "begin", refuses)
    assert run(engine, _requests()) == plain
    assert not _left(engine)


# --------------------------------------------------------------------------------------------- turns


@given(
    outputs=st.lists(st.integers(1, 12), min_size=1, max_size=9),
    num_groups=st.integers(1, 4),
    num_slots=st.integers(45, 120),
)
def test_everybody_gets_turns(outputs: list[int], num_groups: int, num_slots: int) -> None:
    """Of those that run, nobody is left out for more than two rounds."""
    cache = KVCache(num_slots)
    scheduler = Scheduler(cache, 6, 20)
    requests = [make_request(str(i), range(3 + 2 * i), SamplingParams(max_tokens=n)) for i, n in enumerate(outputs)]
    for request in requests:
        scheduler.add(request)
    in_flight_steps: list[Any] = []
    left_out: dict[str, int] = {}  # passes that began without it, of those that run
    for _ in range(2000):
        if not list(scheduler.requests()):
            break
        while len(in_flight_steps) < num_groups:
            schedule = scheduler.schedule(num_groups)
            for request in schedule.preempted:
                left_out.pop(request.request_id, None)
            if not schedule.spans:
                break
            assert len(schedule.spans) <= -(-len(scheduler.running) // num_groups)
            for span in schedule.spans:
                cache.reserve(span.request.request_id, span.end - span.start)
            scheduler.mark_in_flight(schedule.spans)
            begun = {span.request for span in schedule.spans}
            for request in scheduler.running:
                count = 0 if request in begun else left_out.get(request.request_id, 0) + 1
                left_out[request.request_id] = count
                assert count <= 2 * num_groups
            in_flight_steps.append(schedule.spans)
        assert in_flight_steps
        spans = in_flight_steps.pop(0)
        scheduler.release(spans)
        for span in spans:
            request, says = span.request, span.produces_token
            cache.commit(request.request_id, range(span.end - span.start))
            request.num_computed = span.end
            if says:
                request.append(1, None)
            if request.is_finished:
                scheduler.remove(request)
    assert all(request.num_output == n for request, n in zip(requests, outputs, strict=True))
    assert cache.num_free == num_slots


@given(num_slots=st.integers(25, 120), num_waiting=st.integers(0, 2), num_passes=st.integers(1, 3))
def test_drafts_leave_slots_for_requests_outside_the_pass(num_slots: int, num_waiting: int, num_passes: int) -> None:
    cache = KVCache(num_slots)
    scheduler = Scheduler(cache, 6, 500)
    for i in range(4):
        scheduler.add(make_request(str(i), range(5), GREEDY))
    schedule = scheduler.schedule(2)
    for i in range(num_waiting):
        scheduler.add(make_request(f"w{i}", range(20), GREEDY))
    room = scheduler.num_draft_slots(schedule.spans, num_passes)
    for span in schedule.spans:
        cache.reserve(span.request.request_id, 5)
    scheduler.mark_in_flight(schedule.spans)
    cache.reserve(schedule.spans[0].request.request_id, room)
    assert cache.num_available >= 10 or not room, "two others read five tokens each"
    if num_passes == 1 and not num_waiting:
        assert room == num_slots - 20, "and nothing is left unused"
    if num_waiting and num_slots >= 10 + 10 + 2 + 20:
        scheduler._admit()
        assert len(scheduler.running) > 4


# --------------------------------------------------------------------------------------------- times


def test_what_a_pass_costs_is_counted_once(runner_of: Runners, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its begin or the end of the pass before it, whichever is later, to its end."""
    now = [0.0]
    monkeypatch.setattr(timer, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def ends(number: int) -> None:
        now[0] = 10.0 * (number + 1)  # two stages: a pass takes 20, and one ends every 10
        return

    engine, target = _engine(runner_of, 2, ends, guesses=False)
    begin = target.begin

    def begins(pieces: Any) -> Any:
        now[0] += 1.0
        return begin(pieces)

    monkeypatch.setattr(target, "begin", begins)
    run(engine, [make_request(str(i), [1, 2, 3], GREEDY) for i in range(2)])
    times = [record.target_time for record in engine.metrics.recent]
    assert times[:6] == [10.0] * 6
    assert math.isclose(sum(times), now[0])


# ------------------------------------------------------------------------------------------- threads


@pytest.mark.usefixtures("small_demo")
def test_callers_that_leave_while_their_passes_are_in_flight() -> None:
    """In the engine's thread: the others' outputs are the same, and nothing is in flight in the end."""
    params = [SamplingParams(max_tokens=24, seed=i) for i in range(4)]
    prompts = ["the story", "once upon", "def f(", "and so"]
    with LLM("demo", tree="2,1") as llm:
        wanted = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        llm.engine.host.target = Delayed(llm.target, 2)

        async def serve() -> list[Any]:
            async with AsyncLLM(llm) as engine:
                leaving = await engine.submit("left alone", SamplingParams(max_tokens=500, ignore_eos=True))
                asked = [asyncio.create_task(engine.complete(*both)) for both in zip(prompts, params, strict=True)]
                async for _chunk in leaving:
                    break
                leaving.close()
                outputs = await asyncio.gather(*asked)
                last = await engine.submit("left too", SamplingParams(max_tokens=500, ignore_eos=True))
                async for _chunk in last:
                    break
                return [output.outputs[0].token_ids for output in outputs]

        assert asyncio.run(serve()) == wanted
        assert not _left(llm.engine)

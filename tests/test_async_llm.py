"""Many callers of one engine: the same outputs as alone, refusals, cancelling, deadlines, faults, the end."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from specinfer import (
    LLM,
    AsyncLLM,
    EngineArgs,
    EngineDeadError,
    QueueFullError,
    QueueLimits,
    RequestError,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from specinfer.core.limits import TenantLimits
from specinfer.core.outputs import TextChunk
from specinfer.quotas import Quotas

T = TypeVar("T")
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
LONG = SamplingParams(max_tokens=180, ignore_eos=True, seed=3)
PROMPTS = ["the", "and of the story, that", "was it", "the story of the", "x"]
DELTA = RequestOutputKind.DELTA
FAILING = pytest.mark.filterwarnings("ignore:request .* failed:RuntimeWarning")


@pytest.fixture
def llm(model_folder: Callable[..., Path]) -> LLM:
    drafter = str(model_folder("llama", 0, 0.15, tokenizer=True))
    return LLM(model_folder("llama", tokenizer=True), drafters=[drafter, "ngram"], tree="2,1,1", max_num_seqs=4)


def serve(llm: LLM, use: Callable[[AsyncLLM], Awaitable[T]], limits: QueueLimits | None = None) -> T:
    """What `use` returns; the engine must end in order and leave nothing behind."""

    async def main() -> T:
        async with AsyncLLM(llm, limits) as engine:
            result = await asyncio.wait_for(use(engine), 60)
        assert not [thread for thread in threading.enumerate() if thread.name == "specinfer-engine"]
        return result

    return asyncio.run(main())


async def _until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("what should happen does not")


async def _read(chunks: AsyncIterator[TextChunk]) -> list[TextChunk]:
    return [chunk async for chunk in chunks]


def test_an_engine_that_loaded_its_models_ends_them_too(model_folder: Callable[..., Path]) -> None:
    """Threads that read weights, and other ranks, which would keep their GPUs. A caller ends its models itself."""
    folder = str(model_folder("llama", tokenizer=True))
    args = EngineArgs(folder, drafters=["ngram"], max_num_seqs=2, offload="disk")

    def readers() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("weights-")]

    async def main() -> None:
        async with AsyncLLM.from_engine_args(args) as engine:
            assert (await engine.complete("the", GREEDY)).outputs[0].text
            assert readers()
        assert not readers()
        await engine.shutdown()  # a second time does nothing

    asyncio.run(main())
    with LLM.from_engine_args(args) as llm:
        serve(llm, lambda engine: engine.complete("the", GREEDY))
        assert readers()
        assert llm.generate("the", GREEDY)[0].outputs[0].text
    assert not readers()


# ----------------------------------------------------------------------------------------- outputs


def test_together_as_alone(llm: LLM) -> None:
    params = [GREEDY if i % 2 else SamplingParams(max_tokens=20, seed=i) for i in range(len(PROMPTS))]
    wanted = [output.outputs[0] for output in llm.generate(PROMPTS, params)]

    async def use(engine: AsyncLLM) -> list[Any]:
        asked = [engine.complete(prompt, each) for prompt, each in zip(PROMPTS, params, strict=True)]
        return [output.outputs[0] for output in await asyncio.gather(*asked)]

    for got, want in zip(serve(llm, use), wanted, strict=True):
        assert (got.token_ids, got.text, got.finish_reason) == (want.token_ids, want.text, want.finish_reason)


def test_the_first_call_starts_the_engine(llm: LLM) -> None:
    async def main() -> AsyncLLM:
        engine = AsyncLLM(llm)
        assert (await asyncio.wait_for(engine.complete("the", GREEDY), 10)).outputs
        async with engine:
            assert (await engine.complete("the", GREEDY)).outputs
            return engine

    engine = asyncio.run(main())
    assert engine.has_stopped
    with pytest.raises(EngineDeadError):
        asyncio.run(engine.complete("the", GREEDY))


def test_a_call_from_another_event_loop_is_refused_at_once(llm: LLM) -> None:
    engine = AsyncLLM(llm)
    asyncio.run(engine.complete("the", GREEDY))

    async def main() -> None:
        with pytest.raises(EngineDeadError, match="started in another event loop; make an AsyncLLM in each"):
            await asyncio.wait_for(engine.complete("the", GREEDY), 10)
        assert await engine.shutdown()

    asyncio.run(main())


def test_parameters_of_another_kind_are_refused(llm: LLM) -> None:
    async def use(engine: AsyncLLM) -> None:
        with pytest.raises(ValueError, match=r"^sampling_params: give a SamplingParams, not {'temperature': 0}"):
            await engine.complete("the", {"temperature": 0})  # type: ignore[arg-type]

    serve(llm, use)
    with pytest.raises(ValueError, match=r"^sampling_params: give a SamplingParams, not {'temperature': 0}"):
        llm.stream("the", {"temperature": 0})  # type: ignore[arg-type]


def _shown(output: RequestOutput, index: int) -> Any:
    return next((completion for completion in output.outputs if completion.index == index), None)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("kind", RequestOutputKind)
def test_outputs_grow_as_output_kind_says(llm: LLM, kind: RequestOutputKind, n: int) -> None:
    params = SamplingParams(max_tokens=30, seed=5, n=n, logprobs=2, prompt_logprobs=1, stop=["zq"], output_kind=kind)
    (wanted,) = llm.generate("the story", params)

    async def use(engine: AsyncLLM) -> list[RequestOutput]:
        return [output async for output in engine.generate("the story", params, "mine")]

    *growing, last = yielded = serve(llm, use)
    assert {output.request_id for output in yielded} == {"mine"}
    assert [output.finished for output in yielded] == [False] * len(growing) + [True]
    assert bool(growing) is (kind is not RequestOutputKind.FINAL_ONLY)
    for output in yielded:
        assert (output.prompt, output.prompt_token_ids) == ("the story", wanted.prompt_token_ids)
        assert output.prompt_logprobs == wanted.prompt_logprobs
    for i, whole in enumerate(wanted.outputs):
        parts = [part for output in yielded if (part := _shown(output, i)) is not None]
        if kind is RequestOutputKind.DELTA:
            assert "".join(part.text for part in parts) == whole.text
            assert [token for part in parts for token in part.token_ids] == whole.token_ids
            assert [best for part in parts for best in part.logprobs or []] == whole.logprobs
        else:
            assert replace(parts[-1], token_origins=[]) == replace(whole, token_origins=[])
            assert all(whole.text.startswith(part.text) for part in parts)
            assert all(part.token_ids == whole.token_ids[: len(part.token_ids)] for part in parts)
            assert len(last.outputs) == n
        assert parts[-1].cumulative_logprob == pytest.approx(whole.cumulative_logprob)
        assert parts[-1].finish_reason == whole.finish_reason
    assert last.metrics.speculative_decoding["num_draft_tokens"]


def test_leaving_the_loop_over_outputs_ends_the_request(llm: LLM) -> None:
    async def use(engine: AsyncLLM) -> None:
        async for output in engine.generate("the", LONG):
            assert not output.finished
            break
        await _until(lambda: not llm.engine.has_work and not engine.num_live)

    serve(llm, use)


def test_a_request_is_aborted_by_its_name(llm: LLM) -> None:
    async def use(engine: AsyncLLM) -> None:
        async def last(name: str) -> RequestOutput:
            return [output async for output in engine.generate("the", LONG, name)][-1]

        running = [asyncio.create_task(last(name)) for name in "abc"]
        await _until(lambda: engine.num_running == 3)
        await engine.abort("nobody")
        await engine.abort(["a", "b"])
        outputs = await asyncio.gather(*running)
        assert [output.request_id for output in outputs] == ["a", "b", "c"]
        assert [output.outputs[0].finish_reason for output in outputs] == ["abort", "abort", "length"]
        assert all(output.finished for output in outputs)

    serve(llm, use)


@FAILING
def test_an_output_that_fails_ends_the_loop_with_its_error(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(engine: AsyncLLM) -> None:
        monkeypatch.setattr(llm.target, "forward", _always_failing)
        (output,) = [output async for output in engine.generate("the", replace(GREEDY, output_kind=DELTA))]
        assert output.finished
        assert output.outputs == []
        assert output.error is not None

    serve(llm, use)


@pytest.mark.parametrize("n", [1, 3])
def test_chunks_add_up(llm: LLM, n: int) -> None:
    params = SamplingParams(max_tokens=30, seed=5, n=n, logprobs=2, stop=["zq"])

    async def use(engine: AsyncLLM) -> tuple[list[TextChunk], Any]:
        generation = await engine.submit("the story", params)
        return await _read(generation.__aiter__()), generation.output()

    chunks, output = serve(llm, use)
    for i, done in enumerate(output.outputs):
        mine = [chunk for chunk in chunks if chunk.index == i]
        assert "".join(chunk.text for chunk in mine) == done.text
        assert [token for chunk in mine for token in chunk.token_ids] == done.token_ids
        assert [best for chunk in mine for best in chunk.logprobs or []] == done.logprobs
        assert [origin for chunk in mine for origin in chunk.origins] == done.token_origins
        assert [chunk.finish_reason for chunk in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].finish_reason == done.finish_reason


def test_a_slow_reader_gets_everything(llm: LLM) -> None:
    async def use(engine: AsyncLLM) -> tuple[list[TextChunk], Any]:
        generation = await engine.submit("the", LONG)
        await _until(lambda: generation.has_ended)
        return await _read(generation.__aiter__()), generation.output()

    chunks, output = serve(llm, use)
    assert sum(len(chunk.token_ids) for chunk in chunks) == len(output.outputs[0].token_ids) == 180
    assert len(chunks) == 1, "what was not read yet is joined"


@pytest.mark.parametrize("is_held_back", [False, True])
def test_steps_of_a_traced_request(llm: LLM, is_held_back: bool) -> None:
    text = llm.generate("the story", GREEDY)[0].outputs[0].text
    params = replace(GREEDY, stop=[text[:-1] + "\0"] if is_held_back else [])

    async def use(engine: AsyncLLM) -> tuple[list[TextChunk], Any, Any]:
        traced = await engine.submit("the story", params, trace=True)
        untraced = await engine.submit("the", GREEDY)
        chunks = await _read(traced.__aiter__())
        assert not any(chunk.steps for chunk in await _read(untraced.__aiter__()))
        return chunks, traced.output(), traced.requests[0]

    chunks, output, request = serve(llm, use)
    steps = [step for chunk in chunks for step in chunk.steps]
    said: list[int] = []
    for step in steps:
        assert step.position == len(request.prompt_ids) + len(said) - 1
        assert step.root == [*request.prompt_ids, *said][step.position]
        assert [i + 1 for i, node in enumerate(step.nodes) if node.accepted] == sorted(step.path)
        assert all(0 <= node.p <= 1 and 0 <= node.q <= 1 and node.drafters for node in step.nodes)
        said += [step.nodes[place - 1].token for place in step.path]
        said += [] if step.next_token is None else [step.next_token]
    assert said == output.outputs[0].token_ids
    assert request.trace == [], "what was told is not kept"
    assert output.metrics.speculative_decoding["num_draft_tokens"] == sum(len(step.nodes) for step in steps)


# ------------------------------------------------------------------------------------ refusals


def test_what_cannot_be_served_is_refused_before_it_starts(llm: LLM) -> None:
    async def use(engine: AsyncLLM) -> None:
        endless = SamplingParams(max_tokens=None, min_tokens=10**6)
        for prompt, params in (("", GREEDY), ([10**9], GREEDY), ("the", endless)):
            with pytest.raises(RequestError):
                await engine.submit(prompt, params)
        assert engine.num_live == 0
        assert (await engine.complete("the", GREEDY)).outputs[0].finish_reason is not None

    serve(llm, use)


def test_a_full_queue_refuses_and_recovers(llm: LLM) -> None:
    async def use(engine: AsyncLLM) -> None:
        held = [await engine.submit("the", LONG) for _ in range(6)]
        with pytest.raises(QueueFullError):
            await engine.submit("the", GREEDY)
        with pytest.raises(QueueFullError):
            await engine.submit("the", SamplingParams(n=3))
        held[0].close()
        await _until(lambda: engine.num_live == 5)
        assert (await engine.complete("the", GREEDY)).outputs[0].finish_reason is not None
        for generation in held:
            generation.close()

    serve(llm, use, QueueLimits(max_num_queued_reqs=2))


def test_a_tenant_that_fills_the_queue_leaves_places_to_the_others(llm: LLM) -> None:
    async def use(engine: AsyncLLM) -> None:
        engine.put_quotas(Quotas(dict.fromkeys(("greedy", "modest", "late"), TenantLimits())))
        many = replace(LONG, n=8)
        running = [await engine.submit("the", many, tenant="greedy")]
        with pytest.raises(QueueFullError):
            await engine.submit("the", replace(LONG, n=3), tenant="greedy")
        running.append(await engine.submit("the", replace(LONG, n=2), tenant="greedy"))
        with pytest.raises(QueueFullError):
            await engine.submit("the", LONG, tenant="greedy")
        for tenant in ("modest", "late"):
            running.append(await engine.submit("the", LONG, tenant=tenant))
            with pytest.raises(QueueFullError):
                await engine.submit("the", LONG, tenant=tenant)
        for generation in running:
            generation.close()
        await _until(lambda: engine.num_live == 0)

    serve(llm, use, QueueLimits(max_num_queued_reqs=8))  # and 4 may run: 12 in all, of which each tenant keeps one


def test_a_queue_of_tokens_refuses(llm: LLM) -> None:
    async def use(engine: AsyncLLM) -> None:
        running = [await engine.submit("the", LONG) for _ in range(4)]
        await _until(lambda: engine.num_running == 4)
        waiting = await engine.submit([5] * 60, LONG)
        with pytest.raises(QueueFullError):
            await engine.submit([5] * 60, GREEDY)
        for generation in (*running, waiting):
            generation.close()

    serve(llm, use, QueueLimits(max_num_queued_tokens=100))


# --------------------------------------------------------------------------------------- leaving


@pytest.mark.parametrize("num_before", [0, 6])  # six: it still waits
def test_leaving_ends_the_requests(llm: LLM, num_before: int) -> None:
    async def use(engine: AsyncLLM) -> None:
        before = [await engine.submit("the", LONG) for _ in range(num_before)]
        generation = await engine.submit("the story", SamplingParams(n=2, max_tokens=180, ignore_eos=True))
        if not num_before:
            async for _ in generation:
                break
        generation.close()
        await _until(lambda: all(request.is_finished for request in generation.requests))
        for earlier in before:
            earlier.close()
        await _until(lambda: not llm.engine.has_work and not engine.num_live)

    serve(llm, use)
    assert llm.target.cache.num_owned == 0


def test_a_cancelled_call_ends_its_request(llm: LLM) -> None:
    async def use(engine: AsyncLLM) -> None:
        task = asyncio.create_task(engine.complete("the", LONG))
        await _until(lambda: engine.num_running == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await _until(lambda: not llm.engine.has_work)

    serve(llm, use)


def test_neighbours_of_one_that_leaves_generate_the_same_tokens(llm: LLM) -> None:
    wanted = llm.generate("the story of", GREEDY)[0].outputs[0].token_ids

    async def use(engine: AsyncLLM) -> list[int]:
        leaving = [await engine.submit(prompt, LONG) for prompt in PROMPTS[:3]]
        staying = asyncio.create_task(engine.complete("the story of", GREEDY))
        for generation in leaving:
            await asyncio.sleep(0.003)
            generation.close()
        return (await staying).outputs[0].token_ids

    assert serve(llm, use) == wanted


def test_a_deadline_ends_with_an_error(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step = llm.engine.step
    monkeypatch.setattr(llm.engine, "step", lambda: (time.sleep(0.02), step())[1])

    async def use(engine: AsyncLLM) -> Any:
        return await (await engine.submit("the", LONG, timeout=0.1)).finish()

    with pytest.warns(RuntimeWarning, match="request .* failed: .*longer"):
        output = serve(llm, use)
    assert output.outputs == []
    assert "longer" in output.error


# ----------------------------------------------------------------------------------------- faults


@FAILING
def test_a_broken_request_ends_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its text cannot be decoded, its pass fails, its verification fails: others say what they say without it."""
    wanted = llm.generate(PROMPTS[:3], GREEDY)
    forward, verify = llm.target.forward, llm.engine.host._verify

    async def use(engine: AsyncLLM) -> list[Any]:
        broken = await engine.submit("nothing like the others", LONG)
        name = broken.requests[0].request_id

        def failing(pieces: Sequence[Any]) -> Any:
            first = llm.target.cache.slots(name)[:1].tolist()
            if mode == "pass" and first and any(piece.prefix_slots[:1].tolist() == first for piece in pieces):
                raise RuntimeError("this row is bad")
            return forward(pieces)

        def refusing(saying: Any, logits: Any) -> Any:
            if mode == "verify" and any(span.request is broken.requests[0] for span, _ in saying):
                raise IndexError("this tree is bad")
            return verify(saying, logits)

        monkeypatch.setattr(llm.target, "forward", failing)
        monkeypatch.setattr(llm.engine.host, "_verify", refusing)
        others = [asyncio.create_task(engine.complete(prompt, GREEDY)) for prompt in PROMPTS[:3]]
        if mode == "text":
            buffer = broken.requests[0].text
            assert buffer is not None
            monkeypatch.setattr(type(buffer), "push", _break(buffer, type(buffer).push))
        if mode == "decoding":
            monkeypatch.setattr(broken.requests[0].text, "_decode", _undecodable)
        outputs = await asyncio.gather(*others)
        failed = await broken.finish()
        assert failed.outputs == []
        assert failed.error is not None
        assert "Error" in failed.error
        assert not engine.num_live
        assert broken.requests[0] not in llm.engine.scheduler.running
        return outputs

    for mode in ("pass", "verify", "text", "decoding"):
        outputs = serve(llm, use)
        monkeypatch.undo()
        assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in wanted], mode


def _undecodable(*_: Any) -> str:
    raise TypeError("no such token")


def _break(buffer: Any, push: Callable[..., Any]) -> Callable[..., Any]:
    def broken(self: Any, token: int, **options: Any) -> Any:
        if self is buffer:
            raise KeyError("no such token")
        return push(self, token, **options)

    return broken


def test_an_observer_of_ends_that_fails_harms_nobody(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    def failing(_: Any) -> None:
        raise RuntimeError("no more room for numbers")

    async def use(engine: AsyncLLM) -> list[Any]:
        told: list[Any] = []
        engine.on_end += [failing, told.append]
        outputs = await asyncio.gather(*(engine.complete(prompt, GREEDY) for prompt in PROMPTS))
        assert len(told) == len(outputs)
        return outputs

    outputs = serve(llm, use)
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
    assert "no more room for numbers" in caplog.text


def test_an_observer_of_steps_that_fails_harms_nobody(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    class Failing:
        def on_tokens(self, *_: Any) -> None:
            raise RuntimeError("no more room for trees")

        on_step = on_tokens

    wanted = llm.generate(PROMPTS, GREEDY)
    llm.engine.observers.append(Failing())

    async def use(engine: AsyncLLM) -> list[Any]:
        outputs = await asyncio.gather(*(engine.complete(prompt, GREEDY) for prompt in PROMPTS))
        await engine.check_health()
        return outputs

    outputs = serve(llm, use)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in wanted]
    assert "no more room for trees" in caplog.text


def test_limits_out_of_range_are_named() -> None:
    for limits in ({"max_num_queued_reqs": -1}, {"max_num_queued_tokens": 0}, {"queue_timeout": 0.0}):
        with pytest.raises(ValueError, match=next(iter(limits))):
            QueueLimits(**limits)  # type: ignore[arg-type]


@FAILING
def test_an_engine_that_fails_as_a_whole_ends_every_stream(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("the device is gone")

    async def use(engine: AsyncLLM) -> None:
        generations = [await engine.submit(prompt, LONG) for prompt in PROMPTS]
        await _until(lambda: engine.num_running > 0)
        await engine.check_health()
        monkeypatch.setattr(llm.engine.scheduler, "schedule", broken)
        outputs = await asyncio.gather(*(generation.finish() for generation in generations))
        assert all(output.error is not None and not output.outputs for output in outputs)
        with pytest.raises(EngineDeadError):
            await engine.check_health()
        with pytest.raises(EngineDeadError):
            await engine.submit("the", GREEDY)
        assert engine.num_live == 0

    serve(llm, use)


@FAILING
def test_an_engine_that_fails_on_what_it_is_asked_ends_what_was_asked_after(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepping, go_on, step = threading.Event(), threading.Event(), llm.engine.step

    def waiting() -> Any:
        stepping.set()
        go_on.wait(30)
        return step()

    def broken(*_: Any) -> Any:
        monkeypatch.undo()
        raise RuntimeError("a drafter cannot forget")

    async def use(engine: AsyncLLM) -> None:
        monkeypatch.setattr(llm.engine, "step", waiting)
        monkeypatch.setattr(llm.engine, "abort", broken)
        left = await engine.submit("the", LONG)
        await _until(stepping.is_set)
        left.close()
        after = await engine.submit("x", GREEDY)
        go_on.set()
        output = await asyncio.wait_for(after.finish(), 20)
        assert output.outputs == []
        assert engine.has_failed

    serve(llm, use)


@FAILING
def test_passes_that_always_fail_are_the_engines_fault(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(engine: AsyncLLM) -> None:
        monkeypatch.setattr(llm.target, "forward", _always_failing)
        for _ in range(3):
            output = await engine.complete("the", GREEDY)
            assert output.outputs == []
        await _until(lambda: engine.has_failed)
        with pytest.raises(EngineDeadError):
            await engine.complete("the", GREEDY)

    serve(llm, use)


def _always_failing(pieces: Any) -> Any:
    raise RuntimeError("out of memory")


def test_a_step_that_hangs_shows(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    step = llm.engine.step

    def hanging() -> Any:
        release.wait(20)
        return step()

    async def use(engine: AsyncLLM) -> None:
        monkeypatch.setattr(llm.engine, "step", hanging)
        generation = await engine.submit("the", GREEDY)
        await asyncio.sleep(0.2)
        with pytest.raises(EngineDeadError, match="going on"):
            await engine.check_health()
        release.set()
        await generation.finish()
        await engine.check_health()

    serve(llm, use, QueueLimits(max_step_seconds=0.1))


# -------------------------------------------------------------------------------------- the end


def test_draining_lets_what_runs_end(llm: LLM) -> None:
    async def use(engine: AsyncLLM) -> None:
        assert await engine.drain(0.0)
        with pytest.raises(EngineDeadError, match="shutting down"):
            await engine.submit("the", GREEDY)

    serve(llm, use)

    async def busy(engine: AsyncLLM) -> None:
        running = [asyncio.create_task(engine.complete(prompt, LONG)) for prompt in PROMPTS]
        await _until(lambda: engine.num_live == 5)
        assert not await engine.drain(0.0)
        assert await engine.drain(30.0)
        assert {(await task).outputs[0].finish_reason for task in running} == {"length"}

    serve(llm, busy)  # an LLM may be served again


def test_draining_waits_for_a_prompt_that_is_just_being_read(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    may_read, job = threading.Event(), llm.jobs.read

    def slowly(*args: Any) -> Any:
        may_read.wait(30)
        return job(*args)

    async def use(engine: AsyncLLM) -> None:
        monkeypatch.setattr(llm.jobs, "read", slowly)
        asked = asyncio.create_task(engine.complete("the", LONG))
        await _until(lambda: engine.num_live == 1)
        drained = asyncio.create_task(engine.drain(30.0))
        await asyncio.sleep(0.01)
        may_read.set()
        assert await drained
        assert (await asked).outputs[0].finish_reason == "length"

    serve(llm, use)


def test_what_is_to_be_read_after_the_end_is_refused(llm: LLM) -> None:
    async def use(engine: AsyncLLM) -> None:
        await engine.shutdown()
        with pytest.raises(EngineDeadError, match="ended"):
            await engine.read(lambda: None)

    serve(llm, use)


@FAILING
def test_shutting_down_ends_the_rest_with_an_error(llm: LLM) -> None:
    async def use(engine: AsyncLLM) -> None:
        running = [asyncio.create_task(engine.complete(prompt, LONG)) for prompt in PROMPTS]
        await _until(lambda: len(engine.admission.generations) == 5)  # all have been read
        assert await engine.shutdown()
        assert not any([(await task).outputs for task in running])

    serve(llm, use)


def test_tasks_and_books_after_many_come_and_go(llm: LLM) -> None:
    async def use(engine: AsyncLLM) -> None:
        for i in range(60):
            generation = await engine.submit(PROMPTS[i % 5], LONG if i % 3 else GREEDY)
            if i % 3:
                await asyncio.sleep(0.001 * (i % 7))
                generation.close()
            else:
                await generation.finish()
        await _until(lambda: not llm.engine.has_work)
        await asyncio.sleep(0.05)
        assert not engine.admission.generations
        assert len(asyncio.all_tasks()) <= 2

    serve(llm, use)


def test_a_name_in_place_of_a_model_is_loaded() -> None:
    async def use() -> RequestOutput:
        async with AsyncLLM("demo") as engine:
            return await engine.complete("def f(x):", SamplingParams(max_tokens=3))

    assert len(asyncio.run(use()).outputs[0].token_ids) == 3

"""Streams and disconnects: what is sent when, and that nothing goes on once nobody reads."""

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serving import Caller, Server, app_of, events_of, slow_steps
from specinfer import LLM, AsyncLLM, SamplingParams
from specinfer.core.request import Fault
from specinfer.engine.engine import Engine
from specinfer.server import pending_response
from specinfer.server.dialects import to_json
from specinfer.server.errors import ApiError
from specinfer.server.generations import chunks_of, failure
from specinfer.server.stream import EventStream, lines_of
from tiny import make_request

PATHS = {"/v1/completions": {"prompt": "the"}, "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]}}


@pytest.fixture(scope="module")
def llm(model_folder: Callable[..., Path]) -> LLM:
    folder = model_folder("llama", tokenizer=True)
    loaded = LLM(folder, drafters=["ngram"], tree="1,1", max_num_seqs=2, max_num_batched_tokens=16)
    loaded.reader.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return loaded


async def lines(events: list[Any]) -> list[bytes]:
    async def made() -> AsyncIterator[Mapping[str, Any] | None]:
        for event in events:
            if isinstance(event, Exception):
                raise event
            yield event

    return [line async for line in lines_of(made())]


def test_events_are_lines_of_ascii_and_end_with_done() -> None:
    told = asyncio.run(lines([{"text": "\u2028\n\u20ac"}, None]))
    assert told == [b'data: {"text":"\\u2028\\n\\u20ac"}\n\n', b": ping\n\n", b"data: [DONE]\n\n"]
    with pytest.raises(ValueError, match="JSON"):
        to_json(float("nan"))


@pytest.mark.parametrize(
    ("error", "code"), [(ApiError("loading", "gone"), "loading"), (KeyError("secret"), "internal_error")]
)
def test_a_failure_is_the_last_event(error: Exception, code: str) -> None:
    _, second, last = asyncio.run(lines([{"a": 1}, error]))
    assert json.loads(second.removeprefix(b"data: "))["error"]["code"] == code
    assert b"secret" not in second
    assert last == b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        (Fault.STOPPED, 503),
        (Fault.BROKEN, 500),
        (Fault.LATE_END, 504),
        (Fault.LATE_START, 429),
        (Fault.NO_VALID_TOKEN, 400),
    ],
)
def test_what_a_failed_request_is_answered_with(fault: Fault, status: int) -> None:
    told = failure(make_request("a", [1], error="grammar: what is wrong", fault=fault))
    assert (told.status, told.message) == (status, "grammar: what is wrong")
    assert failure(None).status == 503


def test_a_stream_that_never_began_is_closed() -> None:
    closed: list[bool] = []

    async def events() -> AsyncGenerator[None]:
        yield None
        raise AssertionError("nobody asks for events")

    async def run() -> None:
        async def receive() -> dict[str, str]:
            return {"type": "http.disconnect"}

        async def send(_: Any) -> None:
            await asyncio.sleep(5)

        await EventStream(events(), lambda: closed.append(True))({"type": "http"}, receive, send)

    asyncio.run(run())
    assert closed == [True]


def test_a_client_whose_socket_breaks_is_no_fault() -> None:
    closed: list[bool] = []
    made, sent = list[int](), list[str]()

    async def events() -> AsyncGenerator[Mapping[str, Any]]:
        for number in range(9):
            made.append(number)
            yield {"a": number}

    async def run() -> None:
        async def receive() -> dict[str, str]:
            await asyncio.sleep(5)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message["type"])
            if message["type"] == "http.response.body":
                raise OSError("broken pipe")

        await EventStream(events(), lambda: closed.append(True))({"type": "http"}, receive, send)

    asyncio.run(run())
    assert closed == [True]
    assert made == [0], "no more events are made for it"
    assert sent == ["http.response.start", "http.response.body"], "and none is sent"


@pytest.mark.parametrize(("path", "body"), PATHS.items())
def test_a_stream_tells_how_far_the_prompt_is_read_if_asked(
    path: str, body: dict[str, Any], llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_steps(monkeypatch, 0.02)
    monkeypatch.setattr(pending_response, "_PROGRESS_SECONDS", 0.03)
    llm.engine.observers.clear()
    text = " ".join("the a of" for _ in range(30))
    prompt = {"prompt": text} if "prompt" in body else {"messages": [{"role": "user", "content": text}]}
    fields = prompt | {"max_tokens": 4, "temperature": 0, "stream": True, "ignore_eos": True}

    with Server(llm) as server:
        server.state.config = replace(server.state.config, ping_seconds=0)
        asked, plain = [server.post(path, json=fields | extra).text for extra in ({"return_progress": True}, {})]
        assert ": ping" not in asked
        events = events_of(asked)
        reports = [event.pop("prompt_progress") for event in events if "prompt_progress" in event]
        assert len(reports) > 2
        first, last = reports[0], reports[-1]
        assert last["processed"] == last["total"] > first["processed"] >= first["cache"] == 0
        for name in ("processed", "time_ms"):
            assert [one[name] for one in reports] == sorted(one[name] for one in reports)
        assert {one["total"] for one in reports} == {last["total"]}
        choices = [event["choices"][0] for event in events]
        assert all(choice["finish_reason"] is None for choice in choices[: len(reports)])
        assert texts_of(choices) == texts_of([event["choices"][0] for event in events_of(plain)])
        assert "prompt_progress" not in plain
        cached = events_of(server.post(path, json=fields | {"return_progress": True}).text)
        assert cached[0]["prompt_progress"]["cache"] > 0
        assert sum("prompt_progress" in event for event in cached) <= 2


def texts_of(choices: list[dict[str, Any]]) -> str:
    return "".join(one["text"] if "text" in one else one["delta"].get("content") or "" for one in choices)


@pytest.mark.parametrize("interval", [1, 7])
def test_chunks_of_several_generations_come_as_they_are_made(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, interval: int
) -> None:
    may_step = threading.Event()
    step = Engine.step

    def paced(self: Engine) -> Any:
        """Step when the event loop has read the chunks before, however busy the machine is."""
        may_step.wait(30)
        may_step.clear()
        return step(self)

    async def pace() -> None:
        while True:
            may_step.set()
            await asyncio.sleep(0.002)

    async def run() -> None:
        monkeypatch.setattr(Engine, "step", paced)
        llm.engine.observers.clear()
        async with AsyncLLM(llm) as engine:
            params = SamplingParams(max_tokens=20, seed=1, ignore_eos=True)
            generations = [await engine.submit(prompt, params) for prompt in ("a", "b")]
            pacing = asyncio.create_task(pace())
            found: dict[tuple[int, int], list[Any]] = {}
            order = []
            async for item in chunks_of(generations, 5.0, interval):
                assert item is not None
                place, chunk = item
                order.append(place)
                found.setdefault((place, chunk.index), []).append(chunk)
            assert len(found) == 2
            assert order != sorted(order)
            for (place, index), chunks in found.items():
                said = generations[place].output().outputs[index]
                assert "".join(chunk.text for chunk in chunks) == said.text
                assert all(len(chunk.token_ids) >= interval for chunk in chunks[1:-1])
                assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
        pacing.cancel()

    asyncio.run(run())


def test_chunks_cost_no_tasks_and_silence_is_reported_until_the_next_one(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    step, goes_on = Engine.step, threading.Event()

    def pausing(self: Engine) -> Any:
        requests = step(self)
        if any(request.num_output == 10 for request in requests):
            goes_on.wait(30)
        return requests

    def factory(loop: asyncio.AbstractEventLoop, work: Any, **settings: Any) -> "asyncio.Task[Any]":
        made.append(work)
        return asyncio.Task(work, loop=loop, **settings)

    async def run() -> None:
        llm.engine.observers.clear()
        async with AsyncLLM(llm) as engine:
            generation = await engine.submit("a", SamplingParams(max_tokens=20, seed=1, ignore_eos=True))
            found, pings = [], 0
            asyncio.get_running_loop().set_task_factory(factory)
            async for item in chunks_of([generation], 0.05):
                if item is None:
                    pings += 1
                    if pings == 3:
                        goes_on.set()
                else:
                    found.append(item[1])
            asyncio.get_running_loop().set_task_factory(None)
            assert "".join(chunk.text for chunk in found) == generation.output().outputs[0].text
            assert pings >= 3

    monkeypatch.setattr(Engine, "step", pausing)
    asyncio.run(run())
    assert not made


def test_a_reader_that_leaves_early_leaves_no_timer(llm: LLM) -> None:
    async def run() -> None:
        llm.engine.observers.clear()
        async with AsyncLLM(llm) as engine:
            generation = await engine.submit("a", SamplingParams(max_tokens=100, seed=1, ignore_eos=True))
            chunks = chunks_of([generation], 60.0)
            assert await anext(chunks) is not None
            timers = [each for each in asyncio.get_running_loop()._scheduled if not each.cancelled()]  # type: ignore[attr-defined]
            assert len(timers) == 1
            await chunks.aclose()
            assert timers[0].cancelled()

    asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    """Soon: within a few steps."""
    for _ in range(200):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not come to this")


PHASES = ["reading", "waiting", "prompt", "decoding"]


@pytest.mark.covering(2)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", PHASES)
def test_a_request_ends_when_its_client_goes(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, phase: str, stream: bool, path: str
) -> None:
    slow_steps(monkeypatch, 0.04)
    body: dict[str, Any] = PATHS[path] | {"max_tokens": 120, "ignore_eos": True, "stream": stream, "n": 2}

    async def run() -> None:
        llm.engine.observers.clear()
        async with AsyncLLM(llm) as engine:
            app, scheduler, asked = app_of(engine), llm.engine.scheduler, dict(body)
            others: list[Any] = []
            is_read, has_left = threading.Event(), threading.Event()
            if phase == "reading":
                job = llm.jobs.read

                def slowly(*args: Any, **kwargs: Any) -> Any:
                    is_read.set()
                    assert has_left.wait(10)
                    return job(*args, **kwargs)

                monkeypatch.setattr(llm.jobs, "read", slowly)
                asked |= {"bad_words": ["a"]}  # read by a thread
            if phase == "waiting":
                others = [await engine.submit([5], SamplingParams(max_tokens=250, ignore_eos=True, n=2))]
                await until(lambda: len(scheduler.running) == 2)
            if phase == "prompt":
                long = "the other " * 20
                asked |= {"prompt": long} if "prompt" in body else {"messages": [{"role": "user", "content": long}]}
            caller = Caller(app, path, asked)
            if phase == "reading":
                await until(is_read.is_set)
            elif phase == "waiting":
                await until(lambda: len(scheduler.waiting) == 2)
            elif phase == "prompt":
                await until(lambda: any(r.num_computed > 0 for r in scheduler.running))
                assert all(r.num_output == 0 for r in scheduler.running)
            else:
                await until(lambda: any(r.num_output > 4 for r in scheduler.running))
            await caller.leave()
            has_left.set()
            await until(lambda: engine.num_live == (2 if others else 0))
            await until(lambda: len(list(scheduler.requests())) == (2 if others else 0))
            statuses = [message.get("status") for message in caller.sent if "status" in message]
            assert statuses in ([], [499]) if not stream or phase == "reading" else statuses == [200]
            for other in others:
                other.close()

    asyncio.run(run())

"""What is noted of a request's trees, as an object for its client and as lines of a file for the operator."""

import asyncio
import json
import logging
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from serving import events_of, serve
from specinfer import LLM, AsyncLLM, SamplingParams
from specinfer.core.speculation import StepTrace, TracedNode
from specinfer.server import trace
from specinfer.server.state import ServerState
from specinfer.server.trace import TokenDecoder, TraceFile, changed_params, step_record

pytestmark = pytest.mark.usefixtures("small_demo")
_PARAMS = SamplingParams(max_tokens=24, temperature=0.7, seed=5, tree="3,2,1")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo") as model:
        yield model


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _chances(step: StepTrace) -> list[float]:
    last = [] if step.next_p is None else [step.next_p]
    return [step.nodes[node - 1].p for node in step.path] + last


def test_a_record_of_a_step_is_plain_json() -> None:
    nodes = (
        TracedNode(token=7, parent=0, drafters=("a", "b"), q=0.123456789, p=0.5, accepted=True),
        TracedNode(token=8, parent=1, drafters=("a",), q=0.25, p=math.nan, accepted=False),
    )
    step = StepTrace(time=1.5, position=3, root=4, nodes=nodes, path=(1,), next_token=9, next_p=0.75)
    record = step_record(step, lambda token: f"<{token}>")
    assert json.loads(json.dumps(record, allow_nan=False)) == {
        "time": 1.5,
        "position": 3,
        "root": {"token": 4, "text": "<4>"},
        "nodes": [
            {
                "token": 7,
                "text": "<7>",
                "parent": 0,
                "drafters": ["a", "b"],
                "q": 0.123457,
                "p": 0.5,
                "accepted": True,
            },
            {"token": 8, "text": "<8>", "parent": 1, "drafters": ["a"], "q": 0.25, "p": None, "accepted": False},
        ],
        "path": [1],
        "next": {"token": 9, "text": "<9>", "p": 0.75},
    }


def test_an_output_that_ended_inside_the_path_has_no_next_token() -> None:
    step = StepTrace(time=0, position=0, root=1, nodes=(), path=(), next_token=None, next_p=None)
    assert step_record(step, str)["next"] is None


def test_texts_of_tokens_join_to_the_text(llm: LLM) -> None:
    texts = TokenDecoder(llm.tokenizer)
    ids = llm.tokenizer.encode("def f(x):\n    return x", add_special_tokens=False)
    assert "".join(map(texts, ids)) == texts.text(ids) == "def f(x):\n    return x"


def test_without_a_tokenizer_tokens_have_no_text() -> None:
    assert TokenDecoder(None)(3) == TokenDecoder(None).text([3, 4]) == ""


def test_only_changed_parameters_are_shown() -> None:
    params = SamplingParams(max_tokens=9, structured_outputs={"regex": "a+"}, stop=["x"])
    told = changed_params(params)
    assert set(told) == {"max_tokens", "structured_outputs", "stop"}
    assert told["stop"] == ["x"]
    assert told["structured_outputs"]["regex"] == "a+"


def test_a_traced_request_sees_the_steps_behind_its_own_text(llm: LLM) -> None:
    async def run() -> None:
        async with AsyncLLM(llm) as engine:
            traced = await engine.submit("def f(", replace(_PARAMS, logprobs=0), trace=True)
            plain = await engine.submit("class A", _PARAMS)
            steps: list[StepTrace] = []
            tokens: list[int] = []
            async for chunk in traced:
                steps += chunk.steps
                tokens += chunk.token_ids
            async for chunk in plain:
                assert not chunk.steps
            said: list[int] = []
            for step in steps:
                said += [step.nodes[node - 1].token for node in step.path]
                said += [] if step.next_token is None else [step.next_token]
            assert said == tokens
            # The target's probabilities are those that it would be asked for as logprobs.
            given = [chance for step in steps for chance in _chances(step)]
            told = traced.output().outputs[0].logprobs
            assert told is not None
            wanted = [math.exp(best[token].logprob) for best, token in zip(told, tokens, strict=True)]
            assert given == pytest.approx(wanted)
            assert plain.requests[0].trace is None

    asyncio.run(run())


def test_a_client_gets_the_steps_of_its_own_request_and_only_if_it_asks(llm: LLM, tmp_path: Path) -> None:
    body = {"max_tokens": 24, "temperature": 0.7, "seed": 5, "stream": True, "return_token_ids": True}
    body["speculative"] = {"tree": "3,2,1"}

    async def run(client: httpx.AsyncClient, state: ServerState) -> list[str]:
        file = TraceFile(str(tmp_path / "trace.jsonl"), state.engine, ("tiny",))
        asked = [body | {"prompt": "def f(", "trace": True}, body | {"prompt": "class A"}]
        answers = await asyncio.gather(*(client.post("/v1/completions", json=each) for each in asked))
        file.close()
        return [answer.text for answer in answers]

    traced, plain = map(events_of, serve(llm, run))
    assert not any("specinfer" in event for event in plain)
    assert "nodes" not in json.dumps(plain)
    said: list[int] = []
    tokens: list[int] = []
    for event in traced:
        for step in event.get("specinfer", {}).get("steps", []):
            said += [step["nodes"][node - 1]["token"] for node in step["path"]]
            said += [step["next"]["token"]] if step["next"] else []
        for choice in event["choices"]:
            tokens += choice["token_ids"]
            assert len(event["specinfer"]["origins"]) == len(choice["token_ids"])
    assert len(tokens) == 24
    assert said == tokens


def test_a_file_holds_each_request_its_steps_and_its_end(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"

    async def run() -> list[Any]:
        async with AsyncLLM(llm) as engine:
            file = TraceFile(str(path), engine, ("demo", "other"))
            asked = [await engine.submit(f"def f{i}(", _PARAMS, request_id=f"r{i}") for i in range(3)]
            outputs = await asyncio.gather(*(generation.finish() for generation in asked))
            file.close()
            file.close()
            assert all(generation.requests[0].trace is None for generation in asked)  # no client asked for it
            await engine.complete("x", _PARAMS)
            return outputs

    outputs = asyncio.run(run())
    first, *rest = _lines(path)
    assert (first["type"], first["version"], first["model"]) == ("trace", trace.VERSION, "demo")
    assert os.stat(path).st_mode & 0o077 == 0
    names = sorted({line["request"] for line in rest})
    assert [name.partition("-")[2] for name in names] == ["r0.0", "r1.0", "r2.0"]
    for i, name in enumerate(names):
        begin, *steps, end = [line for line in rest if line["request"] == name]
        assert begin["type"] == "request"
        assert begin["prompt"] == f"def f{i}("
        assert begin["params"] == {"max_tokens": 24, "temperature": 0.7, "seed": 5, "tree": "3,2,1"}
        said: list[int] = []
        for step in steps:
            assert step["type"] == "step"
            assert step["position"] == len(begin["prompt_token_ids"]) + len(said) - 1
            said += [step["nodes"][node - 1]["token"] for node in step["path"]]
            said += [step["next"]["token"]] if step["next"] else []
        assert said == outputs[i].outputs[0].token_ids
        assert (end["type"], end["finish_reason"]) == ("end", "length")
        assert end["speculative_decoding"] == outputs[i].metrics.speculative_decoding


def test_a_cancelled_request_ends_in_the_file_once(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"

    async def run() -> None:
        async with AsyncLLM(llm) as engine:
            file = TraceFile(str(path), engine, ("demo",))
            generation = await engine.submit("def f(", SamplingParams(max_tokens=400, temperature=1.0, ignore_eos=True))
            async for _ in generation:
                break
            generation.close()
            await engine.drain(10)
            file.close()

    asyncio.run(run())
    kinds = [line["type"] for line in _lines(path)]
    assert kinds.count("request") == kinds.count("end") == 1
    assert kinds[-1] == "end"
    assert _lines(path)[-1]["finish_reason"] == "abort"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_warned_of_once_and_serving_goes_on(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> int:
        async with AsyncLLM(llm) as engine:
            file = TraceFile("/dev/full", engine, ("demo",))
            for _ in range(2):
                output = await engine.complete("def f(", _PARAMS)
            file.close()
            return len(output.outputs[0].token_ids)

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(run()) == 24
    assert [record.getMessage() for record in caplog.records if "trace" in record.getMessage()] == [
        "trace: /dev/full cannot be written any more: No space left on device; serving goes on"
    ]


def test_tokens_without_text_are_warned_of_and_serving_goes_on(
    llm: LLM, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def undecodable(*_: Any) -> str:
        raise TypeError("no such token")

    async def run() -> None:
        async with AsyncLLM(llm) as engine:
            file = TraceFile(str(tmp_path / "trace.jsonl"), engine, ("demo",))
            file._texts.text = undecodable  # type: ignore[method-assign]
            assert (await engine.complete("the", _PARAMS)).error is None
            await asyncio.wait_for(asyncio.to_thread(file.close), 20)

    asyncio.run(run())
    assert caplog.text.count("no such token") == 1


def test_what_the_writer_cannot_keep_up_with_is_skipped_and_counted(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trace, "_MAX_NODES_WAITING", 0)
    path = tmp_path / "trace.jsonl"

    async def run() -> None:
        async with AsyncLLM(llm) as engine:
            file = TraceFile(str(path), engine, ("demo",))
            await engine.complete("def f(", _PARAMS)
            file.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    lines = _lines(path)
    assert all(not line["nodes"] for line in lines if line["type"] == "step")
    assert lines[-1]["type"] == "left_out"
    assert lines[-1]["lines"] > 0
    assert sum("are skipped" in record.getMessage() for record in caplog.records) == 1


def test_a_file_that_cannot_be_written_is_refused_by_name(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trace: .*nowhere/t\.jsonl cannot be written"):
        TraceFile(str(tmp_path / "nowhere" / "t.jsonl"), AsyncLLM(llm), ("demo",))

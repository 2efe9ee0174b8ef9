"""/v1/responses through the official client and by hand: items, events, calls, formats, refusals."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal

import httpx
import httpx2
import openai
import pytest
from pydantic import BaseModel

from serving import app_of, served
from specinfer import LLM, AsyncLLM, SamplingParams
from specinfer.server import pending_response, responses
from talking import HERMES, save_talker

TOOL: Any = {
    "type": "function",
    "name": "weather",
    "description": "Tells it.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
WITH_TOOL: Any = {
    "input": "Rome?", "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False,
    "max_output_tokens": 200,
}  # fmt: skip


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(save_talker(tmp_path_factory.mktemp("talker"), HERMES), drafters=["ngram"], max_model_len=2048)


@asynccontextmanager
async def sdk(llm: LLM) -> AsyncIterator[openai.AsyncOpenAI]:
    async with AsyncLLM(llm) as engine:
        transport = httpx2.ASGITransport(app=app_of(engine))
        async with openai.AsyncOpenAI(
            base_url="http://127.0.0.1/v1",
            api_key="none",
            max_retries=0,
            http_client=httpx2.AsyncClient(transport=transport),
        ) as client:
            yield client


def with_sdk(llm: LLM, ask: Callable[[openai.AsyncOpenAI], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with sdk(llm) as client:
            return await ask(client)

    return asyncio.run(run())


def post(llm: LLM, *bodies: Any) -> list[httpx.Response]:
    async def run() -> list[httpx.Response]:
        async with served(llm) as (client, _):
            return [await client.post("/v1/responses", json=body) for body in bodies]

    return asyncio.run(run())


def events_of(body: str) -> list[dict[str, Any]]:
    """The events of a stream: named, typed and numbered in order."""
    blocks = [block for block in body.strip().split("\n\n") if not block.startswith(":")]
    assert blocks.pop() == "data: [DONE]"
    events = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        events.append(event)
    return events


def test_an_answer_is_the_output_of_generate(llm: LLM) -> None:
    ids = llm.reader.read_chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Rome?"}])
    params = SamplingParams(max_tokens=30, temperature=0.7, top_p=0.9, seed=5)
    (wanted,) = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
    body = {
        "model": "tiny", "instructions": "Be brief.", "input": "Rome?", "max_output_tokens": 30, "temperature": 0.7,
        "top_p": 0.9, "seed": 5, "metadata": {"a": "b"}, "store": True,
    }  # fmt: skip
    parts = [{"role": "user", "content": [{"type": "input_text", "text": "Rome?"}]}]
    first, second = post(llm, body, body | {"input": parts})
    said = first.json()
    assert said["output"][0]["content"] == second.json()["output"][0]["content"]
    assert said["output"][0]["content"][0]["text"] == wanted.outputs[0].text
    assert said["status"] == ("incomplete" if wanted.outputs[0].finish_reason == "length" else "completed")
    assert said["usage"]["input_tokens"] == len(ids)
    assert said["usage"]["output_tokens"] == len(wanted.outputs[0].token_ids)
    assert said["usage"]["total_tokens"] == len(ids) + len(wanted.outputs[0].token_ids)
    assert (said["object"], said["store"], said["metadata"]) == ("response", False, {"a": "b"})
    assert (said["temperature"], said["top_p"], said["instructions"]) == (0.7, 0.9, "Be brief.")


def test_a_cut_answer_is_incomplete_and_a_whole_one_completed(llm: LLM) -> None:
    end = {"structured_outputs": {"choice": ["yes"]}}
    cut, whole = (
        answer.json() for answer in post(llm, {"input": "a", "max_output_tokens": 1} | end, {"input": "a"} | end)
    )
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert cut["output"][0]["status"] == "incomplete"
    assert (whole["status"], whole["incomplete_details"], whole["error"]) == ("completed", None, None)
    assert whole["output"][0]["content"][0]["text"] == "yes"


def test_events_come_in_order_and_sum_to_the_answer(llm: LLM) -> None:
    body = {"input": "Rome?", "max_output_tokens": 12, "temperature": 0}
    whole, stream = post(llm, body, body | {"stream": True})
    events = events_of(stream.text)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", whole.json()["status"]]
    text = whole.json()["output"][0]["content"][0]["text"]
    assert "".join(event["delta"] for event in events if event["type"].endswith("text.delta")) == text
    assert events[-4]["text"] == events[-3]["part"]["text"] == text
    ended = events[-1]["response"]
    before = whole.json()["usage"] | {"input_tokens_details": ended["usage"]["input_tokens_details"]}
    assert ended["usage"] == before, "only what was cached meanwhile may differ"
    assert ended["output"] == [events[-2]["item"]]
    assert {event["item_id"] for event in events if "item_id" in event} == {ended["output"][0]["id"]}


def test_calls_are_items_of_their_own(llm: LLM) -> None:
    whole, stream = post(llm, WITH_TOOL | {"seed": 2}, WITH_TOOL | {"seed": 2, "stream": True})
    (call,) = whole.json()["output"]
    assert (call["type"], call["name"], call["status"]) == ("function_call", "weather", "completed")
    assert json.loads(call["arguments"])["city"] in ("Paris", "Rome")
    events = events_of(stream.text)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:3] == ["created", "in_progress", "output_item.added"]
    assert set(kinds[3:-3]) == {"function_call_arguments.delta"}
    assert kinds[-3:] == ["function_call_arguments.done", "output_item.done", "completed"]
    assert events[2]["item"]["name"] == "weather"
    assert "".join(event["delta"] for event in events if "delta" in event) == call["arguments"]
    assert events[-3]["arguments"] == call["arguments"]


def test_a_conversation_with_calls_goes_on(llm: LLM) -> None:
    items = [
        {"role": "user", "content": "Rome?"},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
        },
        {
            "type": "function_call",
            "call_id": "call_1",
            "name": "weather",
            "arguments": '{"city": "Rome"}',
            "id": "fc_1",
        },
        {"type": "function_call", "call_id": "call_2", "name": "weather", "arguments": '{"city": "Paris"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
        {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "rain"}]},
    ]
    calls = [
        {"id": f"call_{i}", "type": "function", "function": {"name": "weather", "arguments": f'{{"city": "{city}"}}'}}
        for i, city in enumerate(("Rome", "Paris"), start=1)
    ]
    messages = [
        {"role": "user", "content": "Rome?"},
        {"role": "assistant", "content": "I look.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "call_2", "content": "rain"},
    ]
    fields = responses.ResponsesFields.model_validate({"input": items})
    read = responses._read(llm, fields)
    assert read.ids == llm.reader.read_chat(messages)


# ---------------------------------------------------------------------------------- official client


def test_the_official_client_creates(llm: LLM) -> None:
    async def ask(client: openai.AsyncOpenAI) -> None:
        answer = await client.responses.create(model="tiny", input="Rome?", max_output_tokens=8, temperature=0)
        assert answer.output_text == answer.output[0].content[0].text  # type: ignore[union-attr]
        assert answer.usage is not None
        assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
        again = await client.responses.create(
            model="tiny", input=[*[item.model_dump() for item in answer.output], {"role": "user", "content": "b"}],  # type: ignore[list-item,misc]
            max_output_tokens=2,
        )  # fmt: skip
        assert again.status == "incomplete"
        with pytest.raises(openai.NotFoundError) as missing:
            await client.responses.retrieve(answer.id)
        assert missing.value.code == "not_found"
        with pytest.raises(openai.NotFoundError):
            await client.responses.delete(answer.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.cancel(answer.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.input_items.list(answer.id)
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model="tiny", input="a", previous_response_id=answer.id)
        assert refused.value.param == "previous_response_id"

    with_sdk(llm, ask)


def test_the_official_client_streams(llm: LLM) -> None:
    async def ask(client: openai.AsyncOpenAI) -> None:
        async with client.responses.stream(model="tiny", input="Rome?", max_output_tokens=8, temperature=0) as stream:
            text = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
        plain = await client.responses.create(model="tiny", input="Rome?", max_output_tokens=8, temperature=0)
        assert text == plain.output_text
        body: Any = {"model": "tiny", "extra_body": {"seed": 4}} | WITH_TOOL
        async with client.responses.stream(**body) as calling:
            final = await calling.get_final_response()
        call = final.output[0]
        assert call.type == "function_call"
        assert call.parsed_arguments["city"] in ("Paris", "Rome")  # type: ignore[index]

    with_sdk(llm, ask)


class City(BaseModel):
    name: Literal["Rome", "Paris"]


class Trip(BaseModel):
    stops: tuple[City, City]
    is_long: bool


def test_the_official_client_parses(llm: LLM) -> None:
    async def ask(client: openai.AsyncOpenAI) -> None:
        parsed = await client.responses.parse(
            model="tiny", input="A trip.", text_format=Trip, max_output_tokens=400, extra_body={"seed": 1}
        )
        assert isinstance(parsed.output_parsed, Trip)
        body: Any = {"model": "tiny", "text_format": Trip, "max_output_tokens": 400, "extra_body": {"seed": 1}}
        async with client.responses.stream(input="A trip.", **body) as stream:
            final = await stream.get_final_response()
        assert final.output_parsed == parsed.output_parsed
        chat = await client.chat.completions.parse(
            model="tiny", messages=[{"role": "user", "content": "A trip."}], response_format=Trip, max_tokens=400
        )
        assert isinstance(chat.choices[0].message.parsed, Trip)

    with_sdk(llm, ask)


# ----------------------------------------------------------------------------------------- failures


def test_a_failure_in_mid_stream_is_an_event(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def failing(*_: Any) -> AsyncIterator[Any]:
        yield None
        raise RuntimeError("a secret")

    monkeypatch.setattr(pending_response, "chunks_of", failing)
    (stream,) = post(llm, {"input": "a", "stream": True})
    assert ": ping" in stream.text
    assert "secret" not in stream.text
    events = events_of(stream.text)
    assert [event["type"] for event in events] == ["response.created", "response.in_progress", "response.failed"]
    ended = events[-1]["response"]
    assert (ended["status"], ended["error"]["code"]) == ("failed", "server_error")


@pytest.mark.parametrize(
    ("body", "param", "status"),
    [
        ({}, "input", 400),
        ({"input": 3}, "input", 400),
        ({"input": []}, "input", 400),
        ({"input": [{"role": "user", "content": "a"}] * 5000}, "input", 400),
        ({"input": [{"type": "reasoning"}]}, "input", 400),
        ({"input": [{"role": "assistant", "content": "a", "tool_calls": [3]}]}, "input", 400),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", 400),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x/"}]}]}, "input", 400),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{", "call_id": "a"}]}, "input", 400),
        ({"input": "a", "instructions": 3}, "instructions", 400),
        ({"input": "a", "model": "other"}, "model", 404),
        ({"input": "a", "background": True}, "background", 400),
        ({"input": "a", "conversation": "c"}, "conversation", 400),
        ({"input": "a", "previous_response_id": "r"}, "previous_response_id", 400),
        ({"input": "a", "prompt": {"id": "p"}}, "prompt", 400),
        ({"input": "a", "n": 2}, "n", 400),
        ({"input": "a", "max_tokens": 2}, "max_tokens", 400),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens", 400),
        ({"input": ["a"]}, "input", 400),
        ({"input": "a", "tools": [TOOL], "tool_choice": 3}, "tool_choice", 400),
        ({"input": "a", "response_format": {"type": "text"}}, "response_format", 400),
        ({"input": "a", "truncation": "middle"}, "truncation", 400),
        ({"input": "a", "include": ["message.output_text.logprobs"]}, "include", 400),
        ({"input": "a", "text": {"format": 3}}, "text", 400),
        ({"input": "a", "text": {"format": {"type": "grammar"}}}, "text", 400),
        ({"input": "a", "text": {"format": {"type": "json_schema", "name": "x"}}}, "text", 400),
        ({"input": "a", "tools": [{"type": "function", "name": "a b"}]}, "tools", 400),
        ({"input": "a", "tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice", 400),
        ({"input": "a", "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", 400),
        ({"input": "a", "chat_template": "{{ 1 }}"}, "chat_template", 400),
        ({"input": "a" * 100_000}, "input", 400),
    ],
    ids=lambda value: repr(value)[:50],
)
def test_refusals_name_the_field(llm: LLM, body: dict[str, Any], param: str, status: int) -> None:
    for asked in (body, body | {"stream": True}):
        (answer,) = post(llm, asked)
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert error["param"].split("[")[0] == param, error
        assert error["message"].startswith(param) or param == "input"


def test_places_in_the_input_are_reported_as_the_client_counts_them(llm: LLM) -> None:
    items = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "d", "name": "f", "arguments": "[]"},
    ]
    first, second = post(
        llm,
        {"input": items, "instructions": "Be brief."},
        {"input": [items[0], {"role": "user", "content": [{"type": "input_file"}]}], "instructions": "Be brief."},
    )
    assert first.json()["error"]["message"].startswith("input[3].arguments: ")
    assert second.json()["error"]["message"].startswith("input[1].content[0].type: ")

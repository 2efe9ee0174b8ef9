"""Requests that clients of other projects have sent, cut short, each with what the model generates for it.

`test_client_programs.py` has the clients, and records them.
"""

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Any

import ollama
import pytest
from pydantic import TypeAdapter

from serving import served
from specinfer import LLM
from tests.server.recorded_requests import FOLDER
from tests.server.scripted_target import TEMPLATES, scripted

REQUESTS = {
    f"{file.stem}-{number}": request
    for file in sorted(FOLDER.glob("*.json"))
    for number, request in enumerate(json.loads(file.read_text(encoding="utf-8")))
}
Parts = tuple[str, str, list[tuple[str, Any]]]  # thought, text, calls with their arguments


class Model:
    """Models that generate what the request at hand says, with a template of each kind."""

    def __init__(self, llms: dict[bool, LLM], texts: list[str]) -> None:
        self._llms, self._texts = llms, texts

    def answer(self, request: Any) -> tuple[int, dict[str, str], str]:
        async def ask() -> Any:
            async with served(self._llms["<think>" in request["generates"]]) as (client, _):
                return await client.post(request["path"], json=request["body"], headers=request["headers"])

        self._texts[:] = [request["generates"]]
        answer = asyncio.run(ask())
        return answer.status_code, dict(answer.headers), answer.text


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    texts: list[str] = []
    plain = scripted(lambda _: texts[0], drafters=["ngram"], max_len=8192)
    thinking = scripted(lambda _: texts[0], drafters=["ngram"], max_len=8192, template=TEMPLATES["thinking"])
    with plain as one, thinking as other:
        yield Model({False: one, True: other}, texts)


@pytest.mark.parametrize("name", REQUESTS)
def test_a_recorded_request_is_served(name: str, model: Model) -> None:
    request = REQUESTS[name]
    status, headers, answer = model.answer(request)
    assert status == 200, answer
    assert headers["x-request-id"]
    is_stream = request["body"].get("stream", request["path"] == "/api/chat")
    kind = {True: "text/event-stream", False: "application/json"}[is_stream]
    assert headers["content-type"].startswith(
        "application/x-ndjson" if "/api/" in request["path"] and is_stream else kind
    )
    thought, text, calls = READERS[request["path"]](answer, is_stream)
    generated = request["generates"]
    if "<think>" in generated and "</think>" in generated:
        wanted, generated = generated.removeprefix("<think>").split("</think>")
        assert thought.strip() in (wanted.strip(), "")  # some clients do not ask for it
    if "<tool_call>" in generated:
        made = json.loads(generated.split("<tool_call>")[1].split("</tool_call>")[0])
        assert calls == [(made["name"], made["arguments"])]
    else:
        assert text.strip() == generated.strip()
        assert not calls


# ------------------------------------------------------------------------- answers, as official SDKs type them


def _events(answer: str) -> Sequence[Any]:
    return [json.loads(line.removeprefix("data: ")) for line in answer.splitlines() if line.startswith("data: {")]


def _chat(answer: str, is_stream: bool) -> Parts:
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    if not is_stream:
        message: Any = ChatCompletion.model_validate_json(answer).choices[0].message
        calls = [(one.function.name, json.loads(one.function.arguments)) for one in message.tool_calls or []]
        return getattr(message, "reasoning_content", None) or "", message.content or "", calls
    assert answer.rstrip().endswith("data: [DONE]")
    chunks = [ChatCompletionChunk.model_validate(event) for event in _events(answer)]
    deltas: list[Any] = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    pieces = [piece for delta in deltas for piece in delta.tool_calls or []]
    arguments = "".join(piece.function.arguments or "" for piece in pieces)
    thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    text = "".join(delta.content or "" for delta in deltas)
    return thought, text, [(pieces[0].function.name, json.loads(arguments))] if pieces else []


def _responses(answer: str, is_stream: bool) -> Parts:
    from openai.types.responses import Response, ResponseStreamEvent

    response: Any = json.loads(answer) if not is_stream else None
    if is_stream:
        reader: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
        events = [reader.validate_python(event) for event in _events(answer)]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        response = events[-1].response
    found: Any = Response.model_validate(response if isinstance(response, dict) else response.model_dump())
    assert found.status == "completed"
    thoughts = [
        part.text for item in found.output if item.type == "reasoning" for part in (item.content or item.summary)
    ]
    texts = [part.text for item in found.output if item.type == "message" for part in item.content]
    calls = [(item.name, json.loads(item.arguments)) for item in found.output if item.type == "function_call"]
    return "".join(thoughts), "".join(texts), calls


def _messages(answer: str, is_stream: bool) -> Parts:
    from anthropic.types import Message, RawMessageStreamEvent

    if not is_stream:
        content: Any = Message.model_validate_json(answer).content
        calls = [(block.name, block.input) for block in content if block.type == "tool_use"]
        texts = {kind: "".join(getattr(block, kind, "") or "" for block in content) for kind in ("thinking", "text")}
        return texts["thinking"], texts["text"], calls
    reader: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
    events = [reader.validate_python(event) for event in _events(answer) if event["type"] != "ping"]
    assert [events[0].type, events[-1].type] == ["message_start", "message_stop"]
    deltas = [event.delta for event in events if event.type == "content_block_delta"]
    joined = {
        kind: "".join(getattr(delta, kind, None) or "" for delta in deltas)
        for kind in ("thinking", "text", "partial_json")
    }
    names = [
        event.content_block.name
        for event in events
        if getattr(event, "content_block", None) and event.content_block.type == "tool_use"
    ]
    return joined["thinking"], joined["text"], [(name, json.loads(joined["partial_json"])) for name in names]


def _ollama(answer: str, is_stream: bool) -> Parts:
    messages = [ollama.ChatResponse.model_validate_json(line).message for line in answer.splitlines()]
    assert is_stream or len(messages) == 1
    calls = [(one.function.name, dict(one.function.arguments)) for each in messages for one in each.tool_calls or []]
    thought = "".join(each.thinking or "" for each in messages)
    return thought, "".join(each.content or "" for each in messages), calls


READERS = {"/v1/chat/completions": _chat, "/v1/responses": _responses, "/v1/messages": _messages, "/api/chat": _ollama}

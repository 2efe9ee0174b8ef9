"""/v1/responses through the official client and by hand: items, events, calls, formats, refusals."""

import json
from collections.abc import AsyncIterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from serving import Server, post
from specinfer import LLM
from specinfer.server import pending_response
from specinfer.server.conversations import Conversation, read_conversation
from specinfer.server.responses_fields import ResponsesFields, read_input
from talking import HERMES, save_talker
from tests.server.dialects import with_openai
from tests.server.scripted_target import scripted

PATH = "/v1/responses"
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


def ids_of(llm: LLM, items: list[Any], **more: Any) -> list[int]:
    """The prompt that an input becomes."""
    fields = ResponsesFields.model_validate({"input": items, **more})
    fields.check()
    conversation = Conversation("input")
    read_input(fields, conversation)
    return read_conversation(llm, fields.as_chat(conversation.messages, [])).ids


def test_an_answer_has_the_fields_of_its_request(llm: LLM) -> None:
    ids = llm.reader.read_chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Rome?"}])
    body = {
        "model": "tiny", "instructions": "Be brief.", "input": "Rome?", "max_output_tokens": 30, "temperature": 0.7,
        "top_p": 0.9, "seed": 5, "metadata": {"a": "b"}, "store": True,
    }  # fmt: skip
    parts = [{"role": "user", "content": [{"type": "input_text", "text": "Rome?"}]}]
    first, second = post(llm, PATH, body, body | {"input": parts})
    said = first.json()
    assert said["output"][0]["content"] == second.json()["output"][0]["content"]
    usage = said["usage"]
    assert usage["input_tokens"] == len(ids)
    assert usage["total_tokens"] == len(ids) + usage["output_tokens"]
    assert (said["object"], said["store"], said["metadata"]) == ("response", False, {"a": "b"})
    assert (said["temperature"], said["top_p"], said["instructions"]) == (0.7, 0.9, "Be brief.")


def test_a_cut_answer_is_incomplete_and_a_whole_one_completed(llm: LLM) -> None:
    end = {"structured_outputs": {"choice": ["yes"]}}
    cut, whole = (
        answer.json() for answer in post(llm, PATH, {"input": "a", "max_output_tokens": 1} | end, {"input": "a"} | end)
    )
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert cut["output"][0]["status"] == "incomplete"
    assert (whole["status"], whole["incomplete_details"], whole["error"]) == ("completed", None, None)
    assert whole["output"][0]["content"][0]["text"] == "yes"


def test_a_format_with_a_schema_is_obeyed_and_other_keys_are_named(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"]}
    text = {"format": {"type": "json_object", "schema": schema, "foo": 1}, "bar": 2, "verbosity": "low"}
    (answer,) = post(llm, PATH, {"input": "hi", "text": text, "max_output_tokens": 100})
    assert json.loads(answer.json()["output"][0]["content"][0]["text"]) == {"city": "Oslo"}
    assert answer.headers["x-specinfer-ignored-fields"] == "text.bar, text.format.foo"


def test_events_come_in_order_and_sum_to_the_answer(llm: LLM) -> None:
    body = {"input": "Rome?", "max_output_tokens": 12, "temperature": 0}
    whole, stream = post(llm, PATH, body, body | {"stream": True})
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
    whole, stream = post(llm, PATH, WITH_TOOL | {"seed": 2}, WITH_TOOL | {"seed": 2, "stream": True})
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
    assert ids_of(llm, items) == llm.reader.read_chat(messages)


# -------------------------------------------------------------------------------------------- Codex

EXEC: Any = {
    "type": "function", "name": "exec_command", "description": "Runs it.", "strict": False,
    "parameters": {
        "type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"], "additionalProperties": False,
    },
}  # fmt: skip
WAIT: Any = EXEC | {
    "name": "wait_agent",
    "parameters": {"type": "object", "properties": {"target": {"type": "string"}}},
}
SPAWN: Any = WAIT | {"name": "spawn_agent", "defer_loading": True}
PATCH: Any = {
    "type": "custom", "name": "apply_patch", "description": "Not JSON.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: begin hunk+ end"},
}  # fmt: skip
CODEX: dict[str, Any] = {
    "instructions": "Be brief.",
    "tools": [
        EXEC,
        {"type": "namespace", "name": "agents", "description": "Agents.", "tools": [WAIT, PATCH]},
        PATCH,
        {"type": "tool_search", "execution": "client", "description": "Finds.", "parameters": WAIT["parameters"]},
        {"type": "web_search", "external_web_access": False},
        {"type": "image_generation", "output_format": "png"},
    ],
    "tool_choice": "auto", "parallel_tool_calls": True, "reasoning": {"effort": None, "summary": "auto"},
    "store": False, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "key", "text": {"verbosity": "low"},
    "client_metadata": {"session_id": "x"}, "service_tier": "auto", "safety_identifier": "me", "max_tool_calls": 3,
}  # fmt: skip
USER: Any = {"type": "message", "id": "msg_0", "role": "user", "content": [{"type": "input_text", "text": "Go."}]}
DEVELOPER: Any = USER | {"role": "developer", "content": [{"type": "input_text", "text": "You are Codex."}]}


def _tagged(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


CALLS = "I look.\n" + "\n".join(
    [
        _tagged("exec_command", cmd="ls"), _tagged("agents__wait_agent", target="a"),
        _tagged("apply_patch", input='*** "Begin"\n+x'), _tagged("agents__apply_patch", input="-"),
        _tagged("tool_search", target="spawn"),
    ]
)  # fmt: skip
ITEMS: list[dict[str, Any]] = [
    {"type": "function_call", "name": "exec_command", "arguments": '{"cmd": "ls"}'},
    {"type": "function_call", "name": "wait_agent", "namespace": "agents", "arguments": '{"target": "a"}'},
    {"type": "custom_tool_call", "name": "apply_patch", "input": '*** "Begin"\n+x'},
    {"type": "custom_tool_call", "name": "apply_patch", "namespace": "agents", "input": "-"},
    {"type": "tool_search_call", "execution": "client", "arguments": {"target": "spawn"}},
]


def test_codex_gets_calls_in_the_items_of_its_tools_and_sends_them_back() -> None:
    async def talk(client: openai.AsyncOpenAI, llm: Any) -> None:
        body: Any = CODEX | {"model": "tiny", "input": [DEVELOPER, USER]}
        known = body.keys() - {"client_metadata"}
        body = {key: body[key] for key in known} | {"extra_body": {"client_metadata": CODEX["client_metadata"]}}
        raw = await client.responses.with_raw_response.create(**body)
        assert raw.headers["x-specinfer-ignored-fields"] == (
            "client_metadata, max_tool_calls, tools.web_search, tools.image_generation"
        )
        whole = raw.parse()
        message, *calls = [item.model_dump(exclude_none=True) for item in whole.output]
        assert message["content"][0]["text"] == "I look."
        assert [call | item for call, item in zip(calls, ITEMS, strict=True)] == calls
        async with client.responses.stream(**body) as stream:
            events = [event async for event in stream]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        inputs = [event for event in events if event.type.startswith("response.custom_tool_call_input")]
        assert "".join(getattr(event, "delta", "") for event in inputs) == '*** "Begin"\n+x-'
        assert [event.input for event in inputs if event.type.endswith("done")] == ['*** "Begin"\n+x', "-"]
        done = [event.item for event in events if event.type == "response.output_item.done"]
        last = events[-1]
        assert last.type == "response.completed"
        assert [item.id for item in done] == [item.id for item in last.response.output]
        assert [item.type for item in done] == [item.type for item in whole.output]

        found = {"type": "namespace", "name": "agents", "tools": [SPAWN, WAIT]}
        outputs = [
            {"type": "function_call_output", "call_id": calls[0]["call_id"], "output": "a.txt"},
            {"type": "function_call_output", "call_id": calls[1]["call_id"], "output": [
                {"type": "input_text", "text": "done"}, {"type": "input_image", "image_url": "data:;base64,AA"},
            ]},
            {"type": "custom_tool_call_output", "call_id": calls[2]["call_id"], "output": "Success"},
            {"type": "custom_tool_call_output", "call_id": calls[3]["call_id"], "output": "Failure"},
            {"type": "tool_search_output", "call_id": calls[4]["call_id"], "execution": "client", "tools": [found]},
        ]  # fmt: skip
        again = [item.to_dict() for item in done]
        second = await client.responses.create(**body | {"input": [DEVELOPER, USER, *again, *outputs]})
        (call,) = second.output
        assert (call.type, call.name, call.namespace) == ("function_call", "spawn_agent", "agents")  # type: ignore[union-attr]
        prompt = llm.script.prompts[-1]
        assert CALLS.replace("\n<tool_call>", "<tool_call>") in prompt
        for text in ("a.txt", "done\n[input_image: not shown", "Success", "agents__spawn_agent"):
            assert text in prompt
        assert "base64" not in prompt

    with scripted([CALLS, CALLS, _tagged("agents__spawn_agent", target="b")], drafters=["ngram"]) as llm:
        with_openai(llm, lambda client: talk(client, llm))


def test_a_choice_may_name_a_tool_of_each_kind() -> None:
    choices: list[Any] = [
        {"type": "custom", "name": "apply_patch"},
        {"type": "function", "name": "wait_agent", "namespace": "agents"},
        {"type": "allowed_tools", "mode": "required", "tools": [
            {"type": "function", "name": "wait_agent", "namespace": "agents"}, {"type": "web_search"},
        ]},
        {"type": "function", "name": "exec_command"},
    ]  # fmt: skip
    with scripted(["no call"]) as llm:
        answers = post(llm, PATH, *[CODEX | {"input": "Go.", "tool_choice": choice} for choice in choices])
    names = ["apply_patch", "wait_agent", "wait_agent", "exec_command"]
    assert [answer.json()["output"][0]["name"] for answer in answers] == names


def test_a_tool_of_a_service_is_left_out_and_named_also_as_the_only_one_that_may_answer() -> None:
    hosted = [
        {"type": kind} for kind in ("mcp", "local_shell", "computer_use_preview", "file_search", "code_interpreter")
    ]
    bodies: list[dict[str, Any]] = [
        {"tools": hosted}, {"tools": hosted, "tool_choice": "required"}, {"tools": [{"type": "tool_search"}]},
        {"tools": [TOOL], "tool_choice": {"type": "web_search_preview"}}, {"reasoning": {"context": "x"}},
    ]  # fmt: skip
    with scripted(["Hello."]) as llm:
        answers = post(llm, PATH, *[{"input": "Go."} | body for body in bodies])
    assert [answer.json()["output"][0]["content"][0]["text"] for answer in answers] == ["Hello."] * len(bodies)
    named = [answer.headers["x-specinfer-ignored-fields"] for answer in answers]
    kinds = ", ".join(f"tools.{tool['type']}" for tool in hosted)
    assert named == [kinds, f"{kinds}, tool_choice", "tools.tool_search", "tool_choice", "reasoning.context"]


# -------------------------------------------------------------------------------------------- items


def test_items_of_other_servers_become_messages_or_are_left_out(llm: LLM) -> None:
    shell = {
        "type": "local_shell_call",
        "call_id": "c",
        "status": "completed",
        "action": {"type": "exec", "command": ["ls"]},
    }
    items: list[dict[str, Any]] = [
        USER,
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA"},
        {"type": "item_reference", "id": "rs_2"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
        USER | {"role": "assistant", "status": "completed", "phase": "commentary", "odd": 1, "content": [
            {"type": "output_text", "text": "I look.", "annotations": [{"type": "url_citation"}], "logprobs": []},
        ]},
        shell,
        {"type": "local_shell_call_output", "call_id": "c", "output": "a.txt"},
        {"type": "ghost_snapshot", "ghost_commit": {}},
        {"type": "compaction", "encrypted_content": "x"},
        {"type": "tool_search_call", "execution": "server", "call_id": None, "arguments": {}},
        {"type": "agent_message", "author": "/root", "recipient": "/root/x", "content": [
            {"type": "input_text", "text": "Come here."}, {"type": "encrypted_content", "encrypted_content": "x"},
        ]},
        {"type": "function_call_output", "output": "ring"},
    ]  # fmt: skip
    call = {"id": "c", "function": {"name": "local_shell", "arguments": shell["action"]}}
    messages = [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "a.txt"},
        {"role": "user", "content": "Come here."},
        {"role": "tool", "content": "ring"},
    ]
    assert ids_of(llm, items) == llm.reader.read_chat(messages)
    (answer,) = post(llm, PATH, {"input": items, "max_output_tokens": 1})
    assert answer.status_code == 200, answer.text
    kinds = (
        "reasoning",
        "item_reference",
        "web_search_call",
        "ghost_snapshot",
        "compaction",
        "tool_search_call",
        "odd",
    )
    assert answer.headers["x-specinfer-ignored-fields"] == ", ".join(f"input.{kind}" for kind in kinds)


def test_a_call_that_was_cut_off_comes_back() -> None:
    text = _tagged("exec_command", cmd="ls -la and much more of this") + _tagged("apply_patch", input="begun and more")
    for limit in (20, 60):
        with scripted([text]) as llm:
            body = CODEX | {"input": [USER], "max_output_tokens": limit}
            (first,) = post(llm, PATH, body)
            cut = first.json()
            assert (cut["status"], cut["output"][-1]["status"]) == ("incomplete", "incomplete")
            output = {"type": "function_call_output", "call_id": cut["output"][-1]["call_id"], "output": "no JSON"}
            (second,) = post(llm, PATH, body | {"input": [USER, *cut["output"], output]})
            assert second.status_code == 200, second.text


def test_an_input_is_counted(llm: LLM) -> None:
    with Server(llm) as server:
        counted = server.post("/v1/responses/input_tokens", json={"input": "Rome?", "tools": [TOOL]})
        answer = server.post("/v1/responses", json=WITH_TOOL)
        assert counted.json() == {
            "object": "response.input_tokens", "input_tokens": answer.json()["usage"]["input_tokens"],
        }  # fmt: skip
        refused = server.post("/v1/responses/input_tokens", json={"input": 3})
        assert refused.status_code == 400
        missing = server.post("/v1/responses/compact", json={"input": "Rome?", "model": "tiny"})
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")


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

    with_openai(llm, ask)


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

    with_openai(llm, ask)


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

    with_openai(llm, ask)


# ----------------------------------------------------------------------------------------- failures


def test_a_failure_in_mid_stream_is_an_event(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def failing(*_: Any) -> AsyncIterator[Any]:
        yield None
        raise RuntimeError("a secret")

    monkeypatch.setattr(pending_response, "chunks_of", failing)
    (stream,) = post(llm, PATH, {"input": "a", "stream": True})
    assert ": ping" in stream.text
    assert "secret" not in stream.text
    events = events_of(stream.text)
    assert [event["type"] for event in events] == ["response.created", "response.in_progress", "response.failed"]
    ended = events[-1]["response"]
    assert (ended["status"], ended["error"]["code"]) == ("failed", "server_error")


def test_places_in_the_input_are_reported_as_the_client_counts_them(llm: LLM) -> None:
    items = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "d", "name": 5, "arguments": "{}"},
    ]
    first, second = post(
        llm,
        PATH,
        {"input": items, "instructions": "Be brief."},
        {"input": [items[0], {"role": "user", "content": [{"type": "input_file"}]}], "instructions": "Be brief."},
    )
    assert first.json()["error"]["message"].startswith("input[3].name: ")
    assert second.json()["error"]["message"].startswith("input[1].content[0].type: ")

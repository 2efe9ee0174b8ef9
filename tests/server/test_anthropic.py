"""What clients of Anthropic's API send: blocks of all kinds, tools of all kinds, and thoughts."""

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from serving import served_on_port
from specinfer.core.outputs import TextChunk
from specinfer.inputs.formats.parser import OutputDelta
from specinfer.server.anthropic_blocks import MessageBlocks
from specinfer.server.blocks import Blocks
from specinfer.server.field_checks import IGNORED_HEADER
from tests.server.dialects import MESSAGES, USER
from tests.server.scripted_target import TEMPLATES, Talk, scripted, talking_to
from tiny import make_request

TOOL = {"name": "read", "description": "Reads.", "input_schema": {"type": "object", "properties": {}}}
USE = {"type": "tool_use", "id": "a", "name": "read", "input": {"x": 1}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
END = TextChunk("", [], [], finish_reason="stop")
NOTE = "[image: not shown, this model reads text only]"


@pytest.fixture(scope="module")
def talk() -> Iterator[Talk]:
    with talking_to(MESSAGES, ["Fine."], {"max_tokens": 4}, template=TEMPLATES["thinking"], max_len=2048) as made:
        yield made


def count(talk: Talk, **fields: Any) -> httpx.Response:
    return talk.server.post(f"{MESSAGES}/count_tokens", {"messages": [USER], **fields})


def _turn(*blocks: Any, role: str = "assistant") -> list[Any]:
    return [USER, {"role": role, "content": list(blocks)}, USER]


def _result(content: Any, **more: Any) -> list[Any]:
    result = {"type": "tool_result", "tool_use_id": "a", "content": content, **more}
    return [USER, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [result]}]


def test_a_system_block_that_differs_in_each_session_is_dropped(talk: Talk) -> None:
    text = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
    headers = [{"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.{i}; cch={i};"} for i in range(2)]
    prompts = {talk.prompt(system=[header, text]) for header in headers}
    assert prompts == {talk.prompt(system=[text])} == {talk.prompt(system="Be brief.")}
    assert talk.prompt(system=headers) == talk.prompt()


@pytest.mark.parametrize(
    ("content", "seen"),
    [
        (None, "<tool_response>\n\n</tool_response>"),
        ([], "<tool_response>\n\n</tool_response>"),
        ("sunny", "<tool_response>\nsunny\n"),
        ({"type": "text", "text": "sunny"}, "<tool_response>\nsunny\n"),
        ({"temperature": 20}, '<tool_response>\n{"temperature": 20}\n'),
        (["sunny", {"type": "text", "text": "warm"}], "<tool_response>\nsunny\nwarm\n"),
        ([IMAGE, {"type": "text", "text": "a"}], f"<tool_response>\n{NOTE}\na\n"),
        ([{"type": "tool_reference", "tool_name": "grep"}], "<tool_response>\ngrep\n"),
        (
            [{"type": "search_result", "title": "T", "source": "http://a", "content": [{"type": "text", "text": "b"}]}],
            "<tool_response>\nT\nhttp://a\nb\n",
        ),
        (
            [{"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "b"}}],
            "<tool_response>\n",
        ),
        (
            [{"type": "document", "source": {"type": "url", "url": "http://a/b.pdf"}}],
            "<tool_response>\n[document: not shown, this model reads text only]\n",
        ),
    ],
)
def test_results_of_tools_are_the_text_that_they_have(talk: Talk, content: Any, seen: str) -> None:
    assert seen in talk.prompt(messages=_result(content))


def test_a_result_without_content_is_served(talk: Talk) -> None:
    result = {"type": "tool_result", "tool_use_id": "a"}
    turns = [USER, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [result]}]
    assert talk.prompt(messages=turns) == talk.prompt(messages=_result(""))


def test_tools_that_a_service_ran_are_calls_and_results_in_the_history(talk: Talk) -> None:
    found = {
        "type": "web_search_result",
        "title": "Rome",
        "url": "http://a",
        "encrypted_content": "x",
        "page_age": None,
    }
    search = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "rome"}}
    prompt = talk.prompt(
        messages=_turn(
            {"type": "text", "text": "Looking."},
            search,
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": [found]},
            {"type": "text", "text": "It is sunny."},
        )
    )
    assert 'Looking.<tool_call>\n{"name": "web_search", "arguments": {"query": "rome"}}' in prompt
    assert "<tool_response>\nRome\nurl: http://a\n</tool_response>" in prompt
    assert "assistant\nIt is sunny.<|im_end|>" in prompt
    output = {"type": "code_execution_result", "stdout": "42", "stderr": "", "return_code": 0, "content": []}
    for kind, content, seen in (
        ("mcp_tool_result", [{"type": "text", "text": "b"}], "\nb\n"),
        ("code_execution_tool_result", output, "\nstdout: 42\nreturn_code: 0\n"),
        ("web_fetch_tool_result", {"type": "web_fetch_tool_result_error", "error_code": "gone"}, "error_code: gone"),
    ):
        use = {"type": kind.replace("result", "use"), "id": "s", "name": "run", "input": None}
        prompt = talk.prompt(messages=_turn(use, {"type": kind, "tool_use_id": "s", "content": content}))
        assert '"name": "run", "arguments": {}' in prompt
        assert seen in prompt


@pytest.mark.parametrize(
    ("block", "seen"),
    [
        ({"type": "compaction", "content": "We spoke of Rome."}, "We spoke of Rome."),
        ({"type": "fallback_text", "text": "a"}, "\na<|im_end|>"),
        ({"type": "container_upload", "file_id": "f"}, "[container_upload: not shown, this model reads text only]"),
        ({"type": "redacted_thinking", "data": "x"}, "assistant\n<|im_end|>"),
        ("plain text", "plain text"),
    ],
)
def test_other_blocks_of_the_history_are_text_or_a_note(talk: Talk, block: Any, seen: str) -> None:
    assert seen in talk.prompt(messages=_turn(block))


def test_an_image_is_refused_in_the_newest_message_of_the_user_only(talk: Talk) -> None:
    text = {"type": "text", "text": "What is it?"}
    assert f"{NOTE}\nWhat is it?" in talk.prompt(messages=_turn(IMAGE, text, role="user"))
    for block, kind in (
        (IMAGE, "image"),
        ({"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "x"}}, "document"),
        ({"type": "image_url", "image_url": {"url": "http://a"}}, "image_url"),
    ):
        answer = talk.post(messages=[{"role": "user", "content": [text, block]}])
        assert answer.status_code == 400
        assert f"messages[0].content[1].type: only text is served, not '{kind}'" in answer.json()["error"]["message"]


def test_what_the_server_sent_is_accepted_back_with_other_fields(talk: Talk) -> None:
    answer = talk.post().json()
    assert talk.post(messages=[USER, answer, USER]).status_code == 200
    text = '{"city": "Ro'
    assert json.dumps(text)[1:-1] in talk.prompt(messages=_turn(USE | {"input": text, "id": None}))
    cut = {"type": "tool_use", "id": "a", "name": "read", "input": None}
    assert talk.prompt(messages=_turn(cut)) == talk.prompt(messages=_turn(cut | {"input": {}}))
    assert talk.prompt(messages=[{"role": "user", "content": {"type": "text", "text": "Hi."}}]) == talk.prompt()


def test_tools_of_the_service_and_hints_are_left_out_and_named(talk: Talk) -> None:
    hosted = [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "mcp_toolset", "mcp_server_name": "a"},
    ]
    hints = {"defer_loading": True, "allowed_callers": ["direct"], "cache_control": {"type": "ephemeral"},
             "input_examples": [{}], "eager_input_streaming": True}  # fmt: skip
    plain = talk.prompt(tools=[TOOL])
    answer = talk.post(tools=[*hosted, TOOL | hints | {"type": "custom"}], mcp_servers=[{}], container="c")
    assert answer.status_code == 200, answer.text
    assert talk.llm.script.prompts[-1] == plain
    named = answer.headers[IGNORED_HEADER].split(", ")
    assert {"container", "mcp_servers", "tools.bash_20250124", "tools.mcp_toolset", "tools.web_search_20250305"} <= {
        *named
    }
    assert {f"tools.{name}" for name in hints} <= {*named}
    assert talk.prompt(tools=hosted) == talk.prompt()
    body = {"tools": [*hosted, TOOL | hints], "messages": _result([IMAGE])}
    assert count(talk, **body).json()["input_tokens"] > 0


@pytest.mark.parametrize("name", ["a" * 128, "files.read", "mcp__server__read-file"])
def test_names_of_tools_have_the_length_of_the_api(name: str) -> None:
    call = f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>'
    with talking_to(MESSAGES, [call], max_len=2048) as talk:
        answer = talk.post(tools=[TOOL | {"name": name}], max_tokens=500).json()
    (block,) = answer["content"]
    assert (block["type"], block["name"], answer["stop_reason"]) == ("tool_use", name, "tool_use")


def test_a_limit_of_zero_reads_the_prompt_for_the_cache(talk: Talk) -> None:
    turns = [{"role": "user", "content": "words " * 100}]
    answer = talk.post(messages=turns, max_tokens=0).json()
    assert (answer["content"], answer["stop_reason"], answer["usage"]["output_tokens"]) == ([], "max_tokens", 0)
    assert talk.post(messages=turns).json()["usage"]["cache_read_input_tokens"] > 50


def test_clients_recognize_that_a_prompt_is_too_long(talk: Talk) -> None:
    turns = [USER | {"content": "a, b. " * 1500}]
    number, error = len(talk.llm.reader.read_chat(turns)), talk.post(messages=turns).json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"] == f"prompt is too long: {number} tokens > 2048 maximum"
    assert count(talk, messages=turns).json()["input_tokens"] == number, "tokens are counted beyond the context too"


# ------------------------------------------------------------------------------------------ thoughts


def test_an_empty_thought_that_is_sent_back_is_dropped(talk: Talk) -> None:
    thought = {"type": "thinking", "thinking": "", "signature": "whatever"}
    empty = [USER, {"role": "assistant", "content": [thought, USE]}, *_result("sunny")[2:]]
    assert talk.prompt(messages=empty) == talk.prompt(messages=_result("sunny"))


def _message(*deltas: OutputDelta, thinks: bool = False, omits_thoughts: bool = False) -> MessageBlocks:
    """Return the writer of a message that gets these deltas."""
    generation: Any = SimpleNamespace(requests=[make_request("a", [1, 2, 3])])
    parser: Any = SimpleNamespace(push=lambda _: list(deltas), finish=list)
    head = {"id": "msg_a", "type": "message", "role": "assistant", "model": "m"}
    return MessageBlocks(head, generation, Blocks(parser), 50, thinks=thinks, omits_thoughts=omits_thoughts)


def test_thoughts_are_blocks_with_a_signature() -> None:
    call = OutputDelta(index=0, id="c", name="read", arguments="{}")
    written = _message(OutputDelta(reasoning="Hm. "), OutputDelta(reasoning="So."), OutputDelta("Yes."), call)
    events = written.write(END)
    assert events[0]["message"]["content"] == []
    kinds = [event.get("delta", event.get("content_block", {})).get("type", event["type"]) for event in events]
    assert kinds == [
        "message_start",
        "thinking", "thinking_delta", "thinking_delta", "signature_delta", "content_block_stop",
        "text", "text_delta", "content_block_stop",
        "tool_use", "input_json_delta", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert events[1]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    thought, text, ended = written.message()["content"]
    assert thought == {"type": "thinking", "thinking": "Hm. So.", "signature": events[4]["delta"]["signature"]}
    assert thought["signature"]
    assert (text, ended["input"]) == ({"type": "text", "text": "Yes."}, {})


def test_a_thought_that_is_omitted_is_known_again(talk: Talk) -> None:
    call = OutputDelta(index=0, id="a", name="read", arguments="{}")
    written = _message(OutputDelta(reasoning="Look it up."), call, omits_thoughts=True)
    events = written.write(END)
    assert all(event["delta"].get("thinking", "") == "" for event in events if "delta" in event)
    answer = written.message()
    assert answer["content"][0]["thinking"] == ""
    prompt = talk.prompt(messages=[USER, {"role": "assistant", "content": answer["content"]}, *_result("sunny")[2:]])
    assert "<think>\nLook it up.\n</think>" in prompt


def test_the_official_client_gets_thoughts_and_sends_them_back() -> None:
    import anthropic

    thought, call = "<think>\nHm.\n</think>\n\n", '<tool_call>\n{"name": "read", "arguments": {}}\n</tool_call>'
    asked: Any = {"model": "tiny", "max_tokens": 100, "tools": [TOOL], "thinking": {"type": "adaptive"}}
    with (
        scripted([f"{thought}Wait.\n{call}"], template=TEMPLATES["thinking"], max_len=2048) as llm,
        served_on_port(llm) as url,
        anthropic.Anthropic(base_url=url, api_key="a", max_retries=0) as client,
    ):
        with client.messages.stream(messages=[USER], **asked) as stream:
            kinds = [event.type for event in stream]
            message = stream.get_final_message()
        result = {"type": "tool_result", "tool_use_id": message.content[-1].id, "content": "sunny"}
        turns: Any = [USER, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
        whole = client.messages.create(messages=turns, **asked)
        prompt = llm.script.prompts[-1]
    assert {"thinking", "signature", "text", "input_json"} <= {*kinds}
    assert (
        [block.type for block in message.content] == ["thinking", "text", "tool_use"] == [b.type for b in whole.content]
    )
    assert (message.content[0].thinking, message.content[1].text.strip()) == ("Hm.", "Wait.")
    assert message.content[0].signature == whole.content[0].signature
    assert "<think>\nHm.\n</think>" in prompt


# ------------------------------------------------------------------------------------- signs of life


def test_a_stream_that_waits_sends_events_that_count() -> None:
    written = _message(OutputDelta(index=0, id="c", name="read"), thinks=True)
    assert [event["type"] for event in written.wait()] == ["message_start"]
    assert written.wait()[0]["content_block"]["type"] == "thinking"
    assert written.wait()[0]["delta"] == {"type": "thinking_delta", "thinking": ""}
    written.write(TextChunk("", [], []))
    assert written.wait()[0]["delta"] == {"type": "input_json_delta", "partial_json": ""}
    assert _message().wait()[0]["type"] == "message_start"
    plain = _message()
    plain.wait()
    assert plain.wait()[0]["content_block"] == {"type": "text", "text": ""}
    assert plain.wait()[0]["delta"] == {"type": "text_delta", "text": ""}


def test_a_message_begins_with_what_the_first_step_found_in_the_cache(talk: Talk) -> None:
    turns = [{"role": "user", "content": "other words " * 60}]
    talk.post(messages=turns)
    lines = talk.post(messages=turns, stream=True).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    first, last = events[0]["message"]["usage"], events[-2]["usage"]
    assert first["cache_read_input_tokens"] == last["cache_read_input_tokens"] > 50
    assert first["input_tokens"] == last["input_tokens"]

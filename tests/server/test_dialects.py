"""What all APIs have in common: texts, formats, stop strings, thoughts, and refusals that name the field."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from hostile import check_refusal
from serving import Server, slow_steps
from specinfer import LLM, SamplingParams
from specinfer.server import pending_response
from specinfer.server.field_checks import IGNORED_HEADER
from talking import HERMES, save_talker
from tests.server.dialects import (
    CHAT,
    COMPLETIONS,
    DIALECTS,
    MESSAGES,
    OLLAMA_CHAT,
    OLLAMA_GENERATE,
    RESPONSES,
    USER,
    lines_of,
    read,
)
from tests.server.scripted_target import TEMPLATES, scripted

CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"]}
FORMAT = {"type": "json_schema", "schema": CITY}
OSLO = '{"city": "Oslo"}'
ENDS = {COMPLETIONS: "stop", CHAT: "stop", RESPONSES: "completed", MESSAGES: "end_turn"}  # the reason; Ollama: stop
CUT = {RESPONSES: "incomplete", MESSAGES: "max_tokens"}  # others: length
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "strict": True,
    "parameters": {**CITY, "additionalProperties": False},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    llm = LLM(save_talker(tmp_path_factory.mktemp("talker"), HERMES), drafters=["ngram"], max_model_len=2048)
    with Server(llm) as served:
        yield served


@pytest.fixture(scope="module")
def thinking() -> Iterator[Server]:
    """A server of a model that thinks, whose answers are written beforehand."""
    with scripted(["Fine."], template=TEMPLATES["thinking"], max_len=512) as llm, Server(llm) as served:
        yield served


@pytest.mark.parametrize("path", DIALECTS)
def test_whole_and_streamed_answers_are_the_output_of_the_library(server: Server, path: str) -> None:
    is_plain = path == COMPLETIONS
    ids = server.llm.tokenizer.encode("Rome?") if is_plain else server.llm.chat_prompt([USER | {"content": "Rome?"}])
    params = SamplingParams(max_tokens=30, temperature=0.7, top_p=0.9, seed=5)
    (output,) = server.llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
    (wanted,) = output.outputs
    for stream in (False, True):
        body = DIALECTS[path].body("Rome?", 30, temperature=0.7, top_p=0.9, seed=5, stream=stream)
        answer = read(server.post(path, body))
        assert answer.text == wanted.text
        assert answer.num_tokens in (len(wanted.token_ids), None)  # streams of OpenAI's have usage if they are asked
        is_cut = wanted.finish_reason == "length"
        assert answer.reason == (CUT.get(path, "length") if is_cut else ENDS.get(path, "stop"))


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_it(server: Server, path: str, stream: bool) -> None:
    body = DIALECTS[path].body(stop=["X"], structured_outputs={"regex": "abcXdef"}, stream=stream, limit=99)
    response = server.post(path, body)
    answer = read(response)
    assert (answer.text, answer.reason) == ("abc", "stop_sequence" if path == MESSAGES else ENDS.get(path, "stop"))
    if path == MESSAGES:
        assert '"stop_sequence":"X"' in response.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields", "wanted"),
    [
        (COMPLETIONS, {"guided_choice": ["zz", "qq"]}, ("zz", "qq")),
        (COMPLETIONS, {"guided_regex": "z{3}"}, ("zzz",)),
        (COMPLETIONS, {"regex": "z{3}"}, ("zzz",)),
        (COMPLETIONS, {"guided_json": {"type": "null"}}, ("null",)),
        (COMPLETIONS, {"json_schema": {"type": "null"}}, ("null",)),
        (COMPLETIONS, {"guided_grammar": 'root ::= "zz"'}, ("zz",)),
        (COMPLETIONS, {"grammar": 'start: "zz"'}, ("zz",)),
        (COMPLETIONS, {"response_format": FORMAT}, (OSLO,)),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}}, (OSLO,)),
        (CHAT, {"structured_outputs": {"choice": ["yes", "no"]}}, ("yes", "no")),
        (RESPONSES, {"text": {"format": {"type": "json_object", "schema": CITY}, "verbosity": "low"}}, (OSLO,)),
        (RESPONSES, {"text": {"format": FORMAT | {"name": "x", "strict": True}}}, (OSLO,)),
        (MESSAGES, {"output_config": {"format": FORMAT}, "thinking": {"type": "disabled"}}, (OSLO,)),
        (MESSAGES, {"output_format": FORMAT}, (OSLO,)),
        (OLLAMA_CHAT, {"format": CITY}, (OSLO,)),
        (OLLAMA_GENERATE, {"format": CITY}, (OSLO,)),
        (OLLAMA_GENERATE, {"format": CITY, "raw": True}, (OSLO,)),
    ],
    ids=str,
)
def test_a_format_is_kept_to_under_each_of_its_names(
    server: Server, path: str, fields: dict[str, Any], wanted: tuple[str, ...], stream: bool
) -> None:
    response = server.post(path, DIALECTS[path].body(limit=200, stream=stream, **fields))
    answer = read(response)
    text = json.dumps(json.loads(answer.text)) if OSLO in wanted else answer.text
    assert text in wanted
    assert answer.reason == ENDS.get(path, "stop")
    assert IGNORED_HEADER not in response.headers


# ------------------------------------------------------------------------------------------ thoughts


@pytest.mark.parametrize(
    ("path", "fields", "is_off"),
    [
        (MESSAGES, {"thinking": {"type": "disabled"}}, True),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, False),
        (MESSAGES, {"thinking": {"type": "adaptive"}}, False),
        (MESSAGES, {"thinking": None}, False),
        (MESSAGES, {"thinking": {"type": "disabled"}, "chat_template_kwargs": {"enable_thinking": True}}, False),
        *(
            (path, {"think": think}, is_off)
            for path in (OLLAMA_CHAT, OLLAMA_GENERATE)
            for think, is_off in ((True, False), (False, True), ("low", False), (None, False))
        ),
    ],
)
def test_thoughts_are_turned_on_and_off_where_the_template_can(
    thinking: Server, path: str, fields: dict[str, Any], is_off: bool
) -> None:
    read(thinking.post(path, DIALECTS[path].body(**fields)))
    end = "assistant\n<think>\n\n</think>\n\n" if is_off else "assistant\n"
    assert thinking.llm.script.prompts[-1].endswith(end)


_CALL: dict[str, Any] = {"name": "read", "arguments": {"x": 1}}
_USE = {"type": "tool_use", "id": "a", "name": "read", "input": {"x": 1}}
_THOUGHT = {"type": "thinking", "thinking": "Look it up.", "signature": "whatever"}
_OF_OLLAMA = {"role": "assistant", "content": "", "thinking": "Look it up.", "tool_calls": [{"function": _CALL}]}
_RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "sunny"}


@pytest.mark.parametrize(
    ("path", "answer", "result"),
    [
        (MESSAGES, {"role": "assistant", "content": [_THOUGHT, _USE]}, {"role": "user", "content": [_RESULT]}),
        (OLLAMA_CHAT, _OF_OLLAMA, {"role": "tool", "content": "noon"}),
    ],
    ids=[MESSAGES, OLLAMA_CHAT],
)
def test_a_thought_that_is_sent_back_goes_to_the_template(
    thinking: Server, path: str, answer: Any, result: Any
) -> None:
    read(thinking.post(path, DIALECTS[path].body(messages=[USER, answer, result])))
    assert "<think>\nLook it up.\n</think>" in thinking.llm.script.prompts[-1]


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES, OLLAMA_CHAT])
def test_no_stream_is_silent_for_long(thinking: Server, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_response, "_SILENCE", 0.0)
    slow_steps(monkeypatch, 0.2)
    with Server(thinking.llm, ping_seconds=0.02) as server:
        events = lines_of(server.post(path, DIALECTS[path].body(limit=3, stream=True)))
    if path == MESSAGES:
        assert sum(event.get("delta", {}).get("text") == "" for event in events) > 3
        assert [event["type"] for event in events].count("message_start") == 1
    elif path == RESPONSES:
        assert [event["type"] for event in events].count("response.in_progress") > 3
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
    else:
        assert sum(event["message"]["content"] == "" and not event["done"] for event in events) > 3


# ------------------------------------------------------------------------------------------ refusals

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
OF_CHAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
# The field's name in OpenAI's APIs; in the others what the message begins with or has in it, as a regular expression.
REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"model": "other"}, "model"),
    (COMPLETIONS, {"best_of": 2}, "best_of"),
    (COMPLETIONS, {"suffix": "a"}, "suffix"),
    (COMPLETIONS, {"guided_json": 5}, "structured_outputs"),
    (COMPLETIONS, {"guided_json": {}, "guided_regex": "a"}, "structured_outputs"),
    (COMPLETIONS, {"json_schema": {}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    (COMPLETIONS, {"grammar": "root ::= ("}, "structured_outputs"),
    (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
    (COMPLETIONS, {"max_tokens": -1}, "max_tokens"),
    (COMPLETIONS, {"min_tokens": 17}, "min_tokens"),
    (COMPLETIONS, {"logit_bias": {"9999": 1}}, "logit_bias"),
    (COMPLETIONS, {"stop_token_ids": [9999]}, "stop_token_ids"),
    (COMPLETIONS, {"logprob_token_ids": [9999]}, "logprob_token_ids"),
    (COMPLETIONS, {"request_id": "a\nb"}, "request_id"),
    (COMPLETIONS, {"cache_salt": ""}, "cache_salt"),
    (COMPLETIONS, {"temperature": "hot"}, "temperature"),
    (COMPLETIONS, {"n": 129}, "n"),
    (COMPLETIONS, {"response_format": {"type": "json_schema"}}, "response_format"),
    (COMPLETIONS, {"tools": [{}]}, "tools"),
    (COMPLETIONS, {"n": 128, "prompt": ["a"] * 2, "max_tokens": 200, "logprobs": 100}, "logprobs"),
    (COMPLETIONS, {"n": 100, "prompt": [[5] * 200] * 2, "prompt_logprobs": 50}, "prompt_logprobs"),
    *(
        (COMPLETIONS, {"prompt": prompt}, "prompt")
        for prompt in (
            [], [[]], [""], "", None, 5, {}, [1.5], ["a", 1], [[1], "a"], [True], [[1, "a"]], [[[1]]], [9999], [-1],
            [[5], [6], [9999]],
        )
    ),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": [USER | {"content": [{"type": "image_url", "image_url": {"url": "http://a"}}]}]}, "messages"),
    (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
    (CHAT, {"audio": {"voice": "a"}}, "audio"),
    (CHAT, {"chat_template": "{{ x }}"}, "chat_template"),
    (CHAT, {"web_search_options": {}}, "web_search_options"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 101}, "top_logprobs"),
    (CHAT, {"logprobs": 5}, "logprobs"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}], "functions": [{"name": "f"}]}, "functions"),
    (CHAT, {"function_call": {"name": "weather"}}, "function_call"),
    (CHAT, {"tool_choice": "required"}, "tool_choice"),
    (CHAT, {"response_format": OF_CHAT, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    (CHAT, {"min_tokens": 10**6}, "min_tokens"),
    (CHAT, {"max_tokens": "five"}, "max_tokens"),
    (CHAT, {"add_special_tokens": True}, "add_special_tokens"),
    (CHAT, {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    (CHAT, {"thinking_budget": -2}, "thinking_budget"),
    *(
        (RESPONSES, {"input": items}, "input")
        for items in (
            None, 3, [], [USER] * 5000, [{"type": "reasoning"}], [USER, {"type": "compaction_trigger"}],
            [USER, {"type": "item_reference", "id": "msg_1"}], [USER, {"type": 3}],
            [{"role": "assistant", "content": "a", "tool_calls": [3]}], [{"type": "item_reference", "id": "x"}],
            [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x/"}]}],
            [{"type": "function_call", "name": 5, "arguments": "{", "call_id": "a"}], ["a"],
        )
    ),
    (RESPONSES, {"instructions": 3}, "instructions"),
    (RESPONSES, {"model": "other"}, "model"),
    (RESPONSES, {"background": True}, "background"),
    (RESPONSES, {"conversation": "c"}, "conversation"),
    (RESPONSES, {"previous_response_id": "r"}, "previous_response_id"),
    (RESPONSES, {"prompt": {"id": "p"}}, "prompt"),
    (RESPONSES, {"n": 2}, "n"),
    (RESPONSES, {"max_tokens": 2}, "max_tokens"),
    (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens"),
    (RESPONSES, {"tools": [WEATHER], "tool_choice": 3}, "tool_choice"),
    (RESPONSES, {"response_format": {"type": "text"}}, "response_format"),
    (RESPONSES, {"truncation": "middle"}, "truncation"),
    (RESPONSES, {"include": ["message.output_text.logprobs"]}, "include"),
    (RESPONSES, {"text": {"format": 3}}, "text"),
    (RESPONSES, {"text": {"format": {"type": "grammar"}}}, "text"),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "x"}}}, "text"),
    (RESPONSES, {"tools": [{"type": "function", "name": "a b"}]}, "tools"),
    (RESPONSES, {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
    (RESPONSES, {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    (RESPONSES, {"chat_template": "{{ 1 }}"}, "chat_template"),
    (MESSAGES, {"model": "other"}, "not served here"),
    (MESSAGES, {"messages": [USER | {"content": "a" * 4000}]}, "2048"),
    (MESSAGES, {"tools": [{"name": "a b", "input_schema": {}}]}, r"tools\[0\]\.name"),
    (MESSAGES, {"tool_choice": {"type": "tool", "name": "x"}, "tools": [{"name": "f"}]}, r"tool_choice\.name"),
    (MESSAGES, {"messages": [USER | {"content": [IMAGE]}]}, r"messages\[0\]\.content\[0\]\.type"),
    (MESSAGES, {"messages": []}, "messages"),
    (MESSAGES, {"messages": [{"role": "robot", "content": "a"}]}, r"messages\[0\]\.role"),
    (MESSAGES, {"system": 5}, "system: must be text"),
    (MESSAGES, {"messages": [USER | {"content": []}]}, r"messages\[0\]\.content: empty"),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema"}}}, r"output_config\.format: must be"),
    (MESSAGES, {"temperature": -1.0}, "temperature"),
    (MESSAGES, {"n": 2}, "n: "),
    (MESSAGES, {"trace": True}, "trace"),
    (MESSAGES, {"max_tokens": -1}, "max_tokens"),
    (OLLAMA_GENERATE, {"model": "other"}, "not served here"),
    (OLLAMA_GENERATE, {"prompt": "a" * 4000}, "2048"),
    (OLLAMA_GENERATE, {"options": {"temperature": -1}}, r"options\.temperature"),
    (OLLAMA_GENERATE, {"options": {"temperature": "hot"}}, r"options\.temperature"),
    (OLLAMA_GENERATE, {"options": {"repeat_penalty": -1.0}}, r"options\.repeat_penalty"),
    (OLLAMA_GENERATE, {"template": "{{ .Prompt }}"}, "template"),
    (OLLAMA_GENERATE, {"context": [1]}, "context"),
    (OLLAMA_GENERATE, {"raw": True, "system": "a"}, "system"),
    (OLLAMA_GENERATE, {"images": ["YWJjZA=="]}, "images"),
    (OLLAMA_GENERATE, {"format": {"enum": ["a"] * 3000}}, "format"),
    (OLLAMA_CHAT, {"options": {"top_k": 5.5}}, r"options\.top_k"),
    (OLLAMA_CHAT, {"messages": [USER, USER | {"images": ["iVBORw0KGgo="]}]}, r"messages\[1\]\.images"),
    (OLLAMA_CHAT, {"messages": [USER | {"content": "a, b. " * 400}]}, "2048"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "fields", "named"), REFUSALS, ids=lambda value: repr(value)[:60])
def test_refusals_name_the_field(server: Server, path: str, fields: dict[str, Any], named: str, stream: bool) -> None:
    answer = server.post(path, DIALECTS[path].body("a") | {"stream": stream} | fields)
    assert answer.status_code == (404 if "other" in fields.values() else 400), answer.text
    error = check_refusal(answer)
    if "param" not in error:
        assert re.search(named, error["message"]), error
        return
    assert error["param"].split("[")[0] == named, error
    assert error["message"].startswith(named) or path != RESPONSES or named == "input"
    assert server.engine.num_live == 0, "nothing runs"

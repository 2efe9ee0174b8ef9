"""/v1/chat/completions: answers, calls of tools, formats and log-probabilities, whole and streamed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from serving import choices_of, events_of, post
from specinfer import LLM, SamplingParams
from specinfer.server.field_checks import IGNORED_HEADER
from tests.server.scripted_target import scripted
from tiny import save_model, save_tokenizer

MESSAGES = [{"role": "system", "content": "say little"}, {"role": "user", "content": "hello"}]
PATH = "/v1/chat/completions"
CITY = {"type": "string", "maxLength": 6}
WEATHER = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": CITY, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "strict": True,
}
TOOLS = [{"type": "function", "function": WEATHER}]
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "weather", "schema": WEATHER["parameters"], "strict": True},
}
THIS_TOOL = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo")


def ask(llm: LLM, *bodies: dict[str, Any]) -> list[httpx.Response]:
    return post(llm, PATH, *({"messages": MESSAGES, "seed": 5} | body for body in bodies))


def deltas_of(response: httpx.Response, index: int = 0) -> list[dict[str, Any]]:
    choices = [choice for event in events_of(response.text) for choice in event["choices"]]
    return [choice["delta"] for choice in choices if choice["index"] == index]


def content_of(response: httpx.Response, index: int = 0) -> str:
    return "".join(delta.get("content") or "" for delta in deltas_of(response, index))


def calls_of(deltas: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Names and arguments of calls, put together as clients do."""
    calls: dict[int, list[str]] = {}
    for piece in (piece for delta in deltas for piece in delta.get("tool_calls", ())):
        call = calls.setdefault(piece["index"], ["", ""])
        call[0] += piece["function"].get("name", "")
        call[1] += piece["function"]["arguments"]
    return [(name, arguments) for name, arguments in calls.values()]


def test_whole_and_streamed_answers_are_the_output_of_chat(llm: LLM) -> None:
    params = SamplingParams(seed=5, max_tokens=25, n=2)
    said = [output.text for output in llm.chat(MESSAGES, params)[0].outputs]
    body = {"max_tokens": 25, "n": 2}
    whole, stream, plain = ask(llm, body, body | {"stream": True}, body | {"speculative": {"tree": "off"}})
    assert [choice["message"]["content"] for choice in choices_of(whole)] == said
    assert [choice["message"]["content"] for choice in choices_of(plain)] == said
    assert [content_of(stream, i) for i in range(2)] == said
    for index in range(2):
        deltas = deltas_of(stream, index)
        assert deltas[0]["role"] == "assistant"
        assert all("role" not in delta for delta in deltas[1:])


def test_an_answer_may_fill_the_context(llm: LLM) -> None:
    ids = llm.tokenizer.encode("hello " * llm.max_model_len)[: llm.max_model_len - 100]
    (answer,) = ask(llm, {"messages": [{"role": "user", "content": llm.tokenizer.decode(ids)}], "ignore_eos": True})
    assert answer.json()["usage"]["total_tokens"] == llm.max_model_len
    assert choices_of(answer)[0]["finish_reason"] == "length"


def test_the_newer_name_of_the_limit_wins(llm: LLM) -> None:
    old, both = ask(
        llm,
        {"max_tokens": 3, "ignore_eos": True},
        {"max_tokens": 9, "max_completion_tokens": 4, "ignore_eos": True},
    )
    assert old.json()["usage"]["completion_tokens"] == 3
    assert both.json()["usage"]["completion_tokens"] == 4


def test_logprobs_list_every_token(llm: LLM) -> None:
    body = {"max_tokens": 12, "logprobs": True, "top_logprobs": 3, "ignore_eos": True}
    whole, stream, bare = ask(
        llm, body | {"return_token_ids": True, "prompt_logprobs": 1}, body | {"stream": True}, {"max_tokens": 4}
    )
    (choice,) = choices_of(whole)
    told = choice["logprobs"]["content"]
    assert len(told) == len(choice["token_ids"]) == 12
    text = choice["message"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in told).decode() == text
    for entry in told:
        best = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(best) == 3
        assert best == sorted(best, reverse=True)
        assert (entry["logprob"] >= best[-1]) == (entry["token"] in [top["token"] for top in entry["top_logprobs"]])
    streamed = [
        entry
        for event in events_of(stream.text)
        for choice in event["choices"]
        for entry in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == told
    assert whole.json()["prompt_token_ids"] == llm.chat_prompt(MESSAGES)
    assert len(whole.json()["prompt_logprobs"]) == len(whole.json()["prompt_token_ids"])
    assert choices_of(bare)[0]["logprobs"] is None


def test_the_logprob_of_the_end_is_in_an_event_without_text() -> None:
    text = "Hello there, hello there, hello there."
    body = {
        "messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "stream": True,
        "prediction": {"type": "content", "content": text}, "speculative": {"tree": "1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1"},
    }  # fmt: skip
    with scripted([text], drafters=["ngram"]) as llm:
        (answer,) = ask(llm, body)
    choices = [event["choices"][0] for event in events_of(answer.text) if event["choices"]]
    tokens = [[entry["token"] for entry in (choice["logprobs"] or {"content": []})["content"]] for choice in choices]
    assert max(map(len, tokens)) > 1  # several tokens of a step are in one event
    assert [choice["delta"].get("content") or "" for choice in choices[:-1]] == ["".join(each) for each in tokens[:-1]]
    assert (choices[-1]["delta"], len(tokens[-1]), choices[-1]["finish_reason"]) == ({}, 1, "stop")


def test_logprobs_of_requested_token_ids_are_returned(llm: LLM) -> None:
    (answer,) = ask(llm, {"max_tokens": 3, "logprobs": True, "logprob_token_ids": [40, 41], "ignore_eos": True})
    for entry in choices_of(answer)[0]["logprobs"]["content"]:
        assert [top["token"] for top in entry["top_logprobs"]] == [llm.tokenizer.decode([i]) for i in (40, 41)]


def test_a_required_call_is_a_valid_one(llm: LLM) -> None:
    body = {"tools": TOOLS, "tool_choice": THIS_TOOL, "max_tokens": 300}
    whole, stream = ask(llm, body, body | {"stream": True})
    (choice,) = choices_of(whole)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["function"]["name"] == "weather"
    arguments = json.loads(call["function"]["arguments"])
    assert set(arguments) == {"city", "days"}
    deltas = deltas_of(stream)
    assert calls_of(deltas) == [("weather", call["function"]["arguments"])]
    assert content_of(stream) == ""
    pieces = [piece for delta in deltas for piece in delta.get("tool_calls", ())]
    assert pieces[0]["id"]
    assert all("id" not in piece for piece in pieces[1:])
    assert len(pieces) > 2  # arguments come as they are written
    assert events_of(stream.text)[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_no_call_is_made_where_none_is_wanted(llm: LLM) -> None:
    (answer,) = ask(llm, {"tools": TOOLS, "tool_choice": "none", "max_tokens": 8})
    (choice,) = choices_of(answer)
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] in ("stop", "length")


def test_functions_are_answered_as_they_were_asked_for(llm: LLM) -> None:
    body = {"functions": [WEATHER], "function_call": {"name": "weather"}, "max_tokens": 300}
    whole, stream = ask(llm, body, body | {"stream": True})
    (choice,) = choices_of(whole)
    assert choice["finish_reason"] == "function_call"
    assert "tool_calls" not in choice["message"]
    call = choice["message"]["function_call"]
    assert call["name"] == "weather"
    pieces = [delta["function_call"] for delta in deltas_of(stream) if "function_call" in delta]
    assert "".join(piece.get("name", "") for piece in pieces) == "weather"
    assert "".join(piece["arguments"] for piece in pieces) == call["arguments"]


def test_what_no_grammar_can_enforce_is_named_in_a_header_or_refused_if_strict(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1]}, "b": {"type": "string", "pattern": "^(?!x)y{0,3}$"}}}
    name, tool = "properties.b.pattern", {"type": "function", "function": {"name": "f", "parameters": schema}}
    bodies: list[dict[str, Any]] = [
        {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}, "odd": 1},
        {"tools": [tool], "tool_choice": "required", "stream": True},
        {"tools": [tool | {"function": tool["function"] | {"strict": True}}]},
    ]
    of_format, of_tool, strict = ask(llm, *(body | {"max_tokens": 5} for body in bodies))
    assert of_format.headers["x-specinfer-ignored-fields"] == f"odd, response_format.schema.{name}"
    assert of_tool.headers["x-specinfer-ignored-fields"] == f"tools[0].function.parameters.{name}"
    assert (strict.status_code, strict.json()["error"]["param"]) == (400, "tools")
    assert f"tools[0].function.parameters: {name}: look-around" in strict.json()["error"]["message"]


def test_a_model_without_a_template_is_reported(model_folder: Callable[..., Path]) -> None:
    (answer,) = ask(LLM(model_folder("llama", tokenizer=True), drafters=[]), {})
    assert answer.status_code == 400
    assert "chat template" in answer.json()["error"]["message"]


def test_the_last_message_can_be_gone_on_with(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m['role'] }}, {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant, {% endif %}{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}"
    )
    folder = save_tokenizer(save_model(tmp_path, "llama"), template)
    llm = LLM(folder, drafters=[])
    begun = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "the th"}]
    base = {"max_tokens": 1, "return_token_ids": True}
    new, goes_on, effort = ask(
        llm,
        base | {"messages": begun[:1]},
        base | {"messages": begun, "continue_final_message": True},
        base | {"messages": begun[:1], "reasoning_effort": "low"},
    )
    prompts = [llm.tokenizer.decode(answer.json()["prompt_token_ids"]) for answer in (new, goes_on, effort)]
    assert prompts == ["user, hi\nassistant, ", "user, hi\nassistant, the th", "user, hi\nassistant, low"]


CUT = {"role": "assistant", "content": None, "tool_calls": [
    {"id": None, "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ro'}}
]}  # fmt: skip


@pytest.mark.parametrize(
    "messages",
    [
        [MESSAGES[1], CUT, {"role": "tool", "tool_call_id": None, "content": {"degrees": 20}}],
        [MESSAGES[1], MESSAGES[0], MESSAGES[1]],
        [*MESSAGES, {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, "Yes."]}, MESSAGES[1]],
        [{"role": "user", "content": ["a", {"text": "b"}]}],
    ],
    ids=range(4),
)
@pytest.mark.parametrize("stream", [False, True])
def test_histories_of_any_client_are_served(llm: LLM, messages: list[dict[str, Any]], stream: bool) -> None:
    plain, with_tools = ask(
        llm,
        {"messages": messages, "max_tokens": 3, "stream": stream},
        {"messages": messages, "max_tokens": 3, "stream": stream, "tools": TOOLS},
    )
    assert (plain.status_code, with_tools.status_code) == (200, 200), plain.text + with_tools.text
    assert IGNORED_HEADER not in plain.headers


def test_a_call_that_was_cut_off_comes_back_as_it_was_sent(llm: LLM) -> None:
    (answer,) = ask(llm, {"tools": TOOLS, "tool_choice": THIS_TOOL, "max_tokens": 24})
    (choice,) = choices_of(answer)
    assert choice["finish_reason"] == "length"
    call = choice["message"]["tool_calls"][0]
    with pytest.raises(json.JSONDecodeError):
        json.loads(call["function"]["arguments"])
    result = {"role": "tool", "tool_call_id": call["id"], "content": "not JSON"}
    (again,) = ask(llm, {"messages": [*MESSAGES, choice["message"], result], "max_tokens": 3})
    assert again.status_code == 200, again.text
    assert IGNORED_HEADER not in again.headers


@pytest.mark.parametrize("stream", [False, True])
def test_what_was_ignored_when_a_conversation_was_read_is_named(llm: LLM, stream: bool) -> None:
    messages = [MESSAGES[1] | {"timestamp": 5, "cache_control": {}}]
    kwargs = {"preserve_thinking": True, "add_vision_id": 1}
    (answer,) = ask(
        llm,
        {"messages": messages, "chat_template_kwargs": kwargs, "foo": 1, "max_tokens": 2, "stream": stream},
    )
    assert answer.status_code == 200, answer.text
    assert answer.headers[IGNORED_HEADER].split(", ") == [
        "foo", "messages.cache_control", "messages.timestamp", "chat_template_kwargs.add_vision_id",
        "chat_template_kwargs.preserve_thinking",
    ]  # fmt: skip

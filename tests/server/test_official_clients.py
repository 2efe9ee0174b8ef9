"""The official clients of OpenAI, Anthropic and Ollama against one server, whole and streamed."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest

from serving import served_on_port
from specinfer import LLM, SamplingParams
from specinfer.quantize.checkpoint import write_quantized
from specinfer.quantize.options import QuantizeConfig
from talking import HERMES, save_talker

KEY = "a-key-for-tests"
MESSAGES: list[Any] = [{"role": "user", "content": "Rome?"}]
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"],
          "additionalProperties": False}  # fmt: skip
CALL = {"type": "tool_use", "id": "a", "name": "weather", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "sunny"}
TOOL = {"name": "weather", "description": "Reports it.", "input_schema": SCHEMA}
GREEDY: Any = {"temperature": 0}
FUNCTION = {"type": "function", "function": {"name": "weather", "description": "Reports it.", "parameters": SCHEMA}}


@dataclass
class Clients:
    """One client of each kind, and the model behind them."""

    llm: LLM
    url: str
    openai: Any
    anthropic: Any
    ollama: ollama.Client


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clients]:
    import anthropic  # seconds, which only the process that runs these tests needs
    import openai

    llm = LLM(save_talker(tmp_path_factory.mktemp("talker"), HERMES), drafters=["ngram"], max_model_len=2048)
    with (
        served_on_port(llm, api_keys=(KEY,)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as of_openai,
        anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0) as of_anthropic,
        ollama.Client(url, headers={"Authorization": f"Bearer {KEY}"}) as of_ollama,
    ):
        yield Clients(llm, url, of_openai, of_anthropic, of_ollama)


@pytest.fixture(scope="module")
def wanted(clients: Clients) -> str:
    """The answer of the model itself."""
    ids = clients.llm.reader.read_chat(MESSAGES)
    return clients.openai.completions.create(
        model="tiny", prompt=ids, max_tokens=9, temperature=0, extra_body={"skip_special_tokens": True}
    ).choices[0].text  # fmt: skip


def test_all_clients_get_the_same_text(clients: Clients, wanted: str) -> None:
    chat = clients.openai.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=9, temperature=0)
    assert chat.choices[0].message.content == wanted

    message = clients.anthropic.messages.create(model="tiny", messages=MESSAGES, max_tokens=9, extra_body=GREEDY)
    assert [block.text for block in message.content if block.type == "text"] == [wanted]
    assert message.stop_reason == "max_tokens"
    assert chat.usage is not None
    read = message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
    assert (read, message.usage.output_tokens) == (chat.usage.prompt_tokens, chat.usage.completion_tokens)
    assert message._request_id == message.id.removeprefix("msg_")

    options = {"num_predict": 9, "temperature": 0}
    answer = clients.ollama.chat("tiny", MESSAGES, options=options)
    assert answer.message.content == wanted
    assert (answer.done, answer.done_reason, answer.eval_count) == (True, "length", chat.usage.completion_tokens)
    assert answer.prompt_eval_count == chat.usage.prompt_tokens
    assert (answer.total_duration or 0) >= (answer.eval_duration or 0) > 0
    assert clients.ollama.generate("tiny:latest", "Rome?", options=options).response == wanted


def test_all_streams_sum_to_the_same_text(clients: Clients, wanted: str) -> None:
    events = clients.openai.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=9, temperature=0, stream=True
    )
    assert "".join(event.choices[0].delta.content or "" for event in events) == wanted

    with clients.anthropic.messages.stream(model="tiny", messages=MESSAGES, max_tokens=9, extra_body=GREEDY) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert "".join(block.text for block in final.content if block.type == "text") == wanted
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert final.usage.output_tokens == 9
    assert final.stop_reason == "max_tokens"
    raw = list(clients.anthropic.messages.create(model="tiny", messages=MESSAGES, max_tokens=9, stream=True))
    assert [event.type for event in raw if event.type != "content_block_delta"] == [
        "message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip

    options = {"num_predict": 9, "temperature": 0}
    pieces = list(clients.ollama.chat("tiny", MESSAGES, options=options, stream=True))
    assert "".join(piece.message.content or "" for piece in pieces) == wanted
    assert [piece.done for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    parts = list(clients.ollama.generate("tiny", "Rome?", options=options, stream=True))
    assert "".join(part.response or "" for part in parts) == wanted
    assert parts[-1].eval_count == 9


def test_tools(clients: Clients) -> None:
    asked: Any = {"model": "tiny", "messages": MESSAGES, "tools": [TOOL], "max_tokens": 200}
    asked["tool_choice"] = {"type": "tool", "name": "weather"}
    message = clients.anthropic.messages.create(**asked)
    (block,) = message.content
    assert block.type == "tool_use"
    assert (message.stop_reason, block.name) == ("tool_use", "weather")
    assert block.input in ({"city": "Paris"}, {"city": "Rome"})
    with clients.anthropic.messages.stream(**asked, extra_body=GREEDY) as stream:
        parts = [event.partial_json for event in stream if event.type == "input_json"]
        streamed = stream.get_final_message().content[0]
    assert streamed.type == "tool_use"
    assert json.loads("".join(parts)) == streamed.input
    result = {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "sunny"}]}
    turns: Any = [
        *MESSAGES,
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "", "signature": ""}, *message.content]},
        {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
    ]
    counted = clients.anthropic.messages.count_tokens(model="tiny", messages=turns, tools=[TOOL], system="Be brief.")
    chat: Any = [
        {"role": "system", "content": "Be brief."},
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": block.id, "type": "function", "function": {"name": "weather", "arguments": json.dumps(block.input)}}
        ]},
        {"role": "tool", "tool_call_id": block.id, "content": "sunny"},
        {"role": "user", "content": "And?"},
    ]  # fmt: skip
    ids = clients.llm.reader.read_chat(chat, tools=[FUNCTION])
    assert counted.input_tokens == len(ids)


def test_ollama_is_told_the_format_of_the_weights_whatever_the_model_is_called(
    clients: Clients, tmp_path: Path
) -> None:
    assert clients.ollama.show("tiny").details.format == "safetensors"
    config = QuantizeConfig(model=str(clients.llm.target.loaded.folder), to="q8_0", out=tmp_path / "tiny.gguf")
    write_quantized(config)
    with LLM(tmp_path / "tiny.gguf") as llm, served_on_port(llm) as url, ollama.Client(url) as client:
        assert client.list().models[0].details.format == "gguf"


def test_tools_of_ollama(clients: Clients) -> None:
    # The grammar only forces calls where the request does, which Ollama's API cannot: the field is chat completions'.
    body = {"model": "tiny", "messages": MESSAGES, "tools": [FUNCTION], "tool_choice": "required",
            "parallel_tool_calls": False}  # fmt: skip
    headers = {"Authorization": f"Bearer {KEY}"}
    lines = httpx.post(f"{clients.url}/api/chat", json=body, headers=headers).text.splitlines()
    pieces = [ollama.ChatResponse.model_validate_json(line) for line in lines]
    (call,) = [call for piece in pieces for call in piece.message.tool_calls or ()]
    assert call.function.name == "weather"
    assert call.function.arguments in ({"city": "Paris"}, {"city": "Rome"})
    turns: list[Any] = [
        *MESSAGES,
        {"role": "assistant", "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_name": "weather", "content": "sunny"},
    ]
    answer = clients.ollama.chat("tiny", turns, tools=[FUNCTION], options={"num_predict": 3})
    assert answer.eval_count == 3


def test_the_answer_continues_a_last_message_of_the_assistant(clients: Clients) -> None:
    turns: Any = [*MESSAGES, {"role": "assistant", "content": "It is"}]
    counted = clients.anthropic.messages.count_tokens(model="tiny", messages=turns)
    ids = clients.llm.reader.read_chat(turns, add_generation_prompt=False, continue_final_message=True)
    assert counted.input_tokens == len(ids)


def test_models_of_ollama(clients: Clients) -> None:
    (model,) = clients.ollama.list().models
    assert (model.model, model.size) == ("tiny", clients.llm.target.loaded.num_bytes)
    (running,) = clients.ollama.ps().models
    assert (running.name, running.context_length) == ("tiny", 2048)
    shown = clients.ollama.show("tiny")
    assert shown.capabilities == ["completion", "tools"]
    assert (shown.template, shown.details) == (HERMES, model.details)
    assert clients.ollama.generate("tiny").done_reason == "load"
    assert clients.ollama.chat("tiny").done_reason == "load"
    assert httpx.get(f"{clients.url}/api/version", headers={"x-api-key": KEY}).json()["version"]


def test_an_answer_of_thoughts_alone_is_not_continued(clients: Clients) -> None:
    thoughts: Any = {"role": "assistant", "content": [{"type": "thinking", "thinking": "a", "signature": "b"}]}
    with_thoughts, without = (
        clients.anthropic.messages.count_tokens(model="tiny", messages=turns).input_tokens
        for turns in ([*MESSAGES, thoughts], MESSAGES)
    )
    assert with_thoughts == without


def test_errors(clients: Clients) -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError, match="not served here") as wrong:
        clients.anthropic.messages.create(model="other", messages=MESSAGES, max_tokens=1)
    assert wrong.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="system: must be text"):
        clients.anthropic.messages.create(model="tiny", messages=MESSAGES, max_tokens=1, system=5)
    with pytest.raises(anthropic.AuthenticationError, match="API key"):
        clients.anthropic.with_options(api_key="wrong").messages.create(model="tiny", messages=MESSAGES, max_tokens=1)


def test_errors_of_ollama(clients: Clients) -> None:
    import openai

    with pytest.raises(ollama.ResponseError, match="not served here") as wrong:
        clients.ollama.generate("other", "a")
    assert wrong.value.status_code == 404
    with ollama.Client(clients.url) as stranger, pytest.raises(ollama.ResponseError, match="API key") as closed:
        stranger.list()
    assert closed.value.status_code == 401
    with pytest.raises(ollama.ResponseError, match="2048"):
        next(iter(clients.ollama.generate("tiny", "a" * 4000, stream=True)))
    for refusing in (
        lambda: clients.ollama.pull("a"), lambda: clients.ollama.push("a"), lambda: clients.ollama.delete("a"),
        lambda: clients.ollama.copy("a", "b"), lambda: clients.ollama.create("a", from_="b"),
        lambda: clients.ollama.embed("tiny", "a"), lambda: clients.ollama.embeddings("tiny", "a"),
    ):  # fmt: skip
        with pytest.raises(ollama.ResponseError, match="/api/"):
            refusing()
    with pytest.raises(openai.BadRequestError, match="no embeddings"):
        clients.openai.embeddings.create(model="tiny", input="a")


def test_requests_of_clients_that_leave_end(clients: Clients) -> None:
    body: Any = {"ignore_eos": True}
    with clients.anthropic.messages.create(
        model="tiny", messages=MESSAGES, max_tokens=1900, stream=True, extra_body=body
    ) as stream:
        next(iter(stream))
    lines = {"model": "tiny", "prompt": "a", **body}
    with httpx.stream("POST", f"{clients.url}/api/generate", json=lines, headers={"x-api-key": KEY}) as answer:
        next(answer.iter_lines())
    end = time.monotonic() + 10
    while httpx.get(f"{clients.url}/load", headers={"x-api-key": KEY}).json()["server_load"]:
        assert time.monotonic() < end
        time.sleep(0.02)


def test_options_and_counters(clients: Clients) -> None:
    body = {
        "model": "tiny", "prompt": "abc", "raw": True, "stream": False, "logprobs": True, "top_logprobs": 2,
        "options": {"num_predict": 5, "seed": 3, "top_k": 5, "top_p": 0.9, "num_gpu": 1, "num_ctx": 2048, "odd": 1},
        "speculative": {"tree": "off"},
    }  # fmt: skip
    answer = httpx.post(f"{clients.url}/api/generate", json=body, headers={"x-api-key": KEY})
    assert answer.headers["x-specinfer-ignored-fields"] == "options.odd"
    found = answer.json()
    assert len(found["logprobs"]) == found["eval_count"] == 5
    assert [len(entry["top_logprobs"]) for entry in found["logprobs"]] == [2] * 5
    assert found["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
    params = SamplingParams(max_tokens=5, seed=3, top_k=5, top_p=0.9)
    same = clients.openai.completions.create(
        model="tiny", prompt="abc", max_tokens=5, seed=3, top_p=params.top_p, extra_body={"top_k": 5}
    )
    assert found["response"] == same.choices[0].text

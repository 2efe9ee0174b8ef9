"""Requests that are larger than the context: each API says so in its own words, and limits give way to it."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from serving import ask
from specinfer import LLM, RequestError, SamplingParams
from specinfer.core.errors import ContextLengthError
from tests.server.dialects import CHAT, COMPLETIONS, DIALECTS, MESSAGES, OLLAMA_CHAT, RESPONSES, read

pytestmark = pytest.mark.usefixtures("small_demo")
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
CONTEXT = 64
OF_OPENAI = [COMPLETIONS, CHAT, RESPONSES]


@pytest.fixture(scope="module")
def llm(small_demo: None) -> Iterator[LLM]:
    with LLM("demo", max_model_len=CONTEXT) as made:
        made.reader.chat_template = TEMPLATE
        yield made


def body_of(path: str, text: str, limit: int | None = None, **fields: Any) -> Any:
    return DIALECTS[path].body(text, limit, **fields)


def message_of(answer: httpx.Response) -> str:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return str(error if isinstance(error, str) else error["message"])


@pytest.mark.parametrize("length", [100, 20_000], ids=["encoded", "not encoded"])
def test_a_prompt_that_is_too_long_is_refused_in_the_words_that_openais_clients_search_for(
    llm: LLM, length: int
) -> None:
    answers = ask(llm, *((path, body_of(path, "a b " * length)) for path in OF_OPENAI))
    for path, answer in zip(OF_OPENAI, answers, strict=True):
        message, error = message_of(answer), answer.json()["error"]
        assert message.startswith(f"This model's maximum context length is {CONTEXT} tokens. However, your "), path
        assert "Please reduce the length of the" in message
        assert (error["code"], error["param"]) == ("context_length_exceeded", DIALECTS[path].prompt)


def test_the_lengths_reach_the_dialects(llm: LLM) -> None:
    with pytest.raises(ContextLengthError) as refused:
        llm.generate([5] * 70)
    assert (refused.value.num_tokens, refused.value.max_model_len) == (70, CONTEXT)
    with pytest.raises(ContextLengthError, match=r"^prompts\[1\]: This model's maximum context length is 64") as listed:
        llm.generate([[5], [5] * CONTEXT])
    assert listed.value.num_tokens == CONTEXT
    long = [{"role": "user", "content": "a" * 10**5}]
    with pytest.raises(ContextLengthError, match=r"^messages\[1\]: This model's .* at least") as chats:
        llm.chat([[{"role": "user", "content": "a"}], long])
    assert CONTEXT < chats.value.num_tokens < 10**5


@pytest.mark.parametrize("stream", [False, True])
def test_a_limit_above_the_room_is_lowered_on_every_route(llm: LLM, stream: bool) -> None:
    if stream:
        answers = ask(llm, *((p, body_of(p, "a", 32_000, ignore_eos=True) | {"stream": True}) for p in DIALECTS))
        assert [answer.status_code for answer in answers] == [200] * len(DIALECTS)
        return
    answers = ask(llm, *((path, body_of(path, "a", 32_000, ignore_eos=True)) for path in DIALECTS))
    reasons = {RESPONSES: "incomplete", MESSAGES: "model_context_window_exceeded"}
    for path, response in zip(DIALECTS, answers, strict=True):
        answer = read(response)
        assert CONTEXT - 16 <= (answer.num_tokens or 0) < CONTEXT, path
        assert answer.reason == reasons.get(path, "length"), path
    bodies = dict(zip(DIALECTS, (answer.json() for answer in answers), strict=True))
    assert bodies[RESPONSES]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert bodies[OLLAMA_CHAT]["prompt_eval_count"] + bodies[OLLAMA_CHAT]["eval_count"] == CONTEXT


def test_a_limit_above_the_room_is_lowered_in_the_library(llm: LLM) -> None:
    (output,) = llm.generate([5] * 60, SamplingParams(max_tokens=10**18, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 4
    assert output.outputs[0].finish_reason == "length"


def test_log_probabilities_are_counted_for_the_tokens_that_fit(llm: LLM) -> None:
    (answer,) = ask(llm, ("/v1/completions", body_of("/v1/completions", "a", 10**9, logprobs=1)))
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("field", ["truncate_prompt_tokens", "truncation"])
def test_a_limit_above_the_context_leaves_the_prompt_when_it_is_cut(llm: LLM, field: str) -> None:
    path, value = ("/v1/completions", -1) if field == "truncate_prompt_tokens" else ("/v1/responses", "auto")
    (answer,) = ask(llm, (path, body_of(path, "a b " * 100, 32_000, **{field: value})))
    usage = answer.json()["usage"]
    assert usage.get("prompt_tokens", usage.get("input_tokens")) == CONTEXT - 1


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"truncate_prompt_tokens": 60}], ids=str)
@pytest.mark.parametrize("path", DIALECTS)
def test_tokens_that_cannot_be_generated_are_refused_by_name(llm: LLM, path: str, fields: dict[str, Any]) -> None:
    text = "a b " * (50 if "truncate_prompt_tokens" in fields else 12)
    (limited, unlimited) = ask(
        llm,
        (path, body_of(path, text, 60, min_tokens=60) | fields),
        (path, body_of(path, text, min_tokens=60) | fields),
    )
    assert message_of(limited).startswith("min_tokens")
    assert message_of(unlimited).startswith("min_tokens")


def test_of_several_prompts_one_that_is_too_long_for_its_least_output_is_refused(llm: LLM) -> None:
    body = {"prompt": [[5], [5] * 60], "min_tokens": 8}
    assert message_of(ask(llm, ("/v1/completions", body))[0]).startswith("min_tokens: 8 do not fit")
    with pytest.raises(RequestError, match=r"^prompts\[1\]: min_tokens: 8"):
        llm.generate([[5], [5] * 60], SamplingParams(min_tokens=8))


def test_a_prediction_that_is_too_long_is_cut(llm: LLM) -> None:
    predicted = {"type": "content", "content": "a b " * 20_000}
    (answer,) = ask(llm, ("/v1/completions", body_of("/v1/completions", "a", 4, prediction=predicted)))
    assert read(answer).num_tokens

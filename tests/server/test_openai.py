"""The official client against both endpoints: over a socket and within the process, whole, raw, streamed, parsed."""

from collections.abc import Callable, Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from serving import served_on_port
from specinfer import LLM

PROMPT = "def add(a, b):"
MESSAGES: list[Any] = [{"role": "user", "content": "say it"}]


class Inner(BaseModel):
    """A model within a model, which comes as a reference in the schema."""

    flag: bool


class Answer(BaseModel):
    """What the client asks the answer to be."""

    color: Literal["red", "blue"]
    size: int = Field(ge=1, le=9)
    inner: Inner


class Add(BaseModel):
    """Adds."""

    left: Literal[1, 2]
    right: Literal[3, 4]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo")


@pytest.fixture(scope="module")
def client(llm: LLM) -> Iterator[openai.OpenAI]:
    with served_on_port(llm) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_completions(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="tiny", prompt=[PROMPT, "x"], n=2, max_tokens=9, seed=3, logprobs=2)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens) == whole.choices[0].text
    stream = client.completions.create(
        model="tiny", prompt=[PROMPT, "x"], n=2, max_tokens=9, seed=3, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    texts, usage = [""] * 4, None
    for event in stream:
        for choice in event.choices:
            texts[choice.index] += choice.text
        usage = event.usage
    assert texts == [choice.text for choice in whole.choices]
    assert usage is not None
    assert usage.model_dump(exclude={"prompt_tokens_details"}) == whole.usage.model_dump(
        exclude={"prompt_tokens_details"}
    )


def test_chat(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_completion_tokens": 30, "seed": 1}
    # The helper refuses answers that were cut off.
    asked["extra_body"] = {"structured_outputs": {"regex": "[a-z]{12}"}}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    content = whole.choices[0].message.content
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].logprobs is not None
    told = "".join(entry.token for entry in whole.choices[0].logprobs.content or [])
    assert told == f"{content}<|endoftext|>"  # every token, the one that ended it too
    stream = client.chat.completions.create(**asked, stream=True)
    assert "".join(event.choices[0].delta.content or "" for event in stream) == content
    with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as helper:
        deltas = [event.delta for event in helper if event.type == "content.delta"]
        final = helper.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content == content
    assert final.usage is not None
    assert whole.usage is not None
    assert final.usage.completion_tokens == whole.usage.completion_tokens


def test_raw_answers(client: openai.OpenAI) -> None:
    raw = client.completions.with_raw_response.create(
        model="tiny", prompt=PROMPT, max_tokens=2, extra_headers={"X-Request-Id": "mine"}, extra_body={"odd": 1}
    )
    assert raw.headers["x-request-id"] == "mine"
    assert raw.headers["x-specinfer-ignored-fields"] == "odd"
    completion = raw.parse()
    assert completion._request_id == "mine"
    with client.completions.with_streaming_response.create(
        model="tiny", prompt=PROMPT, max_tokens=4, stream=True
    ) as streamed:
        lines = [line for line in streamed.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"


def test_fields_that_the_client_does_not_know(client: openai.OpenAI) -> None:
    extra = {"top_k": 1, "min_tokens": 6, "return_token_ids": True, "speculative": {"tree": "1,2"}, "trace": True}
    completion = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=6, extra_body=extra)
    choice = completion.choices[0].model_dump()
    assert len(choice["token_ids"]) == 6
    assert choice["specinfer"]["steps"]
    assert completion.model_dump()["metrics"]["speculative_decoding"]["num_spec_steps"] > 0


def test_a_prediction(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=30, temperature=0)
    content = whole.choices[0].message.content
    assert content
    again = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=30, temperature=0,
        prediction={"type": "content", "content": content},
    )  # fmt: skip
    assert again.choices[0].message.content == content
    assert again.usage is not None
    details = again.usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens is not None
    assert details.accepted_prediction_tokens > 0
    assert details.rejected_prediction_tokens is not None


def test_parsed_answers(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(
        model="tiny", messages=MESSAGES, response_format=Answer, max_tokens=400, temperature=0.5, seed=2
    )
    answer = parsed.choices[0].message.parsed
    assert isinstance(answer, Answer)
    called = client.chat.completions.parse(
        model="tiny", messages=MESSAGES, tools=[openai.pydantic_function_tool(Add)], tool_choice="required",
        parallel_tool_calls=False, max_tokens=400, seed=2,
    )  # fmt: skip
    calls = called.choices[0].message.tool_calls
    assert calls is not None
    assert isinstance(calls[0].function.parsed_arguments, Add)
    with client.chat.completions.stream(
        model="tiny", messages=MESSAGES, tools=[openai.pydantic_function_tool(Add)], tool_choice="required",
        parallel_tool_calls=False, max_tokens=400, seed=2,
    ) as helper:  # fmt: skip
        final = helper.get_final_completion()
    streamed = final.choices[0].message.tool_calls
    assert streamed is not None
    assert streamed[0].function.parsed_arguments == calls[0].function.parsed_arguments


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "kind", "code"),
    [
        ({"model": "other"}, openai.NotFoundError, "model_not_found"),
        ({"temperature": 3000.0}, openai.BadRequestError, "invalid_value"),
        ({"prompt": [5] * 10**4}, openai.BadRequestError, "context_length_exceeded"),
        ({"extra_body": {"prompt_embeds": "AAAA"}}, openai.BadRequestError, "unsupported_parameter"),
    ],
)
def test_refusals_are_the_clients_exceptions(
    client: openai.OpenAI, fields: dict[str, Any], kind: Callable[..., Any], code: str, stream: bool
) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "stream": stream} | fields
    with pytest.raises(openai.APIStatusError) as refused:
        client.completions.create(**asked)
    assert isinstance(refused.value, kind)  # type: ignore[arg-type]  # they are classes
    assert refused.value.code == code
    assert refused.value.request_id

"""Thoughts in chat completions and responses: their fields, their events, and what turns them on and off."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from serving import events_of, post
from specinfer import LLM
from specinfer.server.blocks import sealed, unsealed
from specinfer.server.conversations import template_kwargs, thinking_budget
from specinfer.server.protocol import ChatFields
from tests.server.dialects import with_openai
from tests.server.scripted_target import TEMPLATES, scripted

USER: Any = {"role": "user", "content": "Go."}
THOUGHT = "Hm.\nSo?"
CALL = '<tool_call>\n{"name": "%s", "arguments": {}}\n</tool_call>'
TEXT = f"<think>\n{THOUGHT}\n</think>\n\nYes.\n{CALL % 'a'}\n{CALL % 'b'}"
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("a", "b")]
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with scripted([TEXT], template=TEMPLATES["thinking"], drafters=["ngram"]) as llm:
        yield llm


def ask(llm: LLM, path: str, *bodies: dict[str, Any]) -> list[Any]:
    return post(llm, path, *({"tools": TOOLS, **body} for body in bodies))


def test_chat_completions_have_thoughts_under_both_names_whole_and_streamed(llm: LLM) -> None:
    body = {"messages": [USER], "logprobs": True}
    whole, stream = ask(llm, CHAT, body, body | {"stream": True})
    (choice,) = whole.json()["choices"]
    message = choice["message"]
    assert message["reasoning"] == message["reasoning_content"] == THOUGHT
    assert message["content"] == "Yes."
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["a", "b"]
    assert choice["finish_reason"] == "tool_calls"
    choices = [event["choices"][0] for event in events_of(stream.text)]
    deltas = [one["delta"] for one in choices]
    for name in ("reasoning", "reasoning_content"):
        assert "".join(delta.get(name, "") for delta in deltas) == THOUGHT
    assert "".join(delta.get("content", "") for delta in deltas) == "Yes."
    assert deltas[0] == {"role": "assistant", "content": ""}
    kinds = dict.fromkeys(" ".join(sorted(delta)) for delta in deltas[1:] if delta)
    assert list(kinds) == ["reasoning reasoning_content", "content", "tool_calls"]
    scored = [one for part in choices for one in (part["logprobs"] or {"content": []})["content"]]
    assert [one["token"] for one in scored] == [one["token"] for one in choice["logprobs"]["content"]]
    assert [one["finish_reason"] for one in choices][-2:] == [None, "tool_calls"]


@pytest.mark.parametrize(
    ("fields", "content", "thought"),
    [
        ({"include_reasoning": False}, "Yes.", None),
        ({"reasoning": {"exclude": True}}, "Yes.", None),
        ({"separate_reasoning": False}, TEXT[: TEXT.index("\n<tool_call>")], None),
        ({"reasoning_format": "none"}, TEXT[: TEXT.index("\n<tool_call>")], None),
        ({"reasoning_format": "deepseek"}, "Yes.", THOUGHT),
    ],
)
def test_thoughts_may_be_left_out_or_stay_in_the_content(
    llm: LLM, fields: dict[str, Any], content: str, thought: str | None
) -> None:
    body = {"messages": [USER], **fields}
    whole, stream = ask(llm, CHAT, body, body | {"stream": True})
    message = whole.json()["choices"][0]["message"]
    assert (message["content"], message.get("reasoning_content")) == (content, thought)
    assert len(message["tool_calls"]) == 2
    assert "x-specinfer-ignored-fields" not in whole.headers
    deltas = [event["choices"][0]["delta"] for event in events_of(stream.text)]
    assert "".join(delta.get("content", "") for delta in deltas) == content
    assert "".join(delta.get("reasoning", "") for delta in deltas) == (thought or "")


def test_a_budget_ends_the_thought_under_each_of_its_names(llm: LLM) -> None:
    budgets: list[dict[str, Any]] = [
        {"thinking_token_budget": 3},
        {"thinking_budget_tokens": 3},
        {"thinking_budget": 3},
    ]
    answers = ask(llm, CHAT, *[{"messages": [USER], **budget} for budget in budgets])
    answers += ask(llm, "/v1/responses", *[{"input": "Go.", **budget} for budget in budgets])
    for answer in answers:
        whole = answer.json()
        assert answer.status_code == 200, whole
        assert "x-specinfer-ignored-fields" not in answer.headers
        chat = "choices" in whole
        thought = whole["choices"][0]["message"]["reasoning"] if chat else whole["output"][0]["content"][0]["text"]
        assert thought
        assert THOUGHT.startswith(thought)
        assert thought != THOUGHT


def test_responses_have_items_of_thoughts_that_are_sent_back() -> None:
    async def talk(client: openai.AsyncOpenAI, llm: Any) -> None:
        body: Any = {"model": "tiny", "input": [USER]}
        plain = await client.responses.create(**body)
        thought, message = plain.output[0].to_dict(), plain.output[1]
        assert thought | {"id": "", "status": "completed"} == {
            "id": "", "type": "reasoning", "summary": [], "status": "completed",
            "content": [{"type": "reasoning_text", "text": THOUGHT}],
        }  # fmt: skip
        assert (plain.output_text, message.type) == ("Yes.", "message")
        body |= {"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]}
        async with client.responses.stream(**body) as stream:
            events = [event async for event in stream]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        kinds = [event.type.removeprefix("response.") for event in events]
        assert list(dict.fromkeys(kinds[2 : kinds.index("output_item.done") + 1])) == [
            "output_item.added", "content_part.added", "reasoning_summary_part.added",
            "reasoning_text.delta", "reasoning_summary_text.delta",
            "reasoning_text.done", "content_part.done", "reasoning_summary_text.done", "reasoning_summary_part.done",
            "output_item.done",
        ]  # fmt: skip
        for kind in ("reasoning_text", "reasoning_summary_text"):
            deltas = [event.delta for event in events if event.type == f"response.{kind}.delta"]  # type: ignore[union-attr]
            assert "".join(deltas) == THOUGHT
        item = next(event.item for event in events if event.type == "response.output_item.done").to_dict()
        assert item["summary"] == [{"type": "summary_text", "text": THOUGHT}]
        assert unsealed(item["encrypted_content"]) == THOUGHT
        answer = message.to_dict()
        for kept in (("content",), ("encrypted_content",), ("summary",), ("content", "encrypted_content", "summary")):
            sent = {"type": "reasoning", "id": item["id"], "summary": []} | {key: item[key] for key in kept}
            await client.responses.create(**body | {"input": [USER, sent, answer]})
            assert f"<think>\n{THOUGHT}\n</think>" in llm.script.prompts[-1]
            assert "assistant\nYes.<|im_end|>" not in llm.script.prompts[-1], "it joins the answer"
        await client.responses.create(**body | {"input": [USER, item, USER]})

    with scripted([f"<think>\n{THOUGHT}\n</think>\n\nYes."], template=TEMPLATES["thinking"]) as llm:
        with_openai(llm, lambda client: talk(client, llm))


def test_only_thoughts_that_were_sealed_here_are_read() -> None:
    for text in ("", "a\u20ac\U0001f600\n"):
        assert unsealed(sealed(text)) == text
    for other in (None, 3, "gAAAA", "specinfer:", "specinfer:a", "specinfer:/w==", "specinfer:\u20ac"):
        assert unsealed(other) == ""


READS = "{% if enable_thinking %}{{ reasoning_effort }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "fields", "kwargs", "budget"),
    [
        (READS, {}, {}, None),
        (READS, {"reasoning_effort": "low"}, {"reasoning_effort": "low"}, None),
        (READS, {"reasoning_effort": "xhigh"}, {"reasoning_effort": "high"}, None),
        (READS + "'xhigh'", {"reasoning_effort": "xhigh"}, {"reasoning_effort": "xhigh"}, None),
        (READS, {"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}, None),
        (READS, {"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}, None),
        (READS, {"enable_thinking": False}, {"enable_thinking": False}, None),
        (READS, {"reasoning": {"enabled": True}}, {"enable_thinking": True}, None),
        ("{{ thinking }}", {"enable_thinking": False, "chat_template_kwargs": {"thinking": 1}}, {"thinking": 1}, None),
        ("{{ thinking }}", {"enable_thinking": False}, {"thinking": False}, None),
        ("{{ message.thinking }} thinking's", {"enable_thinking": False}, {}, 0),
        ("", {"reasoning_effort": "none"}, {}, 0),
        ("", {"reasoning_effort": "minimal"}, {}, 256),
        ("", {"reasoning_effort": "low"}, {}, 1024),
        ("", {"reasoning_effort": "medium"}, {}, 4096),
        ("", {"reasoning_effort": "medium", "max_tokens": 500}, {}, 250),
        ("", {"reasoning_effort": "high"}, {}, None),
        ("", {"reasoning_effort": "low", "thinking_token_budget": 7}, {}, 7),
        ("", {"thinking_budget_tokens": -1, "reasoning_effort": "low"}, {}, -1),
        ("", {"max_thinking_tokens": 0}, {}, 0),
        ("", {"reasoning_budget": 5}, {}, 5),
    ],
    ids=lambda value: repr(value)[:60],
)  # fmt: skip
def test_an_effort_goes_to_the_template_or_becomes_a_budget(
    template: str, fields: dict[str, Any], kwargs: dict[str, Any], budget: int | None
) -> None:
    asked = ChatFields.model_validate({"messages": [USER], **fields})
    assert template_kwargs(asked, template) == kwargs
    assert thinking_budget(asked, kwargs) == budget

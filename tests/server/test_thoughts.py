"""Thoughts over HTTP: budgets, stop strings, response formats after a thought, and the tokens of thoughts in usage."""

from collections.abc import Iterator
from typing import Any

import pytest

import talking
from serving import post
from specinfer import LLM
from tests.server.scripted_target import TEMPLATES, scripted

THOUGHT, ANSWER = "It is 7 or 8. Stop. So 8.", '{"number": 8}'
USER = {"messages": [{"role": "user", "content": "Which number?"}], "temperature": 0, "max_tokens": 100}
SCHEMA = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    tokens = [*talking.WRITTEN, "<think>", "</think>"]
    said = f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"
    with scripted([said], template=TEMPLATES["thinking"], added_tokens=tokens, drafters=["ngram"]) as made:
        yield made


def _ask(llm: LLM, path: str, *bodies: dict[str, Any]) -> list[dict[str, Any]]:
    answers = post(llm, path, *bodies)
    assert all(answer.status_code == 200 for answer in answers), [answer.text for answer in answers]
    return [answer.json() for answer in answers]


def test_tokens_of_thoughts_are_counted(llm: LLM) -> None:
    count = len(llm.tokenizer.encode(f"\n{THOUGHT}\n", add_special_tokens=False))
    plain = {"chat_template_kwargs": {"enable_thinking": False}}
    several = {"n": 2, "prediction": {"type": "content", "content": THOUGHT}}
    bodies = [USER, USER | plain, USER | {"thinking_token_budget": 3}, USER | several]
    usages = [answer["usage"] for answer in _ask(llm, "/v1/chat/completions", *bodies)]
    assert [usage.get("completion_tokens_details", {}).get("reasoning_tokens") for usage in usages] == [
        count, None, 3, 2 * count,
    ]  # fmt: skip
    assert usages[3]["completion_tokens_details"].keys() > {"accepted_prediction_tokens", "rejected_prediction_tokens"}
    (answer,) = _ask(llm, "/v1/responses", {"input": "Which number?", "temperature": 0, "max_output_tokens": 100})
    assert answer["usage"]["output_tokens_details"] == {"reasoning_tokens": count}


def test_a_budget_a_format_and_stop_strings(llm: LLM) -> None:
    bodies = [
        USER | {"stop": ["Stop", "\n\n"]},
        USER | {"stop": ["8"]},
        USER | {"response_format": FORMAT},
        USER | {"response_format": FORMAT, "thinking_token_budget": 2},
        USER | {"thinking_token_budget": 0},
    ]
    choices = [answer["choices"][0] for answer in _ask(llm, "/v1/chat/completions", *bodies)]
    messages = [(one["message"].get("reasoning"), one["message"]["content"]) for one in choices]
    assert messages[:3] == [(THOUGHT, ANSWER), (THOUGHT, '{"number": '), (THOUGHT, ANSWER)]
    assert messages[3][0] == THOUGHT[: len(messages[3][0])] != THOUGHT
    assert messages[4][0] is None
    assert choices[1]["stop_reason"] == "8"

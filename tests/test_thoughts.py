"""Thoughts through the whole library: budgets, stop strings, constraints after a thought, and what callers get."""

import asyncio
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import talking
from specinfer import LLM, AsyncLLM, SamplingParams
from specinfer.core.errors import RequestError
from specinfer.core.outputs import CompletionOutput
from tests.server.scripted_target import TEMPLATES, scripted

OPEN = TEMPLATES["thinking"].replace("{% endif %}{% endif %}", "{% else %}<think>\n{% endif %}{% endif %}")
THOUGHT = "The user asks for a number. It may be 7. Stop. It may be 8; it is 8."
ANSWER = '{"number": 8}'
SAID = f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"
USER = [{"role": "user", "content": "Which number?"}]
GREEDY = SamplingParams(temperature=0, max_tokens=200)
SCHEMA = {
    "type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"],
    "additionalProperties": False,
}  # fmt: skip
WAYS: list[dict[str, Any]] = [{}, {"drafters": ["ngram"], "tree": "1,3,2,1,1"}]
SPECIAL = {"added_tokens": [*talking.WRITTEN, "<think>", "</think>"]}
HIDDEN = {"special_tokens": [*talking.SPECIAL, "<think>", "</think>"]}


@pytest.fixture(scope="module", params=["text", "tokens", "hidden tokens"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    """Its markers are text, tokens that are shown, or special tokens."""
    kind: dict[str, Any] = {"text": {}, "tokens": SPECIAL, "hidden tokens": HIDDEN}[request.param]
    with scripted([SAID], template=TEMPLATES["thinking"], drafters=["ngram"], tree="1,3,2,1,1", **kind) as made:
        yield made


@pytest.fixture(scope="module")
def open_llm() -> Iterator[LLM]:
    """Its template begins the thought."""
    with scripted([SAID.removeprefix("<think>\n")], template=OPEN, **SPECIAL) as made:
        yield made


def _one(llm: LLM, params: SamplingParams = GREEDY, **options: Any) -> CompletionOutput:
    (output,) = llm.chat(USER, params, **options)
    return output.outputs[0]


def test_a_chat_has_the_thought_apart_from_the_answer(llm: LLM) -> None:
    output = _one(llm)
    assert (output.reasoning, output.content) == (THOUGHT, ANSWER)
    assert output.text == SAID
    num_thought = len(llm.tokenizer.encode(f"\n{THOUGHT}\n", add_special_tokens=False))
    assert abs(output.num_reasoning_tokens - num_thought) <= 2, "text and markers may share tokens"
    plain = _one(llm, chat_template_kwargs={"enable_thinking": False})
    assert (plain.reasoning, plain.content, plain.num_reasoning_tokens) == (None, plain.text, 0)


def test_a_template_may_begin_the_thought(open_llm: LLM) -> None:
    output = _one(open_llm)
    assert (output.reasoning, output.content) == (THOUGHT, ANSWER)
    assert output.num_reasoning_tokens == len(open_llm.tokenizer.encode(f"{THOUGHT}\n", add_special_tokens=False))


@pytest.mark.parametrize("budget", [0, 1, 5, 12])
def test_a_budget_ends_the_thought(llm: LLM, budget: int) -> None:
    """The script knows no other text, and ends after it."""
    for temperature, n in ((0.0, 1), (1.0, 3)):
        params = replace(GREEDY, temperature=temperature, n=n, thinking_token_budget=budget, seed=1)
        (output,) = llm.chat(USER, params)
        for completion in output.outputs:
            assert completion.num_reasoning_tokens <= budget
            assert SAID.startswith(completion.text.partition("\n</think>")[0])
            assert "</think>\n\n" in completion.text
            assert "<think>" not in completion.content
            assert completion.finish_reason == "stop"


def test_minus_one_is_no_budget(llm: LLM) -> None:
    assert _one(llm, replace(GREEDY, thinking_token_budget=-1)).text == SAID


def test_a_budget_needs_no_conversation(open_llm: LLM) -> None:
    """As in vLLM, whose callers render the template themselves."""
    prompt = {"prompt_token_ids": open_llm.chat_prompt(USER)}
    (output,) = open_llm.generate([prompt], replace(GREEDY, thinking_token_budget=4))
    assert output.outputs[0].num_reasoning_tokens == 4
    (output,) = open_llm.generate([prompt], GREEDY)
    assert (output.outputs[0].num_reasoning_tokens, output.outputs[0].reasoning) == (0, None)


def test_stop_strings_count_in_the_answer(llm: LLM) -> None:
    output = _one(llm, replace(GREEDY, stop=["8"]))
    assert output.stop_reason == "8"
    assert (output.reasoning, output.content) == (THOUGHT, '{"number": ')
    assert _one(llm, replace(GREEDY, stop=["Stop."])).text == SAID
    assert _one(llm, replace(GREEDY, stop=["\n\n", "\n"])).content == ANSWER


def test_streams_show_thoughts_at_once_and_hold_back_what_may_be_a_stop_string(llm: LLM) -> None:
    params = replace(GREEDY, stop=["Stop.", "number"])
    ids = llm.chat_prompt(USER)
    prompt = {"prompt_token_ids": ids, "reasoning": llm.reader.reasoning_of(ids)}
    chunks = list(llm.stream(prompt, params))
    assert "".join(chunk.text for chunk in chunks) == SAID.removesuffix('number": 8}')
    assert chunks[-1].stop_reason == "number"


@pytest.mark.parametrize(
    "asked",
    [
        {"json": SCHEMA},
        {"regex": r"\{.number.: [0-9]\}"},
        {"choice": [ANSWER, "none"]},
        {"grammar": 'start: "{" "\\"number\\": " /[0-9]/ "}"'},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_constraints_begin_after_the_thought(llm: LLM, open_llm: LLM, asked: dict[str, Any]) -> None:
    for each in (llm, open_llm):
        output = _one(each, replace(GREEDY, structured_outputs=asked))
        assert (output.reasoning, output.content, output.finish_reason) == (THOUGHT, ANSWER, "stop")


@pytest.mark.parametrize("budget", [0, 3])
def test_a_budget_and_a_constraint_both_hold(llm: LLM, open_llm: LLM, budget: int) -> None:
    for each in (llm, open_llm):
        params = replace(GREEDY, thinking_token_budget=budget, structured_outputs={"choice": ["yes", "no"]})
        output = _one(each, params)
        assert output.num_reasoning_tokens <= budget
        assert output.content in ("yes", "no")


def test_a_model_that_does_not_think_first_answers_at_once(llm: LLM) -> None:
    with scripted([ANSWER], template=TEMPLATES["thinking"]) as thinking:
        output = _one(thinking, replace(GREEDY, structured_outputs={"json": SCHEMA}, thinking_token_budget=0))
    assert (output.reasoning, output.content) == (None, ANSWER)


def test_a_constraint_may_hold_from_the_start(open_llm: LLM) -> None:
    asked = {"regex": "[a-zT ]{8}[0-9]", "enable_in_reasoning": True}
    for budget in (None, 3):
        output = _one(open_llm, replace(GREEDY, structured_outputs=asked, thinking_token_budget=budget))
        assert re.fullmatch("[a-zT ]{8}[0-9]", output.text), "a budget gives way"


def test_errors_of_constraints_are_those_without_a_thought(open_llm: LLM) -> None:
    params, messages = replace(GREEDY, structured_outputs={"regex": "("}), []
    for kwargs in ({}, {"enable_thinking": False}):
        with pytest.raises(RequestError) as error:
            _one(open_llm, params, chat_template_kwargs=kwargs)
        messages.append(str(error.value))
    assert messages[0] == messages[1]
    assert messages[0].startswith("structured_outputs: regex: cannot be read")


def test_outputs_of_many_callers_have_the_thought_apart(llm: LLM) -> None:
    ids = llm.chat_prompt(USER)
    prompt = {"prompt_token_ids": ids, "reasoning": llm.reader.reasoning_of(ids)}

    async def ask() -> list[CompletionOutput]:
        async with AsyncLLM(llm) as engine:
            return [output.outputs[0] async for output in engine.generate(prompt, GREEDY)]

    *growing, last = asyncio.run(ask())
    assert (last.reasoning, last.content) == (THOUGHT, ANSWER)
    assert growing
    assert all(completion.content is None for completion in growing)


def test_outputs_with_budgets_are_those_of_plain_decoding() -> None:
    """Sampled, with a script that is not certain: draft tokens are accepted and rejected around the end."""
    tokens = []
    for way in WAYS:
        with scripted([SAID], template=TEMPLATES["thinking"], **SPECIAL, **way) as llm:
            params = SamplingParams(
                temperature=40.0, top_k=3, max_tokens=40, n=4, seed=5, thinking_token_budget=6, ignore_eos=True
            )
            tokens.append([output.token_ids for output in llm.chat(USER, params)[0].outputs])
    assert tokens[0] == tokens[1]
    assert len(set(map(tuple, tokens[0]))) > 1


CHANNELS = (
    "{% for message in messages %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}{# <|channel|>analysis #}"
)
MARKS = ["<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|call|>", "<|constrain|>"]
FINAL = "<|start|>assistant<|channel|>final<|message|>"


def _in_channels(*said: str) -> Any:
    return scripted(said, template=CHANNELS, special_tokens=MARKS, added_tokens=[], eos="<|return|>")


def test_thoughts_in_channels() -> None:
    with _in_channels(f"<|channel|>analysis<|message|>{THOUGHT}<|end|>{FINAL}{ANSWER}") as llm:
        output = _one(llm, replace(GREEDY, stop=["Stop.", "}"], structured_outputs={"json": SCHEMA}))
        assert (output.reasoning, output.content) == (THOUGHT, ANSWER.removesuffix("}"))
        output = _one(llm, replace(GREEDY, thinking_token_budget=0))
        assert output.text.startswith(f"<|channel|>analysis<|message|><|end|>{FINAL}")
        output = _one(llm, replace(GREEDY, thinking_token_budget=5, structured_outputs={"choice": ["7", "8"]}))
        assert THOUGHT.startswith(output.reasoning or "-")
        assert output.num_reasoning_tokens == 5
        assert output.content in ("7", "8")


def test_calls_in_channels_are_no_thoughts() -> None:
    call = ' to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
    for thought in ("", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"):
        said = f"{thought}<|channel|>commentary{call}"
        with _in_channels(said) as llm:
            output = _one(llm, replace(GREEDY, thinking_token_budget=8))
            assert output.text == said
            assert output.num_reasoning_tokens <= 3
            assert _one(llm, replace(GREEDY, stop=["1"])).text == said.partition("1")[0]

"""What a model writes in each format, through the server: the same events with and without token trees."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from call_templates import CALLS, FUNCTIONS, template_of, written
from serving import post
from specinfer import LLM
from specinfer.inputs.formats.calls import FORMATS, HERMES, CallFormat
from specinfer.inputs.formats.reasoning import REASONING_FORMATS, ReasoningFormat
from tests.server.dialects import CHAT, DIALECTS, read
from tests.server.scripted_target import follow, scripted

TOOLS = [{"type": "function", "function": {"name": name, "parameters": FUNCTIONS[name]}} for name in FUNCTIONS]
MARKS = sorted(
    {mark for one in FORMATS for mark in one.texts if mark[0] in "<[" and mark[-1] in ">]" and len(mark) > 4}
)
HIDDEN = [mark for mark in MARKS if "|" in mark or mark.isupper()]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """A target that knows the marks of all formats as tokens, some of which are left out of texts."""
    added = [mark for mark in MARKS if mark not in HIDDEN] + ["<think>", "</think>"]
    tokens = ["<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", *HIDDEN]
    with scripted([""], special_tokens=tokens, added_tokens=added, eos="<|im_end|>", drafters=["ngram"]) as made:
        yield made


def _ask(llm: LLM, text: str, **more: Any) -> Any:
    """Return what clients get of a text that the model writes, which is the same in each way of asking."""
    follow(llm, [text])
    body = DIALECTS[CHAT].body("?", 900, temperature=0, seed=1, **more)
    predicted = {"prediction": {"type": "content", "content": text}}  # in few passes, each over a tree
    bodies = [
        body | {"speculative": {"tree": "off"}, "stream": True},
        body | predicted,
        body | predicted | {"stream": True},
    ]
    found = [(one.text, one.thought, one.calls, one.reason) for one in map(read, post(llm, CHAT, *bodies))]
    assert found[1:] == found[:-1]
    return found[0]


@pytest.mark.covering(1)
@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("call_format", FORMATS, ids=lambda one: one.name)
def test_calls_of_each_format_reach_clients_alike_with_and_without_trees(
    llm: LLM, call_format: CallFormat, choice: str
) -> None:
    llm.reader.chat_template = template_of(call_format)
    assert llm.reader.call_format.name == call_format.name
    calls = CALLS if call_format.is_repeated else CALLS[:1]
    content, thought, made, reason = _ask(llm, written(call_format, calls), tools=TOOLS, tool_choice=choice)
    assert ([(name, json.loads(text)) for name, text in made], content) == (calls, "")
    assert (thought, reason) == ("I look." if call_format.has_channels else "", "tool_calls")


@pytest.mark.covering(1)
@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("name", ["think", "mistral", "seed_oss", "cohere_command3", "gemma4", "granite"])
def test_thoughts_of_each_format_reach_clients_apart_with_and_without_trees(llm: LLM, name: str, is_open: bool) -> None:
    found: ReasoningFormat = REASONING_FORMATS[name]
    opening = "{{ '<|im_start|>assistant\\n' }}" + (found.start + "\n" if is_open else "")
    llm.reader.chat_template = template_of(HERMES) + opening + "{# " + found.start + found.end + " #}"
    text = f"{'' if is_open else found.start}\nHm <b>.\n{found.end}\n\n"
    assert _ask(llm, text + "So.") == ("So.", "Hm <b>.", [], "stop")
    content, thought, made, reason = _ask(llm, text + written(HERMES, CALLS), tools=TOOLS)
    assert ([(name, json.loads(text)) for name, text in made], content, thought) == (CALLS, "", "Hm <b>.")
    assert reason == "tool_calls"
    schema = {"type": "json_schema", "json_schema": {"schema": {"enum": ["Oslo"]}, "name": "city"}}
    assert _ask(llm, text + '"Oslo"', response_format=schema) == ('"Oslo"', "Hm <b>.", [], "stop")
    assert _ask(llm, text + "One. Two.", stop=["."]) == ("One", "Hm <b>.", [], "stop"), "stop strings end the answer"

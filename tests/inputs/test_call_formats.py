"""Formats of calls: found in templates, read in pieces of every size, and forced by grammars made of them."""

import json
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from call_templates import CALLS, FUNCTIONS, template_of, written
from parsing import is_response, parse, pieces_of, reader_of
from specinfer import SamplingParams
from specinfer.core.structured_outputs import StructuredOutputsParams
from specinfer.inputs.chat.forms import written_calls
from specinfer.inputs.chat.output_formats import OutputFormats
from specinfer.inputs.formats.argument_grammar import CallableFunction
from specinfer.inputs.formats.call_grammar import CallGrammar
from specinfer.inputs.formats.calls import (
    CALL_FORMATS,
    FORMATS,
    HARMONY,
    HERMES,
    KIMI_K2,
    LLAMA,
    PYTHONIC,
    QWEN3_CODER,
    SEED_OSS,
    SYSTEM_PROMPT_FORMAT,
    BracedArguments,
    CallFormat,
    TaggedArguments,
)
from specinfer.inputs.formats.parser import OutputParser
from specinfer.inputs.prompts import PromptReader
from talking import make_talker

FOLLOWING = [one for one in FORMATS if one.follows_text and not one.has_channels]
ids = {"ids": lambda value: getattr(value, "name", None)}


def _calls_for(call_format: CallFormat) -> list[tuple[str, dict[str, Any]]]:
    return CALLS if call_format.is_repeated else CALLS[:1]


def _json(calls: Sequence[tuple[str, str]]) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in calls]


# ------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("call_format", FORMATS, **ids)
def test_calls_are_read_as_written_in_pieces_of_every_size(call_format: CallFormat) -> None:
    calls = _calls_for(call_format)
    text = written(call_format, calls)
    for size in (*range(1, 12), len(text)):
        parser = OutputParser(call_format, FUNCTIONS)
        content, _, found, _ = parse(parser, pieces_of(text, size))
        assert (content, _json(found)) == ("", calls)
        assert parser.has_whole_calls


@pytest.mark.parametrize("call_format", FOLLOWING, **ids)
def test_text_before_a_call_is_content_without_the_whitespace_between(call_format: CallFormat) -> None:
    text = "I look <b>.\n\n" + written(call_format, CALLS[:1]) + "\n"
    for size in (1, 3, len(text)):
        content, _, found, _ = parse(OutputParser(call_format, FUNCTIONS), pieces_of(text, size))
        assert (content, _json(found)) == ("I look <b>.", CALLS[:1])


@pytest.mark.parametrize("call_format", FORMATS, **ids)
def test_a_call_that_is_cut_off_leaves_no_markup_and_never_other_arguments(call_format: CallFormat) -> None:
    text = written(call_format, CALLS[:1])
    whole = parse(OutputParser(call_format, FUNCTIONS), [text])[2][0][1]
    marks = {mark for mark in call_format.texts if len(mark) > 3} - {"json", "function", "call:"}
    for end in range(len(text)):
        for size in (1, end or 1):
            content, _, found, _ = parse(OutputParser(call_format, FUNCTIONS), pieces_of(text[:end], size))
            assert not [mark for mark in marks if mark in content]
            assert all(whole.startswith(arguments) for _, arguments in found)


@given(
    st.dictionaries(st.text("abcXYZ_", min_size=1), st.text(max_size=20) | st.integers() | st.booleans(), max_size=4)
)
def test_any_texts_and_numbers_come_back(arguments: dict[str, Any]) -> None:
    for call_format in FORMATS:
        style = next((part for part in call_format.call if isinstance(part, (TaggedArguments, BracedArguments))), None)
        # In tags, a text is what is between them: what would end it, or be a value of another kind, is not written so.
        end = style.after_value if isinstance(style, TaggedArguments) else style.quote if style else "\0"
        given = {key: value for key, value in arguments.items() if not isinstance(value, str) or end not in value}
        properties = {key: {"type": "string"} for key, value in given.items() if isinstance(value, str)}
        text = written(call_format, [("f", given)])
        found = parse(OutputParser(call_format, {"f": {"properties": properties}}), pieces_of(text, 5))[2]
        assert _json(found) == [("f", given)], call_format.name


@given(st.text('<tol_ca>/[{}]" \n\\:,nameArgumts(=)|`', max_size=60), st.integers(1, 7))
def test_what_is_no_call_comes_out_as_it_is_whatever_the_pieces(text: str, size: int) -> None:
    for call_format in FORMATS:
        wanted = parse(OutputParser(call_format, FUNCTIONS), [text])[:3]
        assert parse(OutputParser(call_format, FUNCTIONS), pieces_of(text, size))[:3] == wanted
        if call_format.trigger not in text and not call_format.has_channels:
            assert wanted == (text, "", [])


_BARE = '{"name": "open_file", "arguments": {"path": "a", "count": 1}}'


@pytest.mark.parametrize(
    "text",
    [
        _BARE,
        f"```json\n{_BARE}\n```",
        f"```\n{_BARE}\n```",
        f"```json\n<tool_call>{_BARE}</tool_call>\n```",
        f"I look.\n{_BARE}",
        f"I look:\n\n```json\n{_BARE}\n```\n",
        f"<function_call>{_BARE}</function_call>",
        f"<tools>\n{_BARE}\n</tools>",
    ],
)
def test_models_of_hermes_also_write_calls_without_its_tags(text: str) -> None:
    for call_format in (HERMES, SYSTEM_PROMPT_FORMAT):
        for size in (1, 4, len(text)):
            content, _, calls, _ = parse(OutputParser(call_format, FUNCTIONS), pieces_of(text, size))
            assert _json(calls) == [("open_file", {"path": "a", "count": 1})]
            assert content in ("", "I look.", "I look:")


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Bob", "arguments": {"age": 3}}',
        '```json\n{"name": "Bob"}\n```\nSo.',
        '{"name": "open_file"}',
        '{"name": "open_file", "age": 3}',
        'Write {"name": "open_file", "arguments": {}} to call it.',
        "```python\nprint({})\n```",
        '{"name": "open_',
    ],
)
def test_json_that_is_no_call_of_a_function_of_the_request_is_content(text: str) -> None:
    for size in (1, 4, len(text)):
        assert parse(OutputParser(HERMES, FUNCTIONS), pieces_of(text, size))[:3] == (text, "", [])


def test_other_members_of_a_call_are_left_out() -> None:
    text = (
        '[TOOL_CALLS][{"name": "list.all", "arguments": {}, "id": "abc}defgh"}, {"name": "list.all", "arguments": {}}]'
    )
    assert parse(OutputParser(CALL_FORMATS["mistral"], FUNCTIONS), [text])[2] == [("list.all", "{}")] * 2
    text = '{"name": "list.all", "arguments": {}}'
    assert parse(OutputParser(LLAMA, FUNCTIONS), [text])[2] == [("list.all", "{}")], "some write this key"
    text = 'functools[{"name": "list.all", "arguments": {}}]'
    assert parse(OutputParser(CALL_FORMATS["phi4_mini_json"], FUNCTIONS), [text])[2] == [("list.all", "{}")]


def test_ids_are_those_that_the_template_writes_back() -> None:
    text = written_calls(KIMI_K2, [*CALLS, CALLS[1]])
    assert parse(OutputParser(KIMI_K2), [text])[3] == [
        "functions.open_file:0", "functions.list.all:1", "functions.list.all:2",
    ]  # fmt: skip


def test_values_in_tags_have_the_type_of_the_schema() -> None:
    schema = {
        "a": {"type": "string"},
        "b": {"type": ["string", "null"]},
        "c": {"type": "integer"},
        "e": {"enum": ["1"]},
    }
    values = {"a": "1", "b": "null", "c": "7", "d": "[1]", "e": "1", "f": "True", "g": "1.", "h": "NaN"}
    text = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    text = f"<tool_call>\n<function=f>\n{text}</function>\n</tool_call>"
    ((_, arguments),) = parse(OutputParser(QWEN3_CODER, {"f": {"properties": schema}}), pieces_of(text, 3))[2]
    assert json.loads(arguments) == {
        "a": "1", "b": None, "c": 7, "d": [1], "e": "1", "f": True, "g": "1.", "h": "NaN",
    }  # fmt: skip


def test_line_breaks_of_a_value_are_kept_but_for_those_of_the_tags() -> None:
    value = "\n\nfirst\n last\n\n"
    for call_format in (QWEN3_CODER, SEED_OSS, CALL_FORMATS["minimax_m2"], CALL_FORMATS["glm45"]):
        text = written_calls(call_format, [("open_file", {"path": value})])
        for size in (1, 2, len(text)):
            found = parse(OutputParser(call_format, FUNCTIONS), pieces_of(text, size))[2]
            assert _json(found) == [("open_file", {"path": value})]


@pytest.mark.parametrize("call_format", [one for one in FORMATS if one.name in ("pythonic", "lfm2", "olmo3")], **ids)
def test_python_is_converted_and_not_evaluated(call_format: CallFormat) -> None:
    before, after = written_calls(call_format, [("f", {})]).split("f()")
    text = f"{before}f(a='x\\'\\n\\x41', b=\"\\u00e9\", c=(1, 2,), d=None, e={{'k': True}}, f=-1.5){after}"
    ((_, arguments),) = parse(OutputParser(call_format), pieces_of(text, 3))[2]
    assert json.loads(arguments) == {"a": "x'\nA", "b": "é", "c": [1, 2], "d": None, "e": {"k": True}, "f": -1.5}
    for wrong in ("f(1 + 1)", "f(a=open('x'))", "f(a=", "f(**x)", "f(a=1 if 1 else 2)"):
        content, _, calls, _ = parse(OutputParser(call_format), [f"{before}{wrong}{after}"])
        assert not calls
        assert wrong in content or not content


@pytest.mark.parametrize("name", ["olmo3", "gemma4", "lfm2", "functiongemma"])
def test_a_call_after_one_whose_arguments_cannot_be_read_is_read(name: str) -> None:
    call = written_calls(CALL_FORMATS[name], [("f", {"x": 1})])
    wrong = call.replace("1", "1 + 1")
    content, _, calls, _ = parse(OutputParser(CALL_FORMATS[name]), [wrong + call])
    assert content == wrong
    assert _json(calls) == [("f", {"x": 1})]


@pytest.mark.parametrize("name", ["olmo3", "gemma4", "functiongemma"])
def test_arguments_that_cannot_be_read_take_time_in_proportion_to_their_length(name: str) -> None:
    before, after = written_calls(CALL_FORMATS[name], [("f", {"x": 1})]).split("x", 1)
    closing = next(one for one in after if one in ")}")
    nested = before * 4000 + closing * 4000 + "."
    words = f"{before}{'x' * 50_000} {'x' * 50_000}{after}"
    began = time.process_time()
    for text in (nested, words):
        content, _, calls, _ = parse(OutputParser(CALL_FORMATS[name]), [text])
        assert (content, calls) == (text, [])
    assert time.process_time() - began < 4


def test_messages_of_gpt_oss_are_read_by_their_channels() -> None:
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant to=functions.open_file<|channel|>commentary json<|message|>{"path": "a"}<|call|>'
    )
    for size in (*range(1, 9), len(text)):
        assert parse(OutputParser(HARMONY, FUNCTIONS), pieces_of(text, size))[:3] == (
            "I look.", "Hm.", [("open_file", '{"path": "a"}')],
        )  # fmt: skip
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
    assert parse(OutputParser(HARMONY), pieces_of(text, 4))[:3] == ("Yes.", "Hm.", [])
    assert parse(OutputParser(HARMONY), ["No channels."])[:3] == ("No channels.", "", [])
    assert parse(OutputParser(HARMONY), ["<|channel|>anal"])[:3] == ("", "", [])


# ------------------------------------------------------------------------------------------ grammars


def _tokenizer(call_format: CallFormat) -> PreTrainedTokenizerFast:
    """Bytes, and the marks of a format as tokens of their own."""
    tokenizer = make_talker()
    marks = [text for text in call_format.texts if text[0] in "<[" and text[-1] in ">]" and len(text) > 2]
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in marks if '="' not in text])
    return tokenizer


def _params(reader: PromptReader, call_format: CallFormat, *, must_call: bool, **more: Any) -> StructuredOutputsParams:
    functions = tuple(CallableFunction(name, schema) for name, schema in FUNCTIONS.items())
    made = CallGrammar(call_format, functions, must_call, True, reader.special_tokens, **more)
    return made.params(None)


@pytest.mark.parametrize("has_tokens", [False, True])
@pytest.mark.parametrize("call_format", FORMATS, **ids)
def test_a_grammar_takes_what_models_write_and_the_text_may_end_after_it(
    call_format: CallFormat, has_tokens: bool
) -> None:
    reader = reader_of(_tokenizer(call_format) if has_tokens else make_talker())
    calls = _calls_for(call_format)
    text = written(call_format, calls)
    for must_call in (True, False):
        asked = _params(reader, call_format, must_call=must_call)
        assert is_response(reader, asked, text) is True
        if not call_format.has_channels:
            assert is_response(reader, asked, text + "\n") is True, "many models write a line break before they end"
            assert is_response(reader, asked, text.rstrip() + " and so on") is False
        assert not is_response(reader, asked, text.replace("list.all", "list.none").replace("open_file", "close_file"))
        assert is_response(reader, asked, text[: text.index("open_file") + 4]) is None
    assert not is_response(reader, _params(reader, call_format, must_call=True), "I would rather not.")


_ENDS = "}])\"'<:,"


@pytest.mark.covering(1)
@pytest.mark.parametrize("call_format", FORMATS, **ids)
@pytest.mark.parametrize("seed", range(3))
def test_whatever_a_grammar_forces_is_read_as_a_call_that_fits_the_schema(call_format: CallFormat, seed: int) -> None:
    tokenizer = _tokenizer(call_format)
    reader, rng = reader_of(tokenizer), random.Random(seed)
    grammar = reader.grammar(SamplingParams(structured_outputs=_params(reader, call_format, must_call=True)))
    assert grammar is not None
    chosen: list[int] = []
    while not grammar.is_finished:
        legal = grammar.mask(()).nonzero().flatten().tolist()
        assert legal
        # After a while, the model ends what it can.
        ends = [token for token in legal if len(text := tokenizer.decode(token)) > 1 or text in _ENDS]
        closing = [token for token in ends if tokenizer.decode(token) in "}])"]
        choices = closing if closing and rng.random() < 0.5 else ends or legal
        token = rng.choice(choices if len(chosen) > 60 else legal)
        token = tokenizer.eos_token_id if tokenizer.eos_token_id in legal else token
        if token == tokenizer.eos_token_id:
            break
        chosen.append(token)
        grammar.advance(token)
        assert len(chosen) < 2000, tokenizer.decode(chosen[:300])
    text = tokenizer.decode(chosen, skip_special_tokens=False)
    content, _, calls, _ = parse(OutputParser(call_format, FUNCTIONS), pieces_of(text, 7))
    assert calls
    if not call_format.has_channels:
        assert content.strip() == ""
    for name, arguments in calls:
        found = json.loads(arguments)
        assert set(found) <= set(FUNCTIONS[name]["properties"])
        if name == "open_file":
            assert isinstance(found["path"], str)
            assert type(found["count"]) in (int, float)


# ------------------------------------------------------------------------------------------ templates


@pytest.mark.parametrize("call_format", FORMATS, **ids)
def test_the_format_is_found_by_what_the_template_writes(call_format: CallFormat) -> None:
    found = reader_of(make_talker(template_of(call_format))).call_format
    assert found == replace(call_format, has_text_arguments=False)


def test_a_template_may_take_arguments_as_text() -> None:
    reader = reader_of(make_talker(template_of(CALL_FORMATS["deepseek_v3"], as_text=True)))
    assert reader.call_format == replace(CALL_FORMATS["deepseek_v3"], has_text_arguments=True)
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    ids = reader.read_chat([{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [call]}], tools=None)
    assert '{"a": 1}' in reader.tokenizer.decode(ids)


def test_calls_that_a_template_leaves_out_are_written_into_the_content() -> None:
    template = template_of(HERMES, leaves_out=True) + "{# <tool_call> </tool_call> #}"
    reader = reader_of(make_talker(template))
    assert reader.call_format == replace(HERMES, writes_calls=False)
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "So.", "tool_calls": [call]}]
    ids = reader.read_chat(messages, tools=[{"type": "function", "function": {"name": "f"}}])
    assert 'So.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in reader.tokenizer.decode(
        ids
    )


def test_templates_without_tools_or_with_unknown_calls_have_the_format_of_the_message() -> None:
    unknown = template_of(replace(HERMES, call=("<<", *HERMES.call[2:-2], ">>")))
    for template in ("{{ messages }}", unknown.replace('"arguments"', '"values"'), "{% if tools %}{{ tools }}"):
        assert reader_of(make_talker(template)).call_format == SYSTEM_PROMPT_FORMAT


def test_the_operator_may_name_the_formats() -> None:
    tokenizer = make_talker(template_of(HERMES))
    found = OutputFormats(tokenizer, "auto", "qwen3_xml").calls(tokenizer.chat_template)
    assert (found.name, found.is_native) == ("qwen3_coder", True)
    with pytest.raises(ValueError, match="tool_call_parser: 'hermez' is not known; use one of auto, "):
        OutputFormats(tokenizer, "auto", "hermez")
    with pytest.raises(ValueError, match="reasoning_parser: 'x' is not known; use one of auto, none, "):
        OutputFormats(tokenizer, "x", "auto")


def test_pythonic_calls_come_first_or_not_at_all() -> None:
    text = "See [open_file(path='a', count=1)]"
    assert parse(OutputParser(PYTHONIC, FUNCTIONS), pieces_of(text, 3))[:3] == (text, "", [])
    assert parse(OutputParser(PYTHONIC, FUNCTIONS), ["[1, 2] are"])[:3] == ("[1, 2] are", "", [])


def test_the_documentation_names_every_format() -> None:
    text = (Path(__file__).parents[2] / "docs" / "tools.md").read_text(encoding="utf-8")
    assert {name for name in CALL_FORMATS if f"`{name}`" not in text} == set()

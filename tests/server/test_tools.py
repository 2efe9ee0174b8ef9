"""Tools: what is refused, what the grammar lets through, and what the parser makes of it."""

import json
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from parsing import is_response, parse, reader_of
from serving import Server
from specinfer import LLM, SamplingParams
from specinfer.core.errors import RequestError
from specinfer.core.structured_outputs import StructuredOutputsParams
from specinfer.inputs.chat.forms import written_calls
from specinfer.inputs.chat.template import SpecialToken
from specinfer.inputs.formats.calls import (
    HERMES,
    LLAMA,
    MISTRAL,
)
from specinfer.inputs.formats.parser import OutputParser
from specinfer.server.json_body import read_generated
from specinfer.server.tools import ToolPlan, ignored_tools, plan_tools, tools_of_functions
from talking import make_talker, save_talker
from tests.server.dialects import with_openai
from tests.server.scripted_target import TEMPLATES, scripted

WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2]}},
    "required": ["city"],
    "additionalProperties": False,
}


def _tool(name: str = "weather", parameters: Any = WEATHER, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


TOOLS = [_tool(), _tool("time", None)]
CALL = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
    "llama": '{"name": "weather", "parameters": {"city": "Rome"}}',
    "mistral": '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}}]',
    "bare": '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}',
}
TWO = {
    "hermes": CALL["hermes"] + '\n<tool_call>{"name":"time","arguments":{}}</tool_call>',
    "mistral": CALL["mistral"][:-1] + ', {"name": "time", "arguments": {}}]',
    "bare": CALL["bare"] + "[TOOL_CALLS]time[ARGS]{}",
}


def _plan(kind: str, choice: Any = None, parallel: bool | None = None, tools: Any = TOOLS) -> tuple[ToolPlan, Any]:
    reader = reader_of(make_talker(TEMPLATES[kind]))
    return plan_tools(tools, choice, parallel, reader.call_format, special_tokens=reader.special_tokens), reader


def _parsed(parser: OutputParser, *pieces: str) -> tuple[str, list[tuple[str, str]]]:
    """The content, and each call's name and arguments."""
    found = parse(parser, pieces)
    return found.content, found.calls


# ------------------------------------------------------------------------------------------ formats


# ------------------------------------------------------------------------------------------- parser


def test_llama_calls_only_at_the_start() -> None:
    assert _parsed(OutputParser(LLAMA), " \n", CALL["llama"], "\n") == ("", [("weather", '{"city": "Rome"}')])
    assert _parsed(OutputParser(LLAMA), "<|python_tag|>" + CALL["llama"]) == ("", [("weather", '{"city": "Rome"}')])
    text = "So: " + CALL["llama"]
    assert _parsed(OutputParser(LLAMA), text) == (text, [])
    assert _parsed(OutputParser(LLAMA), '{"na') == ("", [])
    assert _parsed(OutputParser(LLAMA), '{"nab": 1}') == ('{"nab": 1}', [])


def test_arguments_are_streamed_as_generated_and_may_contain_anything() -> None:
    arguments = json.dumps({"a": '}\\"{</tool_call>', "b": [{"c": {}}, "\\"], "d": "\n\u20ac"}, ensure_ascii=False)
    said = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    parser = OutputParser(HERMES)
    deltas = [delta for character in said for delta in parser.push(character)]
    assert parser.has_calls
    assert deltas[0].name == "f"
    assert deltas[0].arguments == "", "as OpenAI sends it: arguments come in events of their own"
    assert deltas[1].arguments == "{"
    assert max(len(delta.arguments) for delta in deltas) == 1, "nothing is held back"
    assert "".join(delta.arguments for delta in deltas) == arguments
    assert parser.finish() == []


@pytest.mark.parametrize(
    "stray", ["<tool_call> is how", '<tool_call>{"label": 1}', '<tool_call>{"name": "a b"}', "<tool_call>" * 2]
)
def test_a_beginning_that_goes_on_otherwise_is_text(stray: str) -> None:
    text = f"{stray} x"
    assert _parsed(OutputParser(HERMES), text) == (text, [])
    assert _parsed(OutputParser(HERMES), *text, CALL["hermes"])[1] == [("weather", '{"city": "Rome"}')]


def test_whitespace_at_the_end_is_content_only_without_calls() -> None:
    assert _parsed(OutputParser(HERMES), "a \n", " ") == ("a \n ", [])
    assert _parsed(OutputParser(HERMES), " \n") == (" \n", [])
    assert _parsed(OutputParser(HERMES), "a \n", CALL["hermes"], "\n\n")[0] == "a"


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "flood",
    ["\n{", "<tool_call>", "<tool_call", " ", '{"', "\\", '<tool_call>{"name": "f", "arguments": {"', "[TOOL_CALLS]["],
)
@pytest.mark.parametrize("style", [HERMES, MISTRAL], ids=["hermes", "mistral"])
def test_the_work_grows_with_the_text_alone(style: Any, flood: str) -> None:
    parser, started = OutputParser(style, {"f": {}}), time.thread_time()
    for _ in range(200_000 // len(flood)):
        parser.push(flood)
    parser.push('<tool_call>{"name":"f","arguments":{"a":"' + "\\" * 200_000)
    parser.finish()
    assert time.thread_time() - started < 20.0  # a quadratic one would take hours


# ------------------------------------------------------------------------------------------ grammar


@pytest.mark.parametrize("kind", ["hermes", "llama", "mistral", "bare"])
def test_required_generates_nothing_but_calls(kind: str) -> None:
    plan, reader = _plan(kind, "required")
    assert is_response(reader, plan.structured_outputs, CALL[kind]) is True
    assert is_response(reader, plan.structured_outputs, "I would rather not") is False
    assert is_response(reader, plan.structured_outputs, "") is None
    assert is_response(reader, plan.structured_outputs, CALL[kind].replace("Rome", "Oslo")) is False
    assert is_response(reader, plan.structured_outputs, CALL[kind].replace("weather", "whether")) is False
    if kind in TWO:
        assert is_response(reader, plan.structured_outputs, TWO[kind]) is True
        one, _ = _plan(kind, "required", parallel=False)
        assert is_response(reader, one.structured_outputs, CALL[kind]) is True
        assert is_response(reader, one.structured_outputs, TWO[kind]) is False


@pytest.mark.parametrize("kind", ["hermes", "llama", "mistral", "bare"])
def test_auto_generates_anything_and_a_call_once_begun_is_whole(kind: str) -> None:
    plan, reader = _plan(kind)
    asked = plan.structured_outputs
    for text in ("", "Hello!", "a < b <tool_cal> [TOOL] \n\n"):
        assert is_response(reader, asked, text) is True
    assert is_response(reader, asked, CALL[kind]) is True
    assert is_response(reader, asked, CALL[kind][:32]) is None
    assert is_response(reader, asked, CALL[kind].replace("city", "town")) is False
    said = is_response(reader, asked, "I look.\n" + CALL[kind])
    assert said is True
    if kind != "llama":  # there it is text
        assert is_response(reader, asked, "I look.\n" + CALL[kind][:32]) is None
        assert is_response(reader, asked, CALL[kind] + " and so on") is False
    assert _parsed(plan.parser(), CALL[kind]) == ("", [("weather", '{"city": "Rome"}')])


@pytest.mark.parametrize("kind", ["plain", "hermes", "llama", "mistral", "bare"])
def test_free_text_holds_the_tokens_that_are_shown(kind: str) -> None:
    plan, reader = _plan(kind)
    thought = "<think>\n{Hm.}</think>\n\n"
    for text in ("Rome.", "", "{"):
        assert is_response(reader, plan.structured_outputs, thought + text) is True
    assert is_response(reader, plan.structured_outputs, "<|im_start|>") is False
    if kind in TWO:
        assert is_response(reader, plan.structured_outputs, thought + TWO[kind]) is True
        wanted = [("weather", '{"city": "Rome"}'), ("time", "{}")]
        assert _parsed(plan.parser(), thought + TWO[kind]) == (thought.strip(), wanted)
    assert plan.shows_special_tokens == (kind in ("mistral", "bare"))


def test_tokens_with_large_numbers_are_ranges() -> None:
    tokens = {f"<unused{i}>": SpecialToken(100_000 + i, True) for i in range(9_000) if i != 50}
    plan = plan_tools(TOOLS, special_tokens=tokens)
    assert plan.structured_outputs is not None
    assert "<[100000-100049,100051-108999]>" in str(plan.structured_outputs.grammar)


def test_markup_may_be_text_to_the_model() -> None:
    reader = LLM("demo", drafters=[]).reader
    plan = plan_tools(TOOLS, None, None, reader.call_format, special_tokens=reader.special_tokens)
    assert not plan.shows_special_tokens
    for text in ("", "def f():\n    return 1 < 2", "I look.\n" + TWO["hermes"], "<tool_call"):
        assert is_response(reader, plan.structured_outputs, text) is True
    for text in ("<tool_call>", "I look.\n" + TWO["hermes"][:-1]):
        assert is_response(reader, plan.structured_outputs, text) is None
    for text in ("<tool_call> is how", TWO["hermes"] + " and"):
        assert is_response(reader, plan.structured_outputs, text) is False


def test_one_function_and_some_functions() -> None:
    named, reader = _plan("hermes", {"type": "function", "function": {"name": "weather"}})
    assert is_response(reader, named.structured_outputs, CALL["hermes"]) is True
    assert is_response(reader, named.structured_outputs, TWO["hermes"]) is False
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "time"}}]}
    some, _ = _plan("hermes", {"type": "allowed_tools", "allowed_tools": allowed})
    assert is_response(reader, some.structured_outputs, CALL["hermes"]) is False
    assert is_response(reader, some.structured_outputs, '<tool_call>{"name":"time","arguments":{}}</tool_call>') is True
    assert some.tools_for_template is not None
    assert len(some.tools_for_template) == 2, "the prompt stays the same"


def test_none_and_no_tools_plan_nothing() -> None:
    for plan in (plan_tools(TOOLS, "none"), plan_tools(None), plan_tools([], "auto")):
        assert plan == ToolPlan()
        assert _parsed(plan.parser(), CALL["hermes"]) == (CALL["hermes"], [])


def test_an_answer_has_the_format_or_is_a_call() -> None:
    reader = reader_of(make_talker(TEMPLATES["hermes"]))
    for asked, text, wrong in [
        (StructuredOutputsParams(json={"type": "object", "required": ["a"]}), '{"a": 1}', "{}"),
        (StructuredOutputsParams(choice=["yes", "n/a\n\u20ac"]), "n/a\n\u20ac", "maybe"),
        (StructuredOutputsParams(regex="[0-9]+/[a-z]"), "12/a", "ab"),
    ]:
        for choice in (None, "required"):
            joined = _plan("hermes", choice)[0].combined(asked)
            assert is_response(reader, joined, CALL["hermes"]) is True
            assert (is_response(reader, joined, text) is True) == (choice is None)
            assert not is_response(reader, joined, wrong)
    asked = StructuredOutputsParams(json_object=True)
    assert plan_tools(None).combined(asked) is asked
    assert plan_tools(TOOLS).combined(None) == plan_tools(TOOLS).structured_outputs
    with pytest.raises(RequestError, match="structured_outputs: this model's calls cannot be told from other JSON"):
        plan_tools(TOOLS, None, None, LLAMA).combined(asked)
    grammar = _plan("hermes")[0].combined(StructuredOutputsParams(grammar='start: "a"'))
    assert is_response(reader, grammar, "a") is True
    assert is_response(reader, grammar, CALL["hermes"]) is True
    assert is_response(reader, grammar, "b") is False


def test_references_within_a_schema_are_followed() -> None:
    schema = {
        "$defs": {"City": {"enum": ["Rome"]}},
        "properties": {"city": {"$ref": "#/$defs/City"}},
        "required": ["city"],
    }
    plan, reader = _plan("hermes", "required", tools=[_tool(parameters=schema)])
    assert is_response(reader, plan.structured_outputs, CALL["hermes"]) is True
    assert is_response(reader, plan.structured_outputs, CALL["hermes"].replace("Rome", "Oslo")) is False


def test_strict_refuses_what_no_grammar_holds_to() -> None:
    schema = WEATHER | {"not": {"required": ["days"]}}
    loose, reader = _plan("hermes", "required", tools=[_tool(parameters=schema)])
    assert is_response(reader, loose.structured_outputs, CALL["hermes"]) is True
    strict, _ = _plan("hermes", "required", tools=[_tool(parameters=schema, strict=True)])
    with pytest.raises(RequestError, match=r"^tools\[0\]\.function\.parameters: not: no grammar"):
        is_response(reader, strict.structured_outputs, CALL["hermes"])


def test_many_and_large_tools_are_served() -> None:
    parameters = {
        "type": "object",
        "properties": {f"p{i}": {"type": "string", "description": "x" * 40} for i in range(20)},
    }
    plan, reader = _plan("hermes", "required", tools=[_tool(f"f{i}", parameters) for i in range(100)])
    assert is_response(
        reader, plan.structured_outputs, '<tool_call>{"name": "f77", "arguments": {"p3": "a"}}</tool_call>'
    )


def test_several_hundred_tools_with_names_of_other_protocols_are_served() -> None:
    names = [f"mcp.server/f-{i}" for i in range(400)] + ["mcp__" + "x" * 120, "wetter_\u00fc"]
    tools = [_tool(name, {"properties": {"a": {"const": i}}, "required": ["a"]}) for i, name in enumerate(names)]
    plan, reader = _plan("hermes", "required", tools=tools)
    for i in (0, 250, 400, 401):
        call = '<tool_call>{"name": "%s", "arguments": {"a": %d}}</tool_call>'
        assert is_response(reader, plan.structured_outputs, call % (names[i], i)) is True
        assert is_response(reader, plan.structured_outputs, call % (names[i], i + 1)) is False
        assert _parsed(plan.parser(), call % (names[i], i)) == ("", [(names[i], f'{{"a": {i}}}')])
        assert call % (names[i], i) == written_calls(HERMES, [(names[i], {"a": i})]).replace(">\n", ">").replace(
            "\n<", "<"
        )
    bare, reader = _plan("bare", "required", tools=tools)
    assert is_response(reader, bare.structured_outputs, f'[TOOL_CALLS]{names[7]}[ARGS]{{"a": 7}}') is True
    assert _parsed(bare.parser(), f'[TOOL_CALLS]{names[7]}[ARGS]{{"a": 7}}') == ("", [(names[7], '{"a": 7}')])


def test_keys_that_are_not_known_and_missing_values_are_ignored() -> None:
    more = {"defer_loading": True, "output_schema": {}, "allowed_callers": ["direct"], "cache_control": {"type": "x"}}
    plain = plan_tools([_tool("f", {"type": "object", "properties": {}})])
    null = {"description": None, "strict": None}
    for tool in (
        _tool("f", {"type": "object", "properties": {}}, **more),
        _tool("f", {"type": None, "properties": {}}, **null) | {"cache_control": {}},
        {"type": None, "function": {"name": "f", "parameters": {"properties": {}}}},
        {"type": "function", "name": "f", "parameters": {"properties": {}}, **more},
    ):
        assert plan_tools([tool]).structured_outputs == plain.structured_outputs
    nothing = plan_tools([_tool("f", None)])
    assert plan_tools([{"type": "function", "function": {"name": "f"}}]) == plan_tools([_tool("f", [])]) == nothing


def test_tools_that_a_service_runs_are_left_out_and_named() -> None:
    hosted: list[Any] = [{"type": "web_search"}, {"type": "mcp", "server_label": "x"}, {"type": "web_search"}]
    assert plan_tools([*hosted, *TOOLS]) == plan_tools(TOOLS)
    assert ignored_tools([*hosted, *TOOLS], "required") == ["tools.web_search", "tools.mcp"]
    assert ignored_tools(TOOLS, {"type": "web_search"}) == ["tool_choice"]
    assert plan_tools(TOOLS, {"type": "web_search"}) == plan_tools(TOOLS)
    for choice in ("required", {"type": "file_search"}, "any"):
        assert plan_tools(hosted, choice) == ToolPlan()
        assert ignored_tools(hosted, choice) == ["tools.web_search", "tools.mcp", "tool_choice"]
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [hosted[0], {"type": "function", "name": "time"}]}
    only_time = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "time"}}]}
    assert plan_tools([*hosted, *TOOLS], allowed) == plan_tools(
        TOOLS, {"type": "allowed_tools", "allowed_tools": only_time}
    )
    assert ignored_tools(None) == ignored_tools(hosted, "auto")[2:] == []


def test_each_way_to_write_a_choice_is_understood() -> None:
    for choice in ("auto", {"type": "auto"}, None):
        assert plan_tools(TOOLS, choice) == plan_tools(TOOLS)
        assert plan_tools(None, choice) == ToolPlan()
    for choice in ("any", {"type": "any"}, {"type": "required"}):
        assert plan_tools(TOOLS, choice) == plan_tools(TOOLS, "required")
    assert plan_tools(TOOLS, {"type": "none"}) == ToolPlan()
    named = plan_tools(TOOLS, {"type": "function", "function": {"name": "time"}})
    for choice in ({"type": "function", "name": "time"}, {"type": "tool", "name": "time"}):
        assert plan_tools(TOOLS, choice) == named


def test_the_same_tool_twice_is_there_once_and_another_of_its_name_beside_it() -> None:
    assert plan_tools([*TOOLS, _tool()]) == plan_tools(TOOLS)
    other = _tool("weather", {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]})
    plan, reader = _plan("hermes", "required", tools=[*TOOLS, other])
    assert plan.tools_for_template is not None
    assert [tool["function"]["name"] for tool in plan.tools_for_template] == ["weather", "time", "weather"]
    for arguments in ('{"city": "Rome"}', '{"place": "Oslo"}'):
        call = f'<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>'
        assert is_response(reader, plan.structured_outputs, call) is True


def test_parameters_that_are_no_object_constrain_nothing_without_strict() -> None:
    for kind in ("array", "int", 3, ["object", "null"]):
        plan, reader = _plan("hermes", "required", tools=[_tool(parameters={"type": kind}), _tool("time", None)])
        assert is_response(reader, plan.structured_outputs, CALL["hermes"]) is True
        assert is_response(reader, plan.structured_outputs, CALL["hermes"].replace("weather", "time")) is False


# ------------------------------------------------------------------------------------- custom tools


def _custom(**form: Any) -> dict[str, Any]:
    return {"type": "custom", "custom": {"name": "patch", "description": "Free text.", **form}}


def _custom_call(text: str, *, is_ascii: bool = True) -> str:
    arguments = json.dumps({"input": text}, ensure_ascii=is_ascii)
    return f'<tool_call>\n{{"name": "patch", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize("is_ascii", [True, False])
@pytest.mark.parametrize(
    "text", ['*** "Begin"\n+\t{\\u00e9}\u20ac\U0001f600', "", '{"input": "x"}', "\\", "a\ud83d b", "\ud83d"]
)
def test_the_input_of_a_custom_tool_is_text_whatever_the_pieces(text: str, is_ascii: bool) -> None:
    plan, _ = _plan("hermes", "required", tools=[*TOOLS, _custom()])
    said = _custom_call(text, is_ascii=is_ascii) + TWO["hermes"]
    calls = [("patch", text), ("weather", '{"city": "Rome"}'), ("time", "{}")]
    for size in (*range(1, 9), len(said)):
        pieces = [said[i : i + size] for i in range(0, len(said), size)]
        assert _parsed(plan.parser(), *pieces) == ("", calls)


def test_a_custom_tool_is_shown_with_its_grammar_and_a_regex_holds() -> None:
    lark = {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"}
    flat = {"type": "custom", "name": "patch", "description": "Free text.", "format": lark}
    plan, reader = _plan("hermes", "required", tools=[flat])
    assert plan == _plan("hermes", "required", tools=[_custom(format={"type": "grammar", "grammar": lark})])[0]
    assert plan.custom == {"patch"}
    assert "lark grammar:\\nstart: /a+/" in json.dumps(plan.tools_for_template)
    assert is_response(reader, plan.structured_outputs, _custom_call("b")) is True
    regex, _ = _plan("hermes", "required", tools=[_custom(format=lark | {"syntax": "regex", "definition": "a+|c"})])
    assert is_response(reader, regex.structured_outputs, _custom_call("aa")) is True
    assert is_response(reader, regex.structured_outputs, _custom_call("b")) is False
    for choice in ({"type": "custom", "custom": {"name": "patch"}}, {"type": "custom", "name": "patch"}):
        named, _ = _plan("hermes", choice, tools=[*TOOLS, _custom()])
        assert is_response(reader, named.structured_outputs, _custom_call("b")) is True
        assert is_response(reader, named.structured_outputs, CALL["hermes"]) is False


# ----------------------------------------------------------------------------------------- refusals


def _deep(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        ([{"type": "custom", "custom": {"name": "a b"}}], r"tools\[0\]\.custom\.name: "),
        ([3], r"tools\[0\]: "),
        ([{"type": 3}], r"tools\[0\]: "),
        ([{"type": "function"}], r"tools\[0\]\.function: "),
        ([{"type": "function", "name": "a b"}], r"tools\[0\]\.name: "),
        ([_tool("a b")], r"tools\[0\]\.function\.name: "),
        ([_tool("a" * 257)], r"tools\[0\]\.function\.name: "),
        ([_tool('a"b')], r"tools\[0\]\.function\.name: "),
        ([_tool("a\u202e")], r"tools\[0\]\.function\.name: "),
        ([_tool("a\ud800")], r"tools\[0\]\.function\.name: "),
        ([_tool("a\n")], r"tools\[0\]\.function\.name: "),
        ([_tool(), {"type": "custom", "name": "weather"}], r"tools\[1\]\.name: .* a function and a custom tool"),
        ([_tool(description=3)], r"tools\[0\]\.function\.description: "),
        ([_tool(strict="yes")], r"tools\[0\]\.function\.strict: "),
        ([_tool(parameters=[3])], r"tools\[0\]\.function\.parameters: "),
        ([_tool(parameters={"type": 3}, strict=True)], r"tools\[0\]\.function\.parameters: type"),
        ([_tool(parameters={"type": "array"}, strict=True)], r"tools\[0\]\.function\.parameters: type"),
        ([_tool(parameters=_deep(60))], r"tools\[0\]\.function\.parameters: nested too deeply"),
        ([_tool(parameters={"enum": ["a"] * 3000})], r"tools\[0\]\.function\.parameters: enum"),
        ([_tool(parameters={"properties": {f"a{i}": {} for i in range(20_000)}})], r"parameters: more than"),
        ([_tool(parameters={"description": "a" * 200_000})], r"parameters: 200\d+ characters"),
        ([_tool(parameters={"default": float("nan")})], r"parameters: cannot be written as JSON"),
        ([_tool(parameters={"default": "\ud800"})], r"parameters: cannot be written as JSON"),
        ([_tool(f"f{i}", {"description": "a" * 90_000}) for i in range(4)], r"tools: more than \d+ characters"),
        ("weather", r"tools: "),
    ],
)  # fmt: skip
def test_tools_are_refused_by_place(tools: Any, said: str) -> None:
    with pytest.raises(RequestError, match=f"^{said}" if said.startswith("tools") else said):
        plan_tools(tools)


@pytest.mark.parametrize(
    ("schema", "fits"),
    [
        ({"properties": {"a": {"type": "nothing"}}}, "1"),
        ({"properties": {"a": {"type": "string", "pattern": "("}}}, '"b"'),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}}, "[1]"),
        ({"properties": 3}, "1"),
    ],
)
def test_what_no_grammar_can_enforce_is_left_to_the_model_unless_strict(schema: dict[str, Any], fits: str) -> None:
    plan, reader = _plan("hermes", "required", tools=[_tool("time", None), _tool("f", schema)])
    call = '<tool_call>{"name": "f", "arguments": {"a": ' + fits + "}}</tool_call>"
    assert is_response(reader, plan.structured_outputs, call)
    strict, _ = _plan("hermes", "required", tools=[_tool("time", None), _tool("f", schema, strict=True)])
    with pytest.raises(RequestError, match=r"^tools\[1\]\.function\.parameters: properties"):
        is_response(reader, strict.structured_outputs, "")


@pytest.mark.parametrize(
    "choice",
    ["anything", 3, True, [], {}, {"type": 3}, {"type": "custom"}, {"type": "function"},
     {"type": "function", "function": {"name": "f"}},
     {"type": "allowed_tools"}, {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": []}},
     {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"function": {"name": "f"}}]}}],
    ids=repr,
)  # fmt: skip
def test_choices_are_refused(choice: Any) -> None:
    with pytest.raises(RequestError, match=r"^tool_choice"):
        plan_tools(TOOLS, choice)
    with pytest.raises(RequestError, match=r"^tool_choice"):
        plan_tools(None, "required")


def test_functions_of_old_are_tools() -> None:
    tools, choice = tools_of_functions([{"name": "f"}], {"name": "f"})
    assert (
        plan_tools(tools, choice).structured_outputs
        == plan_tools(
            [{"type": "function", "function": {"name": "f"}}], {"type": "function", "function": {"name": "f"}}
        ).structured_outputs
    )
    assert tools_of_functions(None, None) == (None, None)
    with pytest.raises(RequestError, match=r"^function_call: "):
        tools_of_functions([{"name": "f"}], "required")


# --------------------------------------------------------------------------------------- generation


@pytest.mark.parametrize("kind", ["plain", "hermes", "llama", "mistral", "bare"])
def test_a_model_that_knows_nothing_calls_rightly(kind: str, tmp_path: Path) -> None:
    llm = LLM(save_talker(tmp_path, TEMPLATES[kind]), max_model_len=2048)
    reader = llm.reader
    plan = plan_tools(TOOLS, "required", None, reader.call_format, special_tokens=reader.special_tokens)
    ids = reader.read_chat([{"role": "user", "content": "Rome?"}], tools=plan.tools_for_template)
    params = SamplingParams(
        max_tokens=300, n=2, seed=1, structured_outputs=plan.structured_outputs,
        skip_special_tokens=not plan.shows_special_tokens,
    )  # fmt: skip
    (output,) = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
    assert {one.finish_reason for one in output.outputs} <= {"stop", "length"}
    for one in output.outputs:
        parser = plan.parser()
        content, calls = _parsed(parser, one.text)
        assert content == ""
        assert calls
        whole = calls if one.finish_reason == "stop" else calls[:-1]
        for name, arguments in whole:
            read = json.loads(arguments)
            assert (name, read) == ("time", {}) or (name == "weather" and read["city"] in ("Paris", "Rome"))


def test_a_stream_has_the_deltas_of_openai_and_the_official_client_joins_them() -> None:
    tools: list[Any] = [*TOOLS, _custom()]
    user: list[Any] = [{"role": "user", "content": "Rome?"}]
    text = "I look.\n" + _custom_call("*** Begin\n\u20ac", is_ascii=False) + "\n" + TWO["hermes"]

    async def talk(client: openai.AsyncOpenAI, llm: Any) -> None:
        whole = await client.chat.completions.create(model="tiny", messages=user, tools=tools)
        stream = await client.chat.completions.create(model="tiny", messages=user, tools=tools, stream=True)
        choices = [event.choices[0] async for event in stream]
        async with client.chat.completions.stream(model="tiny", messages=user, tools=tools[:2]) as helper:
            final = await helper.get_final_completion()
        called: Any = whole.choices[0].message
        results: list[Any] = [{"role": "tool", "tool_call_id": call.id, "content": "ok"} for call in called.tool_calls]
        again = [*user, called.model_dump(), *results]
        await client.chat.completions.create(model="tiny", messages=again, tools=tools)
        assert json.dumps({"input": "*** Begin\n\u20ac"}, ensure_ascii=False) in llm.script.prompts[-1]
        message, parts = whole.choices[0].message, [one for c in choices for one in c.delta.tool_calls or []]
        custom, weather, time = message.tool_calls or []
        assert message.content == "".join(c.delta.content or "" for c in choices) == "I look."
        assert custom.model_dump(exclude={"id"}) == {
            "type": "custom", "custom": {"name": "patch", "input": "*** Begin\n\u20ac"},
        }  # fmt: skip
        for i, call in enumerate((custom, weather, time)):
            first, *more = [one.model_dump(exclude_unset=True) for one in parts if one.index == i]
            kind, key = ("custom", "input") if call.type == "custom" else ("function", "arguments")
            name, whole_text = getattr(call, kind).name, getattr(getattr(call, kind), key)
            assert first == {"index": i, "id": first["id"], "type": kind, kind: {"name": name, key: ""}}
            assert all(one.keys() == {"index", kind} and one[kind].keys() == {key} for one in more)
            assert "".join(one[kind][key] for one in more) == whole_text
        assert (
            [c.finish_reason for c in choices if c.finish_reason] == ["tool_calls"] == [whole.choices[0].finish_reason]
        )
        calls = final.choices[0].message.tool_calls or []
        assert [(one.function.name, one.function.arguments) for one in calls] == [
            ("weather", '{"city": "Rome"}'), ("time", "{}"),
        ]  # fmt: skip

    with scripted([text, text, "I look.\n" + TWO["hermes"]], drafters=["ngram"]) as llm:
        with_openai(llm, lambda client: talk(client, llm))


@pytest.mark.parametrize("streams", [False, True])
def test_a_call_that_a_stop_string_cuts_off_is_not_reported_as_whole(streams: bool, tmp_path: Path) -> None:
    llm = LLM(save_talker(tmp_path, TEMPLATES["hermes"]), max_model_len=4096)
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Rome?"}], "tools": TOOLS, "stop": ["city"]}
    body |= {"tool_choice": {"type": "function", "function": {"name": "weather"}}, "seed": 3, "max_tokens": 300}

    with Server(llm) as server:
        response = server.post("/v1/chat/completions", json=body | {"stream": streams})
        assert response.status_code == 200, response.text
        assert '"finish_reason":"stop","stop_reason":"city"' in response.text, response.text
        assert '"tool_calls":[' in response.text


@pytest.mark.parametrize("kind", ["plain", "hermes", "llama", "mistral", "bare"])
def test_calls_that_were_answered_go_back_as_they_came(kind: str, tmp_path: Path) -> None:
    llm = LLM(save_talker(tmp_path, TEMPLATES[kind]), drafters=["ngram"], max_model_len=4096)
    user = {"role": "user", "content": "Rome?"}
    body: dict[str, Any] = {
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "seed": 3,
    }

    with Server(llm) as server:
        first = server.post("/v1/chat/completions", json=body | {"messages": [user], "max_tokens": 300})
        assert first.status_code == 200, first.text
        choice = first.json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        message = choice["message"]
        (call,) = message["tool_calls"]
        assert json.loads(call["function"]["arguments"])["city"] in ("Paris", "Rome")
        result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
        more = {"tools": TOOLS, "messages": [user, message, result], "max_tokens": 20, "return_token_ids": True}
        second = server.post("/v1/chat/completions", json=more)
        assert second.status_code == 200, second.text
        prompt = llm.tokenizer.decode(second.json()["prompt_token_ids"])
        assert json.dumps(json.loads(call["function"]["arguments"])) in prompt
        assert "sunny" in prompt


@pytest.mark.parametrize("depth", [101, 50_000])
def test_arguments_that_are_nested_too_deeply_are_read_like_those_of_a_call_that_was_cut_off(depth: int) -> None:
    assert read_generated('{"a": 1, "b": [{}]}') == {"a": 1, "b": [{}]}
    assert read_generated('{"a": ' * 50 + "1" + "}" * 50) is not None
    assert read_generated('{"a": ' * depth + "1" + "}" * depth) is None
    assert read_generated('{"a": ') is None

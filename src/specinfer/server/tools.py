"""Tool calls: the grammar that constrains a response to valid calls, and the parser that reads them.

Calls are written in the format that the model was trained on (`chat/tool_formats.py`). With "auto" the response is free
text, and a call that begins in it must be valid. "required" and a named function allow only calls.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specinfer.core.errors import RequestError
from specinfer.core.structured_outputs import StructuredOutputsParams
from specinfer.inputs.chat.template import SpecialToken
from specinfer.inputs.chat.tool_formats import ToolFormat, find_format
from specinfer.server.schemas import read_schema
from specinfer.server.tool_parser import ToolDelta, ToolParser

__all__ = ["ToolDelta", "ToolParser", "ToolPlan", "plan_tools", "tools_of_functions"]

MAX_TOOLS = 128
_MAX_CHARACTERS = 300_000  # limit on all tools together
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}", re.ASCII)
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class _Function:
    name: str
    schema: dict[str, Any]  # the JSON schema of its arguments


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """The way a request's tools are served.

    Attributes:
        structured_outputs: The constraints on the response, or None if there are no tools to call.
        tools_for_template: The `tools` argument of `PromptReader.read_chat`, or None to show the model no tools.
        call_format: The format of calls, or None if the response cannot have any.
        shows_special_tokens: Whether `SamplingParams.skip_special_tokens` must be False, as calls begin with one.
    """

    structured_outputs: StructuredOutputsParams | None = None
    tools_for_template: list[dict[str, Any]] | None = None
    call_format: ToolFormat | None = None
    shows_special_tokens: bool = False
    _grammar: "_Grammar | None" = None

    def parser(self) -> ToolParser:
        """Return a parser for one response; each of `n` responses needs its own."""
        return ToolParser(self.call_format)

    def combined(self, asked: StructuredOutputsParams | None) -> StructuredOutputsParams | None:
        """Return the constraints together with a requested format; with "auto" a response is a call or has it.

        Raises:
            RequestError: Calls of this model cannot be distinguished from a response of that format.
        """
        if asked is None or self._grammar is None or self._grammar.must_call:
            return self.structured_outputs or asked
        return self._grammar.params(asked)


def plan_tools(
    tools: Sequence[Any] | None,
    tool_choice: Any = None,
    parallel_tool_calls: bool | None = None,
    chat_template: str | None = None,
    *,
    special_tokens: Mapping[str, SpecialToken] | None = None,
) -> ToolPlan:
    """Plan how to serve a request's tools, which are in the format of chat completions.

    Args:
        chat_template: The model's template, `PromptReader.chat_template`.
        special_tokens: The model's `PromptReader.special_tokens`. A grammar matches them as tokens, not as text.

    Raises:
        RequestError: A tool or the choice cannot be served; the message names it.
    """
    if not tools:
        if tool_choice not in (None, "none", "auto"):
            raise RequestError("tool_choice: there are no tools to choose from; send tools, or leave it out")
        return ToolPlan()
    shown, functions = _read_tools(tools)
    mode, chosen = _read_choice(tool_choice, list(functions))
    if mode == "none":
        return ToolPlan()
    tokens, call_format = special_tokens or {}, find_format(chat_template)
    grammar = _Grammar(
        call_format,
        tuple(functions[name] for name in chosen),
        mode != "auto",
        parallel_tool_calls is not False and mode != "function",
        tokens,
    )
    hidden = {name for name, token in tokens.items() if not token.is_shown}
    return ToolPlan(grammar.params(None), shown, call_format, not hidden.isdisjoint(call_format.texts), grammar)


def tools_of_functions(functions: Sequence[Any] | None, function_call: Any) -> tuple[list[Any] | None, Any]:
    """Return `functions` and `function_call`, the older fields, as `tools` and `tool_choice`.

    Raises:
        RequestError: A field has the wrong type.
    """
    if functions is not None and not isinstance(functions, Sequence):
        raise RequestError("functions: must be a list; or use tools")
    choice = function_call
    if isinstance(function_call, Mapping):
        choice = {"type": "function", "function": function_call}
    elif function_call not in (None, "none", "auto"):
        raise RequestError('function_call: use "none", "auto" or {"name": ...}; or use tool_choice')
    return None if functions is None else [{"type": "function", "function": one} for one in functions], choice


# ------------------------------------------------------------------------------------------ reading


def _read_tools(tools: Sequence[Any]) -> tuple[list[dict[str, Any]], dict[str, _Function]]:
    """Return the tools in the format for templates, and their functions by name."""
    if not isinstance(tools, (list, tuple)):
        raise RequestError(f"tools: must be a list of functions, not {tools!r:.60}")
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools: {len(tools)} are too many; send at most {MAX_TOOLS}")
    shown: list[dict[str, Any]] = []
    functions: dict[str, _Function] = {}
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            kind = tool.get("type") if isinstance(tool, dict) else tool
            raise RequestError(f'tools[{i}].type: only "function" is served, not {kind!r:.60}')
        function_fields, function = _read_function(f"tools[{i}].function", tool.get("function"))
        if function.name in functions:
            raise RequestError(f"tools[{i}].function.name: {function.name!r} is there twice; give each its own name")
        functions[function.name] = function
        shown.append({"type": "function", "function": function_fields})
    length = len(json.dumps(shown))
    if length > _MAX_CHARACTERS:
        raise RequestError(f"tools: {length} characters; make them shorter, at most {_MAX_CHARACTERS} together")
    return shown, functions


def _read_function(field: str, given: Any) -> tuple[dict[str, Any], _Function]:
    if not isinstance(given, dict):
        raise RequestError(f"{field}: must be an object with a name, not {given!r:.60}")
    if unknown := sorted(given.keys() - {"name", "description", "parameters", "strict"}):
        raise RequestError(f"{field}.{unknown[0]:.60}: is not known; use name, description, parameters and strict")
    name, description, strict = given.get("name"), given.get("description"), given.get("strict")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(f"{field}.name: use 1 to 64 of a-z, A-Z, 0-9, _ and -, not {name!r:.80}")
    if description is not None and not isinstance(description, str):
        raise RequestError(f"{field}.description: must be text, not {description!r:.60}")
    if strict is not None and not isinstance(strict, bool):
        raise RequestError(f"{field}.strict: must be true or false, not {strict!r:.60}")
    schema = given.get("parameters")
    parameters = _NO_PARAMETERS if schema is None else read_schema(f"{field}.parameters", schema)
    if parameters.get("type", "object") != "object":
        raise RequestError(f'{field}.parameters: type must be "object", not {parameters["type"]!r:.60}')
    function_fields = {"name": name, "description": description or "", "parameters": parameters}
    # Without `strict`, keywords that a grammar cannot enforce are left to the model.
    options = {} if strict else {"x-guidance": {"lenient": True}}
    return function_fields, _Function(name, {"type": "object"} | parameters | options)


def _read_choice(choice: Any, names: list[str]) -> tuple[str, list[str]]:
    """Return the mode ("none", "auto", "required", or "function" for exactly one call) and the callable functions."""
    if choice is None:
        return "auto", names
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise RequestError(f'tool_choice: use "none", "auto", "required" or a function, not {choice!r:.60}')
        return choice, names
    if not isinstance(choice, dict):
        raise RequestError(f"tool_choice: must be text or an object, not {choice!r:.60}")
    if choice.get("type") == "function":
        return "function", [_named("tool_choice", choice, names)]
    if choice.get("type") == "allowed_tools" and isinstance(choice.get("allowed_tools"), dict):
        allowed = choice["allowed_tools"]
        mode, listed = allowed.get("mode"), allowed.get("tools")
        if mode not in ("auto", "required"):
            raise RequestError(f'tool_choice.allowed_tools.mode: use "auto" or "required", not {mode!r:.60}')
        if not isinstance(listed, list) or not listed:
            raise RequestError("tool_choice.allowed_tools.tools: list at least one function")
        field = "tool_choice.allowed_tools.tools"
        return mode, list(dict.fromkeys(_named(f"{field}[{i}]", one, names) for i, one in enumerate(listed)))
    raise RequestError(f'tool_choice.type: use "function" or "allowed_tools", not {choice.get("type")!r:.60}')


def _named(field: str, choice: Any, names: list[str]) -> str:
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or name not in names:
        raise RequestError(f"{field}.function.name: {name!r:.80} is none of the tools")
    return name


# ------------------------------------------------------------------------------------------ grammar


@dataclass(frozen=True, slots=True)
class _Grammar:
    """The grammar of a response in Lark's notation; each function's arguments are a separate JSON schema."""

    call_format: ToolFormat
    functions: tuple[_Function, ...]
    must_call: bool
    is_parallel: bool
    special_tokens: Mapping[str, SpecialToken]

    def params(self, answer: StructuredOutputsParams | None) -> StructuredOutputsParams:
        """Return the grammar of calls, free text, or calls and responses of another format."""
        schemas: dict[str, Any] = {f"of-{function.name}": function.schema for function in self.functions}
        rules = [*self._calls()]
        if self.must_call:
            rules = ["start: calls", f"opening: {self._opening()}", *rules]
        elif answer is None:
            rules = [*self._text(), *rules]
        else:
            rule, more = self._answer_rule(answer)
            schemas |= more
            rules = ["start: calls | answer", f"opening: {self._opening()}", f"answer: {rule}", *rules]
        return StructuredOutputsParams(grammar="\n".join(rules), schemas=schemas, field="tools")

    def _calls(self) -> list[str]:
        """Return the rules for one call or several, after their opening."""
        style = self.call_format
        named = []
        for function in self.functions:
            name = json.dumps(function.name) if style.quotes_name else function.name
            named.append(self._sequence([name, *style.between], f"@of-{function.name}"))
        more = ""
        if self.is_parallel and style.again:
            again = self._sequence(list(style.again), "named", *style.after)
            more = f" (WS? {again})*"
        end = "".join(f" WS? {self._literal(text)}" for text in style.end)
        first = self._sequence(list(style.first[1:]), "named", *style.after)
        return [
            f"calls: opening WS? {first}{more}{end}",
            "named: " + " | ".join(named),
            r"WS: /[ \t\r\n]{1,16}/",
        ]

    def _opening(self) -> str:
        lead = self.call_format.lead
        optional = f"{self._literal(lead)}? WS? " if lead in self.special_tokens and lead is not None else ""
        return optional + self._literal(self.call_format.trigger)

    def _text(self) -> list[str]:
        """Return the rules for free text in which a call may begin. It includes shown tokens, except those of calls."""
        style, trigger = self.call_format, self._literal(self.call_format.trigger)
        others = [t.id for name, t in self.special_tokens.items() if t.is_shown and name not in style.texts]
        between = " (other TEXT)*" if others else ""
        rules = [f"other: <[{_ranges(others)}]>"] if others else []
        if not style.follows_text:
            # Text that begins like a call could not be distinguished from one.
            start = re.escape(style.trigger[0])
            rules += [rf"FIRST: /([ \t\r\n]*[^ \t\r\n{start}](.|\n)*)?/", "TEXT: /(?s:.*)/"]
            return [f"start: calls | FIRST{between}", f"opening: {self._opening()}", *rules]
        rules.insert(0, f"start: calls | TEXT{between}")
        before = "(TEXT other)* " if others else ""
        if style.trigger in self.special_tokens:
            # The trigger spelled as text would look like the token.
            spelled = rf"/(?s:.*){re.escape(style.trigger)}(?s:.*)/"
            return [*rules, f"TEXT: /(?s:.*)/ & ~{spelled}", f"opening: {before}TEXT {trigger}"]
        return [*rules, "TEXT: /(?s:.*)/", f"opening: {before}last", f"last[lazy]: TEXT {trigger}"]

    def _answer_rule(self, asked: StructuredOutputsParams) -> tuple[str, dict[str, Any]]:
        """Return a rule for answers of a format, and the schemas that it refers to."""
        if asked.kind in ("grammar", "grammars"):
            raise RequestError("structured_outputs: grammar cannot be joined with tools; leave one of them out")
        if not self.call_format.follows_text:
            raise RequestError(
                f"{asked.field}: this model's calls cannot be told from other JSON; leave it out, or the tools"
            )
        if asked.kind == "json":
            return "@answer", {"answer": asked.text}
        if asked.choice is not None:
            return " | ".join(json.dumps(choice, ensure_ascii=False) for choice in asked.choice), {}
        return "/" + re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", asked.text) + "/", {}

    def _sequence(self, texts: list[str], rule: str, *after: str) -> str:
        """Return texts with a rule among them; whitespace may be between them."""
        return " WS? ".join([*map(self._literal, texts), rule, *map(self._literal, after)])

    def _literal(self, text: str) -> str:
        token = self.special_tokens.get(text)
        return json.dumps(text, ensure_ascii=False) if token is None else f"<[{token.id}]>"


def _ranges(numbers: list[int]) -> str:
    """Return numbers in Lark's notation, with consecutive ones as a range."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(f"{first}-{last}" if first < last else str(first) for first, last in ranges)

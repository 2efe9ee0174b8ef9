"""The tools of a request and its choice among them, checked and turned into a plan for serving it.

Calls are written in the format that the model was trained on (`inputs/formats`). With "auto" the response is free
text, and a call that begins in it must be valid. "required" and a named function allow only calls.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specinfer.core.errors import RequestError
from specinfer.core.structured_outputs import StructuredOutputsParams
from specinfer.core.thought import Reasoning
from specinfer.inputs.formats.argument_grammar import CallableFunction
from specinfer.inputs.formats.call_grammar import CallGrammar
from specinfer.inputs.formats.calls import SYSTEM_PROMPT_FORMAT, CallFormat
from specinfer.inputs.formats.lark import SpecialToken
from specinfer.inputs.formats.parser import OutputParser
from specinfer.server.blocks import CustomInputs, Parser, function_of_custom
from specinfer.server.response_format import lenient, read_schema

_MAX_CHARACTERS = 300_000  # limit on all tools together
_KINDS = ("function", "custom")  # other tools are run by a service, which there is none of here
_NAME = re.compile(r"[^\s\"'`\\<>()\[\]{}=,|]{1,256}")
_FREE_CHOICES = (None, "none", "auto", {"type": "none"}, {"type": "auto"})  # these need no tools
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """The way a request's tools are served, and its response is parsed.

    Attributes:
        structured_outputs: The constraints on the response, or None if there are no tools to call.
        tools_for_template: The `tools` argument of `PromptReader.read_chat`, or None to show the model no tools.
        call_format: The format of calls, or None if the response cannot have any.
        shows_special_tokens: Whether `SamplingParams.skip_special_tokens` must be False, as a mark of a call is one.
        custom: The names of custom tools, whose calls have text in place of JSON arguments.
        reasoning: The thought before the answer, or None if there is none.
    """

    structured_outputs: StructuredOutputsParams | None = None
    tools_for_template: list[dict[str, Any]] | None = None
    call_format: CallFormat | None = None
    shows_special_tokens: bool = False
    custom: frozenset[str] = frozenset()
    reasoning: Reasoning | None = None
    _grammar: CallGrammar | None = None

    def parser(self, *, separates_thoughts: bool = True) -> Parser:
        """Return a parser for one response; each of `n` responses needs its own.

        Args:
            separates_thoughts: Whether a thought is separate from the content.
        """
        functions = () if self._grammar is None else self._grammar.functions
        schemas = {function.name: function.schema for function in functions}
        parser = OutputParser(self.call_format, schemas, self.reasoning if separates_thoughts else None)
        return CustomInputs(parser, self.custom) if self.custom else parser

    def combined(self, asked: StructuredOutputsParams | None) -> StructuredOutputsParams | None:
        """Return the constraints together with a requested format; with "auto" a response is a call or has it."""
        if asked is None or self._grammar is None or self._grammar.must_call:
            return self.structured_outputs or asked
        return self._grammar.params(asked)


def plan_tools(
    tools: Sequence[Any] | None,
    tool_choice: Any = None,
    parallel_tool_calls: bool | None = None,
    call_format: CallFormat = SYSTEM_PROMPT_FORMAT,
    *,
    special_tokens: Mapping[str, SpecialToken] | None = None,
) -> ToolPlan:
    """Plan how to serve a request's tools, which are in the format of chat completions or of responses.

    Tools of other kinds than functions and custom tools are ignored; `ignored_tools` names them.

    Args:
        call_format: The model's `PromptReader.call_format`.
        special_tokens: The model's `PromptReader.special_tokens`. A grammar matches them as tokens, not as text.
    """
    tokens = special_tokens or {}
    if not tools:
        if tool_choice not in _FREE_CHOICES:
            raise RequestError("tool_choice: there are no tools to choose from; send tools, or leave it out")
        return ToolPlan()
    shown, functions, custom = _read_tools(tools)
    mode, chosen = _read_choice(tool_choice, list(functions))
    if mode == "none" or not chosen:
        return ToolPlan()
    grammar = CallGrammar(
        call_format,
        tuple(functions[name] for name in chosen),
        mode != "auto",
        parallel_tool_calls is not False and mode != "function",
        tokens,
    )
    hidden = {name for name, token in tokens.items() if not token.is_shown}
    shows_special_tokens = any(name in text for name in hidden for text in call_format.texts)
    return ToolPlan(grammar.params(None), shown, call_format, shows_special_tokens, custom, None, grammar)


def ignored_tools(tools: Sequence[Any] | None, tool_choice: Any = None) -> list[str]:
    """Return the names, for the header of ignored fields, of tools that are ignored and of a choice that needs one."""
    kinds = [_kind_of(tool) for tool in tools or () if isinstance(tool, dict)]
    names = [f"tools.{kind}" for kind in kinds if isinstance(kind, str) and kind not in _KINDS]
    if _is_ignored(tool_choice) or (kinds and len(names) == len(kinds) and tool_choice not in _FREE_CHOICES):
        names.append("tool_choice")
    return list(dict.fromkeys(names))


def tools_of_functions(functions: Sequence[Any] | None, function_call: Any) -> tuple[list[Any] | None, Any]:
    """Return `functions` and `function_call`, the older fields, as `tools` and `tool_choice`."""
    choice = function_call
    if isinstance(function_call, Mapping):
        choice = {"type": "function", "function": function_call}
    elif function_call not in (None, "none", "auto"):
        raise RequestError('function_call: use "none", "auto" or {"name": ...}; or use tool_choice')
    return None if functions is None else [{"type": "function", "function": function} for function in functions], choice


# ------------------------------------------------------------------------------------------ reading


def _kind_of(tool: dict[str, Any]) -> Any:
    kind = tool.get("type")
    return "function" if kind is None else kind


def _read_tools(
    tools: Sequence[Any],
) -> tuple[list[dict[str, Any]], dict[str, CallableFunction], frozenset[str]]:
    """Return the tools in the format for templates, their functions by name, and the names of custom tools."""
    if not isinstance(tools, (list, tuple)):
        raise RequestError(f"tools: must be a list of functions, not {tools!r:.60}")
    shown: list[dict[str, Any]] = []
    functions: dict[str, CallableFunction] = {}
    custom: set[str] = set()
    length = 0
    for i, tool in enumerate(tools):
        kind = _kind_of(tool) if isinstance(tool, dict) else None
        if not isinstance(kind, str):
            raise RequestError(f"tools[{i}]: must be an object such as a function, not {tool!r:.60}")
        if kind not in _KINDS:
            continue
        is_flat = kind not in tool and "name" in tool
        field, given = (f"tools[{i}]", tool) if is_flat else (f"tools[{i}].{kind}", tool.get(kind))
        if not isinstance(given, dict):
            raise RequestError(f"{field}: must be an object with a name, not {given!r:.60}")
        if kind == "custom":
            given = function_of_custom(given)
        entry, function = _read_function(field, given)
        name, other = function.name, functions.get(function.name)
        if other is not None and ((name in custom) != (kind == "custom")):
            raise RequestError(f"{field}.name: {name!r} is a function and a custom tool; give each its own name")
        if other is not None and entry in shown:
            continue
        # Of several functions with one name, a call may mean any.
        functions[name] = function if other is None else CallableFunction(name, _ANY_OBJECT)
        shown.append(entry)
        if kind == "custom":
            custom.add(name)
        length += len(json.dumps(entry))
        if length > _MAX_CHARACTERS:
            raise RequestError(f"tools: more than {_MAX_CHARACTERS} characters together; make them shorter")
    return shown, functions, frozenset(custom)


def _read_function(field: str, given: dict[str, Any]) -> tuple[dict[str, Any], CallableFunction]:
    """Return a function in the format for templates, and what a call of it is; keys that are not known are ignored."""
    name, description, strict = given.get("name"), given.get("description"), given.get("strict")
    if not isinstance(name, str) or not _NAME.fullmatch(name) or not name.isprintable():
        raise RequestError(
            f"{field}.name: use 1 to 256 characters without spaces, quotes and brackets, not {name!r:.80}"
        )
    if description is not None and not isinstance(description, str):
        raise RequestError(f"{field}.description: must be text, not {description!r:.60}")
    if strict is not None and not isinstance(strict, bool):
        raise RequestError(f"{field}.strict: must be true or false, not {strict!r:.60}")
    parameters = given.get("parameters")
    if parameters is None or parameters == []:
        parameters = _NO_PARAMETERS
    else:
        schema = read_schema(f"{field}.parameters", parameters)
        parameters = {key: value for key, value in schema.items() if key != "type" or value is not None}
    kind = parameters.get("type")
    schema = _ANY_OBJECT | parameters
    if kind not in (None, "object"):
        if strict:
            raise RequestError(f'{field}.parameters: type must be "object", not {kind!r:.60}')
        schema = _ANY_OBJECT if not isinstance(kind, list) or "object" not in kind else parameters | _ANY_OBJECT
    shown = {"name": name, "description": description or "", "parameters": parameters}
    return {"type": "function", "function": shown}, CallableFunction(
        name, schema if strict else lenient(schema), f"{field}.parameters"
    )


def _is_ignored(choice: Any) -> bool:
    """Return whether a choice or an entry of its list is a tool of a kind that is ignored."""
    kind = choice.get("type") if isinstance(choice, dict) else None
    return isinstance(kind, str) and kind not in (*_KINDS, "tool", "allowed_tools", "auto", "none", "required", "any")


def _read_choice(choice: Any, names: list[str]) -> tuple[str, list[str]]:
    """Return the mode ("none", "auto", "required", or "function" for exactly one call) and the callable functions."""
    mode = choice.get("type") if isinstance(choice, dict) else choice
    if choice is None or _is_ignored(choice):
        return "auto", names
    if mode in ("none", "auto", "required", "any"):
        return "required" if mode == "any" else mode, names
    if not isinstance(choice, dict):
        raise RequestError(f'tool_choice: use "none", "auto", "required" or a function, not {choice!r:.60}')
    if mode in (*_KINDS, "tool"):
        return "function", [_named("tool_choice", choice, names)]
    if mode != "allowed_tools":
        raise RequestError(f'tool_choice.type: use "function" or "allowed_tools", not {mode!r:.60}')
    nested = choice.get("allowed_tools")
    field, allowed = ("tool_choice", choice) if nested is None else ("tool_choice.allowed_tools", nested)
    mode, listed = (allowed.get("mode"), allowed.get("tools")) if isinstance(allowed, dict) else (None, None)
    if mode not in ("auto", "required"):
        raise RequestError(f'{field}.mode: use "auto" or "required", not {mode!r:.60}')
    if not isinstance(listed, list) or not listed:
        raise RequestError(f"{field}.tools: list at least one function")
    chosen = [_named(f"{field}.tools[{i}]", one, names) for i, one in enumerate(listed) if not _is_ignored(one)]
    return mode, list(dict.fromkeys(chosen))


def _named(field: str, choice: Any, names: list[str]) -> str:
    """Return the name of the function in a choice, which has it in an object of its own, or beside its type."""
    kind = next((kind for kind in _KINDS if isinstance(choice, dict) and isinstance(choice.get(kind), dict)), None)
    function = choice if kind is None else choice[kind]
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or name not in names:
        raise RequestError(f"{field}{'' if kind is None else '.' + kind}.name: {name!r:.80} is none of the tools")
    return name

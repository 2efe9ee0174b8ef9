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
from specinfer.inputs.chat.special_tokens import SpecialToken
from specinfer.inputs.formats.call_grammar import CallableFunction, CallGrammar
from specinfer.inputs.formats.calls import ToolFormat, find_format
from specinfer.inputs.formats.parser import OutputParser
from specinfer.server.schemas import read_schema

MAX_TOOLS = 128
_MAX_CHARACTERS = 300_000  # limit on all tools together
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}", re.ASCII)
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


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
    _grammar: CallGrammar | None = None

    def parser(self) -> OutputParser:
        """Return a parser for one response; each of `n` responses needs its own."""
        return OutputParser(self.call_format)

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
    grammar = CallGrammar(
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


def _read_tools(tools: Sequence[Any]) -> tuple[list[dict[str, Any]], dict[str, CallableFunction]]:
    """Return the tools in the format for templates, and their functions by name."""
    if not isinstance(tools, (list, tuple)):
        raise RequestError(f"tools: must be a list of functions, not {tools!r:.60}")
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools: {len(tools)} are too many; send at most {MAX_TOOLS}")
    shown: list[dict[str, Any]] = []
    functions: dict[str, CallableFunction] = {}
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


def _read_function(field: str, given: Any) -> tuple[dict[str, Any], CallableFunction]:
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
    return function_fields, CallableFunction(name, {"type": "object"} | parameters | options)


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

"""The format of tool calls of a model, found by rendering a call with its chat template and reading it."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, TypeAlias

from specinfer.inputs.formats.calls import FORMATS, HARMONY, LFM2, SYSTEM_PROMPT_FORMAT, CallFormat
from specinfer.inputs.formats.parser import OutputParser

# Renders messages and tools; None if the template refuses them.
Render: TypeAlias = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], str | None]

# Texts of templates that show tools without the format of calls.
_HINTS = (("<|tool_list_start|>", LFM2), ("List of tools: ", LFM2))
_NAME, _ARGUMENTS, _ID = "find_the_item", {"label": "red box", "count": 3}, "call12345"
_SCHEMA = {"type": "object", "properties": {"label": {"type": "string"}, "count": {"type": "integer"}}}
_FUNCTION = {"name": _NAME, "description": "Find it.", "parameters": _SCHEMA | {"required": ["label"]}}
_TOOLS = [{"type": "function", "function": _FUNCTION}]
_REQUEST = "Where is that item?"
_USER = {"role": "user", "content": _REQUEST}
_RESULT = {"role": "tool", "tool_call_id": _ID, "name": _NAME, "content": "found"}


def find_format(template: str | None, render: Render, given: CallFormat | None = None) -> CallFormat:
    """Return the format of a chat template.

    It is not native if the template does not show tools, or if their calls are in an unknown format: then the tools
    are written into a message.

    Args:
        given: The operator's choice: how calls are written is then known, and what the template writes is looked at.
    """
    shown = render([_USER], _TOOLS) if template is not None and "tools" in template else None
    if shown is None or template is None or _NAME not in shown:
        return replace(given or SYSTEM_PROMPT_FORMAT, is_native=False)
    for arguments, is_text in ((_ARGUMENTS, False), (json.dumps(_ARGUMENTS), True)):
        for content in ("", None):
            call = {"id": _ID, "type": "function", "function": {"name": _NAME, "arguments": arguments}}
            message = {"role": "assistant", "content": content, "tool_calls": [call]}
            text = render([_USER, message, _RESULT], _TOOLS) or render([_USER, message], _TOOLS) or ""
            # What the call adds; the mark of a call may begin like what is there without it.
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(shown, text, strict=False)))
            added, after = text[same:], text.rpartition(_REQUEST)[2]
            if _NAME in added:
                found = given or _format_of(added) or _format_of(after)
                return SYSTEM_PROMPT_FORMAT if found is None else replace(found, has_text_arguments=is_text)
    # The template leaves earlier calls out: they are written into the content.
    named = (call_format for text, call_format in _HINTS if text in template)
    marked = (call_format for call_format in FORMATS if _is_marked(call_format, template))
    found = given or next(named, None) or next(marked, None)
    return SYSTEM_PROMPT_FORMAT if found is None else replace(found, writes_calls=False)


def _format_of(text: str) -> CallFormat | None:
    """Return the format in which a rendered text has the call."""
    for call_format in FORMATS:
        at = text.find(call_format.trigger)
        if call_format is HARMONY:
            at = text.find(" to=functions.") if "<|message|>" in text else -1
        if at < 0:
            continue
        parser = OutputParser(replace(call_format, also=()), {_NAME: _SCHEMA})
        deltas = [*parser.push(text[at:]), *parser.finish()]
        names = [delta.name for delta in deltas if delta.name is not None]
        if names == [_NAME] and _same_json("".join(delta.arguments for delta in deltas)):
            return call_format
    return None


def _same_json(text: str) -> bool:
    try:
        return bool(json.loads(text) == _ARGUMENTS)
    except ValueError:
        return False


def _is_marked(call_format: CallFormat, template: str) -> bool:
    """Return whether a template has the marks of a format, as in instructions for the model."""
    marks = [text for text in call_format.texts if len(text) > 3 and text[0] in "<["]
    return bool(marks) and all(mark in template for mark in marks)

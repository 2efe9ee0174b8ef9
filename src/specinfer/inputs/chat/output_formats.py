"""The formats of one model's thoughts and tool calls, by its chat template and its tokenizer, or by the operator.

The format of calls is found by rendering a call with the template and reading it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import takewhile
from typing import Any, TypeAlias, TypeVar

from specinfer.core.config import NONE
from specinfer.core.rules import AUTO
from specinfer.core.thought import Reasoning
from specinfer.inputs.chat.rendering import render
from specinfer.inputs.formats.calls import CALL_FORMATS, FORMATS, LFM2, SYSTEM_PROMPT_FORMAT, CallFormat
from specinfer.inputs.formats.parser import OutputParser
from specinfer.inputs.formats.reasoning import REASONING_FORMATS, ReasoningFormat, find_reasoning

T = TypeVar("T")
_TAIL = 64  # tokens at the end of a prompt, in which the text before a thought is


class OutputFormats:
    """The formats of what a model writes.

    Args:
        tokenizer: The model's tokenizer with `apply_chat_template`, or None.
        reasoning_parser: The name of the format of thoughts, "auto" or "none".
        tool_call_parser: The name of the format of calls, or "auto".

    Raises:
        ValueError: A name is not known.
    """

    def __init__(self, tokenizer: Any, reasoning_parser: str, tool_call_parser: str) -> None:
        self._tokenizer = tokenizer
        self.names = reasoning_parser, tool_call_parser
        self._reasoning = _named("reasoning_parser", reasoning_parser, REASONING_FORMATS, (AUTO, NONE))
        self._calls = _named("tool_call_parser", tool_call_parser, CALL_FORMATS, (AUTO,))
        self._found: dict[str | None, CallFormat] = {}  # by template; the operator's and the model's are few

    def calls(self, template: str | None) -> CallFormat:
        """Return the format of tool calls under a chat template."""
        if template not in self._found:
            self._found[template] = self._find_calls(template)
        return self._found[template]

    def reasoning_format(self, template: str | None) -> ReasoningFormat | None:
        """Return the format of thoughts under a chat template, or None if there are none, or they stay in the text."""
        return find_reasoning(template) if self.names[0] == AUTO else self._reasoning

    def reasoning(self, template: str | None, ids: Sequence[int]) -> Reasoning | None:
        """Return the thought of the answer to a rendered conversation, or None if it has none."""
        form = self.reasoning_format(template)
        if form is None or self._tokenizer is None:
            return None
        is_open = False if form.has_channels else self._is_open(form, ids)
        if is_open is None:
            return None
        end_ids = tuple(self._tokenizer.encode(form.forced_end, add_special_tokens=False))
        return Reasoning(form.start, form.end, end_ids, is_open, form.has_channels, form.other_ends)

    def _is_open(self, form: ReasoningFormat, ids: Sequence[int]) -> bool | None:
        """Return whether a prompt ends within a thought; None if it ends right after one."""
        tail = self._tokenizer.decode(ids[-_TAIL:]).rstrip()
        if tail.endswith(form.end):
            return None
        if tail.endswith(form.start):
            return True
        start = self._tokenizer.convert_tokens_to_ids(form.start)
        if start is None or start == self._tokenizer.unk_token_id:
            return False
        # The last message goes on, and its thought may have begun: after it, no message and no thought has ended.
        return bool(next((token for token in reversed(ids) if token == start or token in self._marks), None) == start)

    @cached_property
    def _marks(self) -> frozenset[int]:
        """The tokens added to the vocabulary, of which some are between messages, without those for whitespace."""
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        return frozenset(i for i, token in added.items() if not token.content.isspace())

    def _find_calls(self, template: str | None) -> CallFormat:
        def try_on(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str | None:
            try:
                return render(self._tokenizer, messages, tools=list(tools), chat_template=template)
            except Exception:  # templates are programs and may raise anything
                return None

        return find_format(template, try_on, self._calls)


def _named(field: str, name: str, known: Mapping[str, T], words: Sequence[str]) -> T | None:
    if name not in known and name not in words:
        raise ValueError(f"{field}: {name!r} is not known; use one of {', '.join([*words, *sorted(known)])}")
    return known.get(name)


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
                known = given or _format_of(added) or _format_of(after)
                return SYSTEM_PROMPT_FORMAT if known is None else replace(known, has_text_arguments=is_text)
    # The template leaves earlier calls out: they are written into the content.
    named = (call_format for text, call_format in _HINTS if text in template)
    marked = (call_format for call_format in FORMATS if _is_marked(call_format, template))
    known = given or next(named, None) or next(marked, None)
    return SYSTEM_PROMPT_FORMAT if known is None else replace(known, writes_calls=False)


def _format_of(text: str) -> CallFormat | None:
    """Return the format in which a rendered text has the call."""
    for call_format in FORMATS:
        at = text.find(call_format.rendered_trigger or call_format.trigger)
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

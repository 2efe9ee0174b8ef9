"""The formats of one model's thoughts and tool calls, by its chat template and its tokenizer, or by the operator."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

from specinfer.core.config import AUTO, NONE
from specinfer.core.thought import Reasoning
from specinfer.inputs.formats.calls import CALL_FORMATS, CallFormat
from specinfer.inputs.formats.detection import find_format
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
        found = self.reasoning_format(template)
        if found is None or self._tokenizer is None:
            return None
        is_open = False if found.has_channels else self._is_open(found, ids)
        if is_open is None:
            return None
        end_ids = tuple(self._tokenizer.encode(found.forced_end, add_special_tokens=False))
        return Reasoning(found.start, found.end, end_ids, is_open, found.has_channels, found.other_ends)

    def _is_open(self, found: ReasoningFormat, ids: Sequence[int]) -> bool | None:
        """Return whether a prompt ends within a thought; None if it ends right after one."""
        tail = self._tokenizer.decode(ids[-_TAIL:]).rstrip()
        if tail.endswith(found.end):
            return None
        if tail.endswith(found.start):
            return True
        start = self._tokenizer.convert_tokens_to_ids(found.start)
        if start is None or start == self._tokenizer.unk_token_id:
            return False
        # The last message goes on, and its thought may have begun: after it, no message and no thought has ended.
        return bool(next((one for one in reversed(ids) if one == start or one in self._marks), None) == start)

    @cached_property
    def _marks(self) -> frozenset[int]:
        """The tokens added to the vocabulary, of which some are between messages, without those for whitespace."""
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        return frozenset(i for i, token in added.items() if not token.content.isspace())

    def _find_calls(self, template: str | None) -> CallFormat:
        def render(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str | None:
            try:
                text: str = self._tokenizer.apply_chat_template(
                    list(messages), tools=list(tools), chat_template=template, tokenize=False
                )
            except Exception:  # templates are programs and may raise anything
                return None
            return text

        return find_format(template, render, self._calls)


def _named(field: str, name: str, known: Mapping[str, T], words: Sequence[str]) -> T | None:
    if name not in known and name not in words:
        raise ValueError(f"{field}: {name!r} is not known; use one of {', '.join([*words, *sorted(known)])}")
    return known.get(name)

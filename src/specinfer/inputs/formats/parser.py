"""Parsing of a response's text into content and tool calls, piece by piece as it comes.

Each character is looked at a bounded number of times, and nothing is evaluated. The parser does not rely on the grammar
of `call_grammar.py`: text that turns out not to be a call becomes content.
"""

import re
import uuid
from dataclasses import dataclass, replace
from enum import Enum, auto

from specinfer.inputs.formats.calls import ToolFormat

_LETTER = r"[^\s\"'`\\<>()\[\]{}=,|]"  # of a name
_NAME_BEGINS = {True: re.compile(rf'"{_LETTER}{{0,256}}'), False: re.compile(rf"{_LETTER}{{0,256}}")}
_NAMES = {True: re.compile(rf'"({_LETTER}{{1,256}})"'), False: re.compile(rf"({_LETTER}{{1,256}})(?!{_LETTER})")}
_STRUCTURE = re.compile(r'["\\{}\[\]]')  # the characters that determine where a JSON value ends
_SPACES = " \t\r\n"


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """A piece of a response: text, a part of a thought, or a part of a call.

    Attributes:
        content: Text of the response; empty in a part of a thought or of a call.
        reasoning: Text of a thought.
        index: The index of the call that this part belongs to, from 0; None for content.
        id: The call's id, in its first part.
        name: The function's name, in the first part of the call.
        arguments: More of the JSON text of the arguments.
    """

    content: str = ""
    reasoning: str = ""
    index: int | None = None
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class _State(Enum):
    PLAIN = auto()  # everything is content
    START = auto()  # only whitespace so far, and a call may begin only here
    TEXT = auto()  # content in which a call may begin
    HEAD = auto()  # the beginning of a call
    ARGUMENTS = auto()
    TAIL = auto()  # the text after the arguments
    LIST = auto()  # after one call of a list


class OutputParser:
    """A parser of one response as it is generated.

    Args:
        call_format: The model's format of calls, or None for a response without tools, which is all content.
    """

    def __init__(self, call_format: ToolFormat | None) -> None:
        self._pending = ""  # received but not parsed yet
        self._held: list[str] = []  # whitespace that is not content if a call follows
        self._raw: list[str] = []  # text of a call's beginning, in case it is not one
        self._expected: list[str | None] = []  # the next texts of a call's beginning or end; None is the name
        self._name = ""
        self._num_calls = self._depth = 0
        self._in_string = self._is_escaped = False
        self._state = _State.PLAIN
        if call_format is not None:
            self._format = call_format
            self._state = _State.TEXT if call_format.follows_text else _State.START

    @property
    def has_calls(self) -> bool:
        """True if at least one call has begun."""
        return self._num_calls > 0

    @property
    def has_whole_calls(self) -> bool:
        """True if there are calls, and the arguments of the last one have ended."""
        return self.has_calls and self._state is not _State.ARGUMENTS

    def push(self, text: str) -> list[OutputDelta]:
        """Add text, and return the deltas that are certain now."""
        self._pending += text
        steps = {
            _State.PLAIN: self._read_plain,
            _State.START: self._read_start,
            _State.TEXT: self._read_text,
            _State.HEAD: self._read_head,
            _State.ARGUMENTS: self._read_arguments,
            _State.TAIL: self._read_tail,
            _State.LIST: self._read_list,
        }
        deltas: list[OutputDelta] = []
        before: _State | None = None
        while self._pending and self._state is not before:  # a step that does not change the state waits for more text
            before = self._state
            deltas += steps[before]()
        return _joined(deltas)

    def finish(self) -> list[OutputDelta]:
        """Return the text that was kept back at the end of the response. A call without arguments is dropped."""
        is_text = self._state in (_State.START, _State.TEXT, _State.PLAIN)
        left = "".join(self._held) + self._pending if is_text else ""
        self._held, self._pending = [], ""
        is_shown = (left and not self.has_calls) or left.strip(_SPACES)
        return [OutputDelta(left)] if is_shown else []

    # ------------------------------------------------------------------------------------ content

    def _read_plain(self) -> list[OutputDelta]:
        text, self._pending = self._pending, ""
        return self._content(text, holds_back=self.has_calls)

    def _read_start(self) -> list[OutputDelta]:
        rest = self._pending.lstrip(_SPACES)
        self._held.append(self._pending[: len(self._pending) - len(rest)])
        lead, trigger = self._format.lead or "", self._format.trigger
        self._pending = rest = rest.removeprefix(lead).lstrip(_SPACES)
        if rest.startswith(trigger):
            self._begin(self._format.first)
        elif not trigger.startswith(rest) and not lead.startswith(rest):
            self._state = _State.PLAIN
        return []

    def _read_text(self) -> list[OutputDelta]:
        trigger = self._format.trigger
        at = self._pending.find(trigger)
        end = at if at >= 0 else len(self._pending) - _overlap(self._pending, trigger)
        text, self._pending = self._pending[:end], self._pending[end:]
        deltas = self._content(text, holds_back=True)
        if at >= 0:
            self._begin(self._format.first)
        return deltas

    def _content(self, text: str, *, holds_back: bool) -> list[OutputDelta]:
        """Return content; whitespace at its end may be kept back until more text follows."""
        body = text.rstrip(_SPACES) if holds_back else text
        deltas = [OutputDelta("".join(self._held) + body)] if body else []
        if body:
            self._held = []
        self._held.append(text[len(body) :])
        return deltas

    # -------------------------------------------------------------------------------------- calls

    def _begin(self, texts: tuple[str, ...]) -> None:
        self._state, self._raw = _State.HEAD, self._held
        self._expected = [*texts, None, *self._format.between]
        self._held = []

    def _read_head(self) -> list[OutputDelta]:
        while self._expected:
            text = self._expected[0]
            taken = self._take_name() if text is None else self._take(text)
            if not taken:
                return [] if taken is None else self._stray()
            del self._expected[0]
        taken = self._take("{")
        if not taken:
            return [] if taken is None else self._stray()
        self._state, self._depth, self._in_string = _State.ARGUMENTS, 1, False
        self._num_calls += 1
        call_id = f"call_{uuid.uuid4().hex[:24]}"
        return [OutputDelta(index=self._num_calls - 1, id=call_id, name=self._name, arguments="{")]

    def _read_arguments(self) -> list[OutputDelta]:
        end = self._end_of_arguments()
        text, self._pending = self._pending[:end], self._pending[end:]
        if self._depth == 0:
            self._state, self._expected, self._raw = _State.TAIL, list(self._format.after), []
        return [OutputDelta(index=self._num_calls - 1, arguments=text)]

    def _end_of_arguments(self) -> int:
        """Return the length of pending text that belongs to the arguments; the depth is 0 if they end there."""
        text, at = self._pending, int(self._is_escaped)
        self._is_escaped = False
        while (found := _STRUCTURE.search(text, at)) is not None:
            at = found.end()
            if found[0] == '"':
                self._in_string = not self._in_string
            elif found[0] == "\\":
                self._is_escaped = self._in_string and at == len(text)
                at += self._in_string
            elif not self._in_string:
                self._depth += 1 if found[0] in "{[" else -1
                if self._depth == 0:
                    return at
        return len(text)

    def _read_tail(self) -> list[OutputDelta]:
        while self._expected:
            text = self._expected[0]
            assert text is not None
            taken = self._take(text)
            if not taken:
                return [] if taken is None else self._stray()
            del self._expected[0]
        # Further calls of a list have their own beginning; otherwise a call begins as the first one did.
        self._raw = []
        self._state = _State.LIST if self._format.end else self._content_state
        return []

    def _read_list(self) -> list[OutputDelta]:
        for texts in (self._format.again, self._format.end):
            taken = self._take(texts[0])
            if taken is None:
                return []
            if taken and texts is self._format.again:
                self._begin(texts)
                del self._expected[0]
                return []
            if taken:
                self._state, self._raw = self._content_state, []
                return []
        return self._stray()

    def _stray(self) -> list[OutputDelta]:
        """Return the text of a supposed call as content: it was not a call."""
        raw, self._raw = "".join(self._raw), []
        self._state = self._content_state
        return self._content(raw, holds_back=True)

    @property
    def _content_state(self) -> _State:
        return _State.TEXT if self._format.follows_text else _State.PLAIN

    def _take(self, text: str) -> bool | None:
        """Consume a text, after whitespace. True if it was next, False if another text is, None if not known yet."""
        self._skip_spaces()
        if self._pending.startswith(text):
            self._raw.append(text)
            self._pending = self._pending[len(text) :]
            return True
        return None if text.startswith(self._pending) else False

    def _take_name(self) -> bool | None:
        self._skip_spaces()
        found = _NAMES[self._format.quotes_name].match(self._pending)
        if found is not None and (self._format.quotes_name or found.end() < len(self._pending)):
            self._name = found[1]
            self._raw.append(found[0])
            self._pending = self._pending[found.end() :]
            return True
        begun = _NAME_BEGINS[self._format.quotes_name].fullmatch(self._pending)
        return None if begun is not None or not self._pending else False

    def _skip_spaces(self) -> None:
        rest = self._pending.lstrip(_SPACES)
        self._raw.append(self._pending[: len(self._pending) - len(rest)])
        self._pending = rest


def _overlap(text: str, trigger: str) -> int:
    """Return how many characters at the end of a text may be the beginning of the trigger."""
    for length in range(min(len(trigger) - 1, len(text)), 0, -1):
        if text.endswith(trigger[:length]):
            return length
    return 0


def _joined(deltas: list[OutputDelta]) -> list[OutputDelta]:
    """Join neighbouring deltas of the same call, or of content."""
    joined: list[OutputDelta] = []
    for delta in deltas:
        last = joined[-1] if joined else None
        if last is not None and last.index == delta.index and delta.id is None:
            joined[-1] = replace(last, content=last.content + delta.content, arguments=last.arguments + delta.arguments)
        else:
            joined.append(delta)
    return joined

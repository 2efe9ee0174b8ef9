"""Reading of tool calls in one format from text that comes in pieces."""

import json
import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from specinfer.inputs.formats.arguments import is_text, json_of_braces, json_of_keywords, json_of_text
from specinfer.inputs.formats.calls import (
    Arguments,
    BracedArguments,
    CallFormat,
    CallNumber,
    JsonArguments,
    KeywordArguments,
    Label,
    Name,
    Part,
    TaggedArguments,
)
from specinfer.inputs.formats.scanner import Lines, Reading, Scanner

_IN_JSON = re.compile(r'["\\{}\[\]]')  # the characters that determine where a JSON value ends
_IN_PYTHON = re.compile(r"""["'\\(){}\[\]]""")
_MAX_UNREADABLE = 16  # of a response: what is within arguments that cannot be read is read again


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """A piece of a response: text, a part of a thought, or a part of a call.

    Attributes:
        content: Text of the response; empty in a part of a thought or of a call.
        reasoning: Text of a thought.
        index: The index of the call that this part belongs to, from 0; None for content and thoughts.
        id: The call's id, in its first part, which has no arguments.
        name: The function's name, in the first part of the call.
        arguments: More of the JSON text of the arguments.
    """

    content: str = ""
    reasoning: str = ""
    index: int | None = None
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class CallReader:
    """A reader of calls, which sends each as deltas while it is read.

    Args:
        functions: The JSON schemas of the arguments of functions that may be called, by name.
        send: Takes the deltas.
    """

    def __init__(
        self,
        scanner: Scanner,
        functions: Mapping[str, Mapping[str, Any]],
        send: Callable[[OutputDelta], object],
    ) -> None:
        self._scanner, self.functions, self._send_delta = scanner, functions, send
        self._name = self._number = ""
        self._num_unreadable = 0
        self.num_calls = 0
        self.is_in_call = False

    def read_group(self, style: CallFormat, *, is_known: bool = False) -> Reading[bool]:
        """Read a call, or several that belong together; if it is none, return False and read nothing.

        Args:
            is_known: Whether only a function of the request may be called.
        """
        scanner = self._scanner
        scanner.begin()
        is_call = yield from self._take_all(style.begin)
        is_call = is_call and (yield from self._read_call(style, is_known=is_known))
        if not is_call:
            scanner.put_back()
            return False
        between = [text for text in style.between if text.strip()]
        while style.begin or between:
            scanner.begin()
            if not (yield from scanner.take(between[0]) if between else self._sees_call(style)):
                if not (yield from self._take_all(style.end)):
                    self._stray()
                break
            if not (yield from self._read_call(style)):
                self._stray()
                break
        return True

    def _sees_call(self, style: CallFormat) -> Reading[bool]:
        """Return whether another call of a group is next, in a format without text between calls."""
        first = style.call[0]
        if isinstance(first, str):
            return (yield from self._scanner.sees(first))
        return not (yield from self._scanner.sees(style.end[0])) and not self._scanner.is_cut

    def begin_call(self, style: CallFormat, name: str, number: str = "") -> None:
        """Send the first part of a call."""
        call_id = f"call_{uuid.uuid4().hex[:24]}"
        if style.id_format is not None:
            call_id = style.id_format.format(name=name, number=number or self.num_calls)
        self._send_delta(OutputDelta(index=self.num_calls, id=call_id, name=name))
        self.num_calls += 1
        self.is_in_call = True

    def send_arguments(self, text: str) -> None:
        """Send more of the arguments of the last call."""
        if text:
            self._send_delta(OutputDelta(index=self.num_calls - 1, arguments=text))

    def _stray(self) -> None:
        """Put back text that the format does not have after a call; drop markup that was cut off."""
        if self._scanner.is_cut:
            self._scanner.drop()
        else:
            self._scanner.put_back()

    def _take_all(self, texts: tuple[str, ...]) -> Reading[bool]:
        for text in texts:
            if text.strip() and not (yield from self._scanner.take(text)):
                return False
        return True

    def _read_call(self, style: CallFormat, *, is_known: bool = False) -> Reading[bool]:
        """Read one call. False if it is none; after its arguments have begun it is one, whatever follows."""
        parts = [part for part in style.call if not isinstance(part, str) or part.strip()]
        self._name = self._number = ""
        for i, part in enumerate(parts):
            if not isinstance(part, Arguments):
                if not (yield from self._read_part(part, parts[i + 1])):
                    return False
                continue
            if (is_known and self._name not in self.functions) or not (yield from self._read_arguments(part, style)):
                return False
            yield from self._read_end([text for text in parts[i + 1 :] if isinstance(text, str)])
            return True
        return False

    def _read_part(self, part: Part, following: Part) -> Reading[bool]:
        if isinstance(part, str):
            return (yield from self._scanner.take(part))
        if isinstance(part, (Name, Label)) and part.is_quoted:
            text = yield from self._scanner.take_quoted()
        else:
            text = yield from self._scanner.take_word(following.strip()[0] if isinstance(following, str) else "")
        if text is None:
            return False
        if isinstance(part, Name):
            self._name = text
        elif isinstance(part, CallNumber):
            self._number = text
        return True

    def _read_end(self, texts: list[str]) -> Reading[None]:
        """Read the texts after the arguments."""
        scanner = self._scanner
        scanner.begin()
        for text in texts:
            if text == "}" and (yield from scanner.sees(",")):  # more members of the object, such as an id
                yield from scanner.read_balanced(_IN_JSON, ('"',), len)
            elif not (yield from scanner.take(text)):
                self._stray()
                return

    # -------------------------------------------------------------------------------- arguments

    def _read_arguments(self, part: Arguments, style: CallFormat) -> Reading[bool]:
        """Read and send the arguments; False, and nothing is sent, if there are none."""
        begun: str | None = ""
        if isinstance(part, JsonArguments):
            begun = "{" if (yield from self._scanner.take("{")) else None
        elif not isinstance(part, TaggedArguments):
            begun = yield from self._read_converted(part)
        if begun is None:
            return False
        self.begin_call(style, self._name, self._number)
        self.send_arguments(begun)
        is_whole = True
        if isinstance(part, JsonArguments):
            is_whole = yield from self._scanner.read_balanced(_IN_JSON, ('"',), self.send_arguments)
        elif isinstance(part, TaggedArguments):
            is_whole = yield from self._read_tagged(part)
        self.is_in_call = not is_whole
        return True

    def _read_converted(self, part: KeywordArguments | BracedArguments) -> Reading[str | None]:
        """Read arguments that become JSON as a whole; None if they are no arguments."""
        scanner, pieces = self._scanner, list[str]()
        if self._num_unreadable >= _MAX_UNREADABLE:
            return None
        quotes: tuple[str, ...] = ('"', "'") if isinstance(part, KeywordArguments) else (part.quote,)
        is_python = isinstance(part, KeywordArguments)
        structure = _IN_PYTHON if is_python else re.compile(rf"{re.escape(quotes[0])}|[{{}}\[\]]")
        if not (yield from scanner.take("(" if is_python else "{")):
            return None
        is_whole = yield from scanner.read_balanced(structure, quotes, pieces.append)
        text = "".join(pieces)
        scanner.record(text)
        if not is_whole:
            return None
        made = json_of_keywords(text[:-1]) if is_python else json_of_braces("{" + text, quotes[0])
        self._num_unreadable += made is None
        return made

    def _read_tagged(self, tags: TaggedArguments) -> Reading[bool]:
        """Read and send arguments in tags; return whether they have ended."""
        scanner, separator = self._scanner, ""
        properties = self.functions.get(self._name, {}).get("properties")
        self.send_arguments("{")
        scanner.begin()
        while (yield from scanner.take(tags.before_key)):
            key: list[str] = []
            yield from scanner.read_until(tags.after_key[:1], key.append)
            name, is_json = "".join(key).strip(), False
            for text, of_json in zip(tags.after_key[1:], (tags.after_key_of_json or tags.after_key)[1:], strict=True):
                if text.strip() and not (yield from scanner.take(text)):
                    is_json = yield from scanner.take(of_json)
            given = properties.get(name) if isinstance(properties, Mapping) else None
            schema = given if isinstance(given, Mapping) else {}
            start = f"{separator}{json.dumps(name, ensure_ascii=False)}: "
            if scanner.is_cut or not (yield from self._read_value(tags, start, {} if is_json else schema)):
                break
            separator = ", "
            scanner.begin()
        if scanner.is_cut:
            scanner.drop()
            return False
        scanner.put_back()
        self.send_arguments("}")
        return True

    def _read_value(self, tags: TaggedArguments, start: str, schema: Mapping[str, Any]) -> Reading[bool]:
        """Read and send one value, as it comes if it is text; return whether it has ended."""
        lines = Lines() if tags.has_lines else None
        is_sent = schema.get("type") == "string" and is_text(schema)
        pieces: list[str] = []

        def take(text: str) -> None:
            text = text if lines is None else lines.push(text)
            if is_sent:
                self.send_arguments(json.dumps(text, ensure_ascii=False)[1:-1])
            else:
                pieces.append(text)

        self.send_arguments(start + '"' if is_sent else "")
        end = yield from self._scanner.read_until((tags.after_value,), take, drops_begun=True)
        if end is not None:
            self.send_arguments('"' if is_sent else start + json_of_text("".join(pieces), schema))
        return end is not None

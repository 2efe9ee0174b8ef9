"""The grammar of responses with tool calls, in Lark's notation, made from a format of calls."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specinfer.core.errors import RequestError
from specinfer.core.structured_outputs import StructuredOutputsParams
from specinfer.inputs.formats.argument_grammar import Arguments, CallableFunction
from specinfer.inputs.formats.calls import CallFormat, CallNumber, JsonArguments, Label, Name, Part
from specinfer.inputs.formats.harmony import TEXTS, channel_rules
from specinfer.inputs.formats.lark import SPACE, Literals, SpecialToken, quoted, ranges

_LABEL = "LABEL: /[A-Za-z0-9_-]{1,64}/"
_NUMBER = "NUMBER: /[0-9]{1,4}/"


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """The grammar of a response.

    Attributes:
        must_call: Whether the response is nothing but calls.
        is_parallel: Whether it may have more than one call.
    """

    call_format: CallFormat
    functions: tuple[CallableFunction, ...]
    must_call: bool
    is_parallel: bool
    special_tokens: Mapping[str, SpecialToken]

    def params(self, answer: StructuredOutputsParams | None) -> StructuredOutputsParams:
        """Return the grammar of calls and free text, or of calls and responses of another format."""
        style, literals = self.call_format, Literals({*self.call_format.texts, *TEXTS}, self.special_tokens)
        arguments = Arguments(literals)
        if answer is not None and not (style.follows_text or style.has_channels):
            raise RequestError(
                f"{answer.field}: this model's calls cannot be told from other JSON; leave it out, or the tools"
            )
        if style.has_channels:
            rules = self._with_channels("TEXT" if answer is None else "@answer", literals, arguments)
        elif answer is None and not self.must_call:
            rules = [*self._text(literals), *self._calls(literals, arguments)]
        else:
            start = "start: calls" if answer is None else "start: calls | @answer"
            rules = [start, f"opening: {self._opening(literals)}", *self._calls(literals, arguments)]
        named: dict[str, Any] = arguments.named | ({} if answer is None else {"answer": answer})
        thinks = style.has_channels  # thoughts are a part of the grammar
        return StructuredOutputsParams(
            grammar="\n".join(rules), schemas=named, field="tools", enable_in_reasoning=thinks
        )

    def _with_channels(self, shown: str, literals: Literals, arguments: Arguments) -> list[str]:
        """Return the rules for a response whose messages have channels, thoughts among them."""
        notation = self.call_format.call[-1]
        assert isinstance(notation, JsonArguments)
        arguments_rules = [arguments.rule(i, function, notation) for i, function in enumerate(self.functions)]
        names = (function.name for function in self.functions)
        rules = channel_rules(names, None if self.must_call else shown, literals)
        return [*rules, *(f"arguments_{i}: {rule}" for i, rule in enumerate(arguments_rules)), SPACE]

    def _calls(self, literals: Literals, arguments: Arguments) -> list[str]:
        """Return the rules for one call or several, after the text that marks their beginning."""
        style = self.call_format
        begin, (opener, *parts) = style.begin[1:], style.call
        tail = tuple(parts) if not style.begin else style.call
        rules = [self._call(i, function, tail, literals, arguments) for i, function in enumerate(self.functions)]
        names = " | ".join(f"call_{i}" for i in range(len(self.functions)))
        between = [*style.between, *([] if style.begin else [str(opener)])]
        more = f" ({_sequence([*map(literals.text, between), 'call'], leads=True)})*"
        if not self.is_parallel or not style.is_repeated:
            more = ""
        end = _sequence(map(literals.text, style.end), leads=True)
        # The text may end after whitespace, too: many models write a line break before they end it.
        calls = f"calls: {_sequence(['opening', *map(literals.text, begin), 'call'])}{more}{end} WS?"
        texts = "\n".join((calls, *rules))
        extra = [rule for name, rule in (("LABEL", _LABEL), ("NUMBER", _NUMBER)) if name in texts]
        return [calls, f"call: {names}", *rules, *arguments.rules, SPACE, *extra]

    def _call(
        self, i: int, function: CallableFunction, parts: tuple[Part, ...], literals: Literals, arguments: Arguments
    ) -> str:
        made: list[str] = []
        for part in parts:
            if isinstance(part, str):
                made.append(literals.text(part))
            elif isinstance(part, Name):
                name = json.dumps(function.name, ensure_ascii=False) if part.is_quoted else function.name
                made.append(quoted(name))
            elif isinstance(part, Label):
                made.append(r'"\"" LABEL "\""' if part.is_quoted else "LABEL")
            elif isinstance(part, CallNumber):
                made.append("NUMBER")
            else:
                made.append(arguments.rule(i, function, part))
        return f"call_{i}: {_sequence(made)}"

    def _opening(self, literals: Literals) -> str:
        lead = self.call_format.lead
        optional = f"{literals.text(lead)}? WS? " if lead is not None and lead in self.special_tokens else ""
        return optional + literals.text(self.call_format.trigger)

    def _text(self, literals: Literals) -> list[str]:
        """Return the rules for free text in which a call may begin. It includes shown tokens, except those of calls."""
        style, trigger = self.call_format, literals.text(self.call_format.trigger)
        others = [t.id for name, t in self.special_tokens.items() if t.is_shown and name not in style.texts]
        between = " (other TEXT)*" if others else ""
        rules = [f"other: <[{ranges(others)}]>"] if others else []
        if not style.follows_text:
            # Text that begins like a call could not be distinguished from one.
            start = re.escape(style.trigger[0])
            rules += [rf"FIRST: /([ \t\r\n]*[^ \t\r\n{start}](.|\n)*)?/", "TEXT: /(?s:.*)/"]
            return [f"start: calls | FIRST{between}", f"opening: {self._opening(literals)}", *rules]
        rules.insert(0, f"start: calls | TEXT{between}")
        before = "(TEXT other)* " if others else ""
        if style.trigger in self.special_tokens:
            # The trigger spelled as text would look like the token.
            spelled = rf"/(?s:.*){re.escape(style.trigger)}(?s:.*)/"
            return [*rules, f"TEXT: /(?s:.*)/ & ~{spelled}", f"opening: {before}TEXT {trigger}"]
        return [*rules, "TEXT: /(?s:.*)/", f"opening: {before}last", f"last[lazy]: TEXT {trigger}"]


def _sequence(texts: Any, *, leads: bool = False) -> str:
    """Return texts in a row with whitespace between them, and before the first one if it `leads`."""
    row = [text for text in texts if text]
    return (" WS? " if leads and row else "") + " WS? ".join(row)

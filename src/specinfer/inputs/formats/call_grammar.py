"""The grammar of responses with tool calls, in Lark's notation, made from a format of calls."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specinfer.core.errors import RequestError
from specinfer.core.structured_outputs import StructuredOutputsParams
from specinfer.inputs.chat.special_tokens import SpecialToken
from specinfer.inputs.formats.calls import ToolFormat


@dataclass(frozen=True, slots=True)
class CallableFunction:
    """A function that the model may call, and the JSON schema of its arguments."""

    name: str
    schema: dict[str, Any]


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """The grammar of a response in Lark's notation; each function's arguments are a separate JSON schema."""

    call_format: ToolFormat
    functions: tuple[CallableFunction, ...]
    must_call: bool
    is_parallel: bool
    special_tokens: Mapping[str, SpecialToken]

    def params(self, answer: StructuredOutputsParams | None) -> StructuredOutputsParams:
        """Return the grammar of calls, free text, or calls and responses of another format."""
        schemas: dict[str, Any] = {
            _rule_of(i, function.name): function.schema for i, function in enumerate(self.functions)
        }
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
        for i, function in enumerate(self.functions):
            name = json.dumps(function.name, ensure_ascii=False) if style.quotes_name else function.name
            named.append(self._sequence([name, *style.between], f"@{_rule_of(i, function.name)}"))
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


def _rule_of(index: int, name: str) -> str:
    """Return the name of a function's schema in the grammar, which may have fewer characters than a function's."""
    plain = re.sub(r"[^a-zA-Z0-9_-]", "_", name)
    return f"of-{name}" if plain == name else f"of-{plain}--{index}"


def _ranges(numbers: list[int]) -> str:
    """Return numbers in Lark's notation, with consecutive ones as a range."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(f"{first}-{last}" if first < last else str(first) for first, last in ranges)

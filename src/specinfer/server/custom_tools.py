"""Custom tools, which take text: the model calls one as a function of a string, whose JSON is decoded as it comes."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from specinfer.inputs.formats.parser import OutputDelta, OutputParser

_BEGINNING = ("{", '"input"', ":", '"')
# Characters of a JSON string. The first half of a surrogate pair is read together with what follows.
_CHARACTERS = re.compile(
    r'(?:[^"\\]|\\[^u]|\\u(?![dD][89abAB])[\da-fA-F]{4}|\\u[\da-fA-F]{4}(?=[^\\]|\\[^u]|\\u[\da-fA-F]{4}))*', re.ASCII
)


def function_of_custom(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a custom tool as a function. A grammar of its input is described to the model; a regex also holds."""
    text: dict[str, Any] = {"type": "string"}
    form = tool.get("format")
    grammar = form.get("grammar", form) if isinstance(form, dict) else None
    if isinstance(grammar, dict) and isinstance(definition := grammar.get("definition"), str):
        text["description"] = f"Text that matches this {grammar.get('syntax')} grammar:\n{definition}"
        if grammar.get("syntax") == "regex":
            text["pattern"] = f"^(?:{definition})$"
    parameters = {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}
    return {"name": tool.get("name"), "description": tool.get("description"), "parameters": parameters}


class CustomInputs:
    """A parser in whose deltas the arguments of custom tools are the text of their input.

    Args:
        names: The names of custom tools.
    """

    def __init__(self, parser: OutputParser, names: frozenset[str]) -> None:
        self._parser, self._names = parser, names
        self._is_custom = False
        self._expected: list[str] = []  # what is left of the beginning of the JSON
        self._pending = ""  # JSON of the input that is not decoded yet

    @property
    def has_whole_calls(self) -> bool:
        return self._parser.has_whole_calls

    def push(self, text: str) -> list[OutputDelta]:
        return self._decoded(self._parser.push(text))

    def finish(self) -> list[OutputDelta]:
        return self._decoded(self._parser.finish())

    def _decoded(self, deltas: Sequence[OutputDelta]) -> list[OutputDelta]:
        result = []
        for delta in deltas:
            if delta.name is not None:
                self._is_custom, self._expected, self._pending = delta.name in self._names, list(_BEGINNING), ""
            is_input = delta.index is not None and self._is_custom
            result.append(replace(delta, arguments=self._decode(delta.arguments)) if is_input else delta)
        return result

    def _decode(self, text: str) -> str:
        self._pending += text
        while self._expected:
            self._pending = self._pending.lstrip()
            if not self._pending.startswith(self._expected[0]):
                return ""
            self._pending = self._pending.removeprefix(self._expected.pop(0))
        found = _CHARACTERS.match(self._pending)
        assert found is not None
        self._pending = self._pending[found.end() :]
        value: str = json.loads(f'"{found[0]}"', strict=False)
        return value


Parser: TypeAlias = OutputParser | CustomInputs

"""The grammar of the arguments of calls in each notation, from the JSON schema of a function.

Arguments come in the order of the schema, as in JSON. Texts in tags and quotes may be anything but the text that ends
them, or one of the schema's choices; other values match their part of the schema.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specinfer.core.structured_outputs import StructuredOutputsParams
from specinfer.inputs.formats.arguments import choices_of, is_text, types_of
from specinfer.inputs.formats.calls import Arguments as Notation
from specinfer.inputs.formats.calls import BracedArguments, JsonArguments, KeywordArguments, TaggedArguments
from specinfer.inputs.formats.lark import Literals, quoted

_PYTHON_TEXT = r"""PYTHON_TEXT: /"([^"\\\n]|\\.){0,}"|'([^'\\\n]|\\.){0,}'/"""
_DIGITS = r"DIGITS: /-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,16})?/"
_KEY = r"KEY: /[A-Za-z_][A-Za-z0-9_.-]{0,63}/"
_PYTHON_VALUE = """python: PYTHON_TEXT | DIGITS | "True" | "False" | "None" | python_list | python_dict
python_list: "[" WS? (python (WS? "," WS? python)*)? WS? "]"
python_dict: "{" WS? (PYTHON_TEXT WS? ":" WS? python (WS? "," WS? PYTHON_TEXT WS? ":" WS? python)*)? WS? "}\""""
_BRACED_VALUE = """braced: quoted | DIGITS | "true" | "false" | "null" | braced_list | braced_dict
braced_list: "[" WS? (braced (WS? "," WS? braced)*)? WS? "]"
braced_dict: "{" WS? (KEY WS? ":" WS? braced (WS? "," WS? KEY WS? ":" WS? braced)*)? WS? "}\""""


@dataclass(frozen=True, slots=True)
class CallableFunction:
    """A function that the model may call, the JSON schema of its arguments, and the schema's field of the request."""

    name: str
    schema: dict[str, Any]
    field: str = dataclasses.field(default="tools", compare=False)

    @property
    def properties(self) -> dict[str, dict[str, Any]]:
        """The JSON schemas of the arguments, by name."""
        schemas = self.schema.get("properties")
        if not isinstance(schemas, Mapping):
            return {}
        return {name: dict(schema) if isinstance(schema, Mapping) else {} for name, schema in schemas.items()}

    def is_required(self, name: str) -> bool:
        """Return whether an argument must be given."""
        required = self.schema.get("required")
        return isinstance(required, Sequence) and name in required

    def part(self, name: str) -> dict[str, Any]:
        """Return the JSON schema of one argument, with what it refers to."""
        shared = {key: self.schema[key] for key in ("$defs", "definitions", "x-guidance") if key in self.schema}
        return shared | self.properties[name]


@dataclass(slots=True)
class Arguments:
    """The rules for arguments in one grammar.

    Attributes:
        named: Constraints that the rules refer to by name.
    """

    literals: Literals
    named: dict[str, StructuredOutputsParams] = field(default_factory=dict)
    _rules: dict[str, None] = field(default_factory=dict)

    @property
    def rules(self) -> list[str]:
        """All rules that were made."""
        return list(self._rules)

    def rule(self, i: int, function: CallableFunction, notation: Notation) -> str:
        """Return what matches the arguments of a function, the i-th of the grammar."""
        if isinstance(notation, JsonArguments):
            name = re.sub(r"[^\w-]", "-", function.name, flags=re.ASCII)
            return self._refer(i, name, function.schema, function.field)
        if isinstance(notation, TaggedArguments):
            return self._tagged(i, function, notation)
        if isinstance(notation, KeywordArguments):
            self._add(_PYTHON_TEXT, _DIGITS, *_PYTHON_VALUE.split("\n"))
            listed = self._listed(i, function, "=", "python", self._python)
            return f'"(" WS? {listed} WS? ")"'
        self._add(_DIGITS, _KEY, *_BRACED_VALUE.split("\n"), self._quoted_rule(notation))
        listed = self._listed(i, function, ":", "braced", lambda schema: self._braced(schema, notation))
        return f'"{{" WS? {listed} WS? "}}"'

    def _refer(self, i: int, name: str, schema: dict[str, Any], place: str) -> str:
        """Return a reference to a JSON schema, whose place in the request is in messages about it."""
        name = f"of-{name}" if f"of-{name}" not in self.named else f"of-{name}-{i}"
        self.named[name] = StructuredOutputsParams(json=schema, field=place)
        return f"@{name}"

    def _add(self, *rules: str) -> None:
        self._rules |= dict.fromkeys(rules)

    # ------------------------------------------------------------------------------------ tags

    def _tagged(self, i: int, function: CallableFunction, tags: TaggedArguments) -> str:
        before, row = self.literals.text(tags.before_key), []
        any_value, options = self.literals.until(tags.after_value)
        self._add(f"value{options}: {any_value}")
        for j, name in enumerate(function.properties):
            schema = function.part(name)
            text = is_text(schema)
            after = tags.after_key if text or not tags.after_key_of_json else tags.after_key_of_json
            head = " WS? ".join(filter(None, [quoted(name), *map(self.literals.text, after)]))
            rule = f"of_{i}_{j}"
            value = self._tagged_value(i, j, schema, tags, f"{function.field}.properties.{name}")
            self._add(f"{rule}: {before} {head} {value}")
            row.append(rule if function.is_required(name) else f"{rule}?")
        if not row and function.schema.get("additionalProperties", True) is not False:
            self._add(_KEY)
            row.append(
                f"({before} KEY {' WS? '.join(filter(None, map(self.literals.text, tags.after_key)))} value WS?)*"
            )
        return " WS? ".join(row)

    def _tagged_value(self, i: int, j: int, schema: dict[str, Any], tags: TaggedArguments, place: str) -> str:
        after = self.literals.text(tags.after_value)
        choices = _choices(schema)
        if choices is not None:
            return f"WS? ({' | '.join(quoted(text) for text in choices)}) WS? {after}"
        if is_text(schema) or "string" in types_of(schema) or not types_of(schema) & _JSON_TYPES:
            return "value"
        return f"WS? {self._refer(i, f'{i}-{j}', schema, place)} WS? {after}"

    # ------------------------------------------------------------------------- Python and braces

    def _python(self, schema: dict[str, Any]) -> str:
        if (choices := _choices(schema)) is not None:
            return "(" + " | ".join(quoted(json.dumps(text, ensure_ascii=False)) for text in choices) + ")"
        return _of_types(schema, {"string": "PYTHON_TEXT", "boolean": '"True" | "False"', "null": '"None"'}, "python")

    def _braced(self, schema: dict[str, Any], notation: BracedArguments) -> str:
        if (choices := _choices(schema)) is not None:
            quote = self.literals.text(notation.quote)
            return "(" + " | ".join(f"{quote} {quoted(text)} {quote}" for text in choices) + ")"
        return _of_types(schema, {"string": "quoted", "boolean": '"true" | "false"', "null": '"null"'}, "braced")

    def _quoted_rule(self, notation: BracedArguments) -> str:
        until, options = self.literals.until(notation.quote)
        if options:
            self._add(f"quoted_end{options}: {until}")
            until = "quoted_end"
        return f"quoted: {self.literals.text(notation.quote)} {until}"

    def _listed(
        self, i: int, function: CallableFunction, sign: str, any_value: str, value: Callable[[dict[str, Any]], str]
    ) -> str:
        """Return keys and values with commas between; those that are not required may be left out."""
        names = list(function.properties)
        if not names:
            if function.schema.get("additionalProperties", True) is False:
                return ""
            self._add(_KEY)
            other = f'KEY WS? "{sign}" WS? {any_value}'
            return f'({other} (WS? "," WS? {other})*)?'
        # of_0_3 matches the arguments from the third on; more_0_3 those, after another one.
        for j, name in enumerate(names):
            pair = f'{quoted(name)} WS? "{sign}" WS? {value(function.part(name))}'
            is_last = j == len(names) - 1
            rest = "" if is_last else f" more_{i}_{j + 1}"
            first, more = f"of_{i}_{j}: {pair}{rest}", f'more_{i}_{j}: WS? "," WS? {pair}{rest}'
            if not function.is_required(name):
                first += ' | ""' if is_last else f" | of_{i}_{j + 1}"
                more += ' | ""' if is_last else f" | more_{i}_{j + 1}"
            self._add(first, more)
        return f"of_{i}_0"


_JSON_TYPES = {"number", "integer", "boolean", "object", "array", "null"}


def _choices(schema: Mapping[str, Any]) -> list[str] | None:
    """Return the texts that are the only values of a schema, or None."""
    choices = choices_of(schema)
    return list(map(str, choices)) if choices and is_text(schema) else None


def _of_types(schema: Mapping[str, Any], rules: dict[str, str], other: str) -> str:
    """Return what matches values of the types of a schema."""
    types, matching = types_of(schema), []
    for kind in sorted(types):
        matching.append("DIGITS" if kind in ("number", "integer") else rules.get(kind, other))
    return "(" + " | ".join(dict.fromkeys(matching)) + ")" if matching else other

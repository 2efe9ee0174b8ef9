"""Constraints on an output, as callers give them; `grammar/` parses them."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specinfer.core.errors import as_tuple

_ANY_OBJECT = '{"type": "object"}'


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """The constraint on the output: exactly one of the fields.

    Attributes:
        json: A JSON schema, as text or as a dict; stored as text.
        regex: A regular expression that the whole output matches.
        choice: Strings, one of which is the output.
        grammar: A grammar in Lark's notation, whose first rule is `start` and which the output matches.
        json_object: True if the output is any JSON object.
        schemas: Constraints that `grammar` names as `@name`: JSON schemas (as text or as dicts), or params of any kind.
        enable_in_reasoning: Whether the constraint also holds within the thought of a model that thinks first; if not,
            it begins after the thought.
        disable_any_whitespace: True if JSON has no whitespace between its parts.
        whitespace_pattern: A regular expression for whitespace between the parts of JSON. By default it is a space, or
            one or two newlines and up to 20 spaces and tabs.
        disable_additional_properties, disable_fallback: Have no effect: an object that names properties has no others
            unless its schema says so, and nothing is tried in the place of a constraint.
        field: Name of the field in error messages.

    Raises:
        ValueError: None or several are given, or one is of the wrong type; the message names it.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    schemas: Mapping[str, "str | Mapping[str, Any] | StructuredOutputsParams"] | None = None
    enable_in_reasoning: bool = False
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    disable_additional_properties: bool = False
    disable_fallback: bool = False
    field: str = dataclasses.field(default="structured_outputs", compare=False)

    def __post_init__(self) -> None:
        if self.json_object is not None and not isinstance(self.json_object, bool):
            raise ValueError(f"structured_outputs: json_object must be True or left out, not {self.json_object!r}")
        if not isinstance(self.whitespace_pattern, str | None):
            raise ValueError(
                f"structured_outputs: whitespace_pattern must be text, not {self.whitespace_pattern!r:.60}"
            )
        given = [name for name in ("json", "regex", "choice", "grammar") if getattr(self, name) is not None]
        given += ["json_object"] if self.json_object else []
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs: give exactly one of json, regex, choice, grammar and json_object, not "
                f"{' and '.join(given) or 'none'}"
            )
        if self.choice is not None:
            object.__setattr__(self, "choice", as_tuple("structured_outputs: choice", self.choice))
            if not self.choice:
                raise ValueError("structured_outputs: choice is empty: no text could be generated; name one string")
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.schemas is not None:
            if self.grammar is None or not isinstance(self.schemas, Mapping):
                raise ValueError("structured_outputs: schemas must map names that grammar uses to constraints")
            named = {str(name): self._constraint(str(name), each) for name, each in self.schemas.items()}
            object.__setattr__(self, "schemas", named)
            self._named()
        for text in (self.regex, self.grammar, *(self.choice or ())):
            if text is not None and (not isinstance(text, str) or not text):
                raise ValueError(f"structured_outputs: {given[0]} must hold text that is not empty, not {text!r:.60}")
        try:
            "".join(self.choice or (self._own_text,)).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"structured_outputs: {given[0]} is not valid Unicode (a lone surrogate)") from error

    @property
    def kind(self) -> str:
        """Format of `text`.

        "json" (a schema), "regex", "choice" (a regular expression too), "grammar" (Lark's notation) or "grammars"
        (a JSON list of the name, the kind and the text of one grammar and of all constraints that are named in it).
        """
        return "grammars" if self.schemas else self._own_kind

    @property
    def text(self) -> str:
        if not self.schemas:
            return self._own_text
        return json.dumps([("", "grammar", self._own_text), *((name, *of) for name, of in self._named().items())])

    @property
    def _own_kind(self) -> str:
        return next((name for name in ("regex", "choice", "grammar") if getattr(self, name) is not None), "json")

    @property
    def _own_text(self) -> str:
        if self.choice is not None:
            return "|".join(map(_escaped, self.choice))
        text = self.regex or self.grammar or self.json or _ANY_OBJECT
        assert isinstance(text, str)
        if self._own_kind != "json" or not (self.disable_any_whitespace or self.whitespace_pattern is not None):
            return text
        schema = json.loads(text)
        options = schema["x-guidance"] if isinstance(schema.get("x-guidance"), dict) else {}
        options |= {
            "whitespace_flexible": not self.disable_any_whitespace,
            "whitespace_pattern": self.whitespace_pattern,
        }
        return json.dumps(schema | {"x-guidance": options})

    @property
    def fields(self) -> dict[str, str]:
        """Fields of the constraints by their names in the grammar; that of the grammar itself has the name ""."""
        fields = {"": self.field}
        for name, each in (self.schemas or {}).items():
            assert isinstance(each, StructuredOutputsParams)
            fields |= {**each.fields, name: each.field, "": self.field}
        return fields

    def _constraint(
        self, name: str, given: "str | Mapping[str, Any] | StructuredOutputsParams"
    ) -> "StructuredOutputsParams":
        if isinstance(given, StructuredOutputsParams):
            return given
        return replace(self, json=given, grammar=None, schemas=None, field=f"{self.field}.{name}")

    def _named(self) -> dict[str, tuple[str, str]]:
        """Return the kinds and texts of all constraints that are named here, those within named ones too.

        Raises:
            ValueError: Two different ones have the same name.
        """
        constraints: dict[str, tuple[str, str]] = {}
        for name, each in (self.schemas or {}).items():
            assert isinstance(each, StructuredOutputsParams)
            for key, value in ((name, (each._own_kind, each._own_text)), *each._named().items()):
                if constraints.setdefault(key, value) != value:
                    raise ValueError(f"structured_outputs: schemas has two constraints of the name {key!r:.60}")
        return constraints


def _schema_text(schema: object) -> str:
    """Return a JSON schema as text, after checking that it is an object."""
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False)
        value = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        if "integer string conversion" in reason:
            reason = "a number has thousands of digits"
        raise ValueError(f"structured_outputs: json is not a valid JSON schema: {reason}") from error
    if not isinstance(value, dict):
        raise ValueError(f"structured_outputs: json must be a JSON schema, an object such as {{...}}, not {text:.60}")
    return text


def _escaped(text: str) -> str:
    """Return a regular expression that matches only this text."""
    return "".join(char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)

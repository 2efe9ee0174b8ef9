"""Checks of a constraint before it is compiled: it is refused, or becomes a text that compiles.

A JSON schema is prepared (`json_schema.py`). What no grammar can enforce is ignored in a lenient schema: keywords, or
all but its type. A strict one is refused because of it.
"""

import json
from dataclasses import dataclass
from typing import Any

from llguidance import LLTokenizer

from specinfer.core.grammar.json_schema import Ignored, prepare
from specinfer.core.grammar.lark import plain_lark, refusal, remedy, shortened, too_long
from specinfer.core.grammar.matcher import make_matcher
from specinfer.core.grammar.schema_values import TYPES

_OPTIONS = "x-guidance"  # a keyword at the top of a schema, with llguidance's options
_WHITESPACE = {"whitespace_pattern": r" |\n{1,2}[ \t]{0,20}"}  # llama.cpp's; a model could repeat any other for ever


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of a check.

    Attributes:
        text: The constraint as it is compiled, or None if it cannot be.
        fault: The name of the constraint at fault within a Lark grammar, and what is wrong with it and what to change.
        ignored: What is left to the model: names of constraints, each with a place in its schema.
    """

    text: str | None
    fault: tuple[str, str] = ("", "")
    ignored: tuple[tuple[str, str], ...] = ()


def check(tokenizer: LLTokenizer, end_token: int, kind: str, text: str) -> Checked:
    """Check a constraint of a kind that `StructuredOutputsParams.kind` has."""
    if (wrong := too_long(kind, text)) is not None:
        return Checked(None, ("", wrong))
    parts = [_Part(*each) for each in _parts(kind, text)]
    for part in parts:
        part.prepare(end_token, is_outermost=kind == "grammars" and not part.name)
    error = None
    if all(part.fault is None for part in parts):
        error = _error(tokenizer, kind, _joined(kind, parts))
    if error is not None:
        for part in parts:
            if kind != "grammars" or part.kind != "grammar":  # one of several may refer to others
                part.mend(tokenizer)
        error = _error(tokenizer, kind, _joined(kind, parts))
    for part in parts:
        if part.fault is not None:
            return Checked(None, (part.name, part.fault))
    if error is not None:
        return Checked(None, ("", remedy(error)))
    return Checked(
        _joined(kind, parts), ignored=tuple((part.name, each.place) for part in parts for each in part.ignored)
    )


def loosest(kind: str, text: str) -> Checked:
    """Return a constraint whose lenient schemas are left to the model but for their types."""
    parts = [_Part(*each) for each in _parts(kind, text)]
    loosened = [part for part in parts if part.is_lenient]
    for part in loosened:
        part.loosen("")
    return Checked(_joined(kind, parts), ignored=tuple((part.name, "") for part in loosened))


class _Part:
    """A constraint of its own, or within a Lark grammar.

    Attributes:
        text: The constraint as it is compiled.
        ignored: What is ignored of its schema.
        fault: What is wrong with it and what to change, or None if nothing is.
    """

    def __init__(self, name: str, kind: str, text: str) -> None:
        self.name, self.kind, self.text = name, kind, text
        self.ignored: list[Ignored] = []
        self.fault: str | None = None
        self._schema: dict[str, Any] = json.loads(text) if kind == "json" else {}

    @property
    def is_lenient(self) -> bool:
        return self._options.get("lenient") is True

    def prepare(self, end_token: int, *, is_outermost: bool) -> None:
        """Find what is refused before anything is compiled, and prepare the text."""
        # The grammar that names others was not sent by a client; the functions of a request may be many.
        self.fault = None if is_outermost else too_long(self.kind, self.text)
        if self.kind == "grammar" and self.fault is None:
            self.text = plain_lark(self.text)
            self.fault = refusal(self.text, end_token)
        elif self.kind == "json" and self.fault is None:
            self._prepare(None)

    def mend(self, tokenizer: LLTokenizer) -> None:
        """Find what is wrong if it does not compile; what cannot be enforced is ignored in a lenient schema."""
        if (error := _error(tokenizer, self.kind, self.text)) is None:
            return
        pattern = self._options.get("whitespace_pattern")
        if isinstance(pattern, str) and (wrong := _error(tokenizer, "regex", pattern)) is not None:
            self.fault = f"whitespace_pattern {remedy(wrong)}"
            return
        if self.kind == "json":
            self._prepare(tokenizer)
            error = _error(tokenizer, self.kind, self.text)
            if error is not None and self.is_lenient:
                self.loosen(shortened(error))
                return
        if error is not None:
            self.fault = remedy(error)

    def loosen(self, reason: str) -> None:
        """Leave out all but the schema's type."""
        kind = self._schema.get("type")
        self.text = json.dumps({"type": kind if kind in TYPES else "object", _OPTIONS: self._options})
        self.ignored = [Ignored("", reason)]

    def _prepare(self, tokenizer: LLTokenizer | None) -> None:
        """Prepare the schema; its patterns are tried if a tokenizer is given."""

        def pattern_error(pattern: str) -> str | None:
            alone = json.dumps({"type": "string", "pattern": pattern})
            error = None if tokenizer is None else _error(tokenizer, "json", alone)
            return None if error is None else shortened(error)

        try:
            prepared, self.ignored = prepare(self._schema, pattern_error)
        except RecursionError:
            self.fault = remedy("recursion limit exceeded")
            return
        self.text = json.dumps(prepared | {_OPTIONS: self._options})
        if self.ignored and not self.is_lenient:
            place, reason = self.ignored[0]
            self.fault = f"{place}: {reason}; mend it or leave it out, or do without strict"

    @property
    def _options(self) -> dict[str, Any]:
        """llguidance's options, with a limit of whitespace unless they have one."""
        given = self._schema.get(_OPTIONS)
        options = given if isinstance(given, dict) else {}
        return options if options.keys() & {"whitespace_flexible", *_WHITESPACE} else options | _WHITESPACE


def _error(tokenizer: LLTokenizer, kind: str, text: str) -> str | None:
    """Return why a constraint does not compile, or None if it does."""
    try:
        matcher = make_matcher(tokenizer, kind, text)
    except ValueError as error:
        return str(error)
    return matcher.get_error() if matcher.is_error() else None


def _parts(kind: str, text: str) -> list[tuple[str, str, str]]:
    return [(name, of, each) for name, of, each in json.loads(text)] if kind == "grammars" else [("", kind, text)]


def _joined(kind: str, parts: list[_Part]) -> str:
    return json.dumps([(part.name, part.kind, part.text) for part in parts]) if kind == "grammars" else parts[0].text

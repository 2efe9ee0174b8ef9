"""Arguments of calls that models write in another notation than JSON, converted to JSON."""

import json
import re
from collections.abc import Mapping
from typing import Any

_PYTHON = re.compile(
    r"""(?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(?P<key>\b[A-Za-z_]\w*)\s*=|(?P<word>\b(?:True|False|None)\b)"""
    r"""|(?P<open>\()|(?P<close>\))|(?P<comma>,(?=\s*[\])}]))""",
    re.DOTALL,
)
_WORDS = {"True": "true", "False": "false", "None": "null", "(": "[", ")": "]", ",": ""}
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(\n|.))", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": "", "0": "\0", "a": "\a", "v": "\v"}
_BARE_KEY = re.compile(r'([{,]\s*)([^\s{}\[\],:"]+)(\s*:)')
MAX_DEPTH = 100
_TEXT_TYPES = ({"string"}, {"string", "null"})


def json_of_keywords(text: str) -> str | None:
    """Return the arguments of a Python call as a JSON object, or None if they cannot be read."""

    def converted(match: re.Match[str]) -> str:
        if match["text"] is not None:
            return json.dumps(_unescaped(match["text"][1:-1]), ensure_ascii=False)
        return f'"{match["key"]}":' if match["key"] is not None else _WORDS[match[0]]

    return _checked("{" + _PYTHON.sub(converted, text).strip().removesuffix(",") + "}")


def json_of_braces(text: str, quote: str) -> str | None:
    """Return an object whose keys are bare, and whose texts are between two quotes, as JSON, or None."""
    pieces = text.split(quote)
    for i, piece in enumerate(pieces):
        # A key may follow a text, after a comma.
        pieces[i] = json.dumps(piece, ensure_ascii=False) if i % 2 else _BARE_KEY.sub(r'\1"\2"\3', piece)
    return _checked("".join(pieces))


def json_of_text(text: str, schema: Mapping[str, Any] | None) -> str:
    """Return the value of one argument as JSON: the value that the text is in JSON, or else the text as a string."""
    stripped = text.strip()
    if is_text(schema) and not (stripped == "null" and "null" in types_of(schema)):
        return json.dumps(text, ensure_ascii=False)
    if stripped in ("True", "False", "None"):
        return _WORDS[stripped]
    return _checked(stripped) or json.dumps(text, ensure_ascii=False)


def is_text(schema: Mapping[str, Any] | None) -> bool:
    """Return whether all values of a schema are texts, or null."""
    if schema is None:
        return False
    choices = choices_of(schema)
    return all(isinstance(choice, str) for choice in choices) if choices else types_of(schema) in _TEXT_TYPES


def choices_of(schema: Mapping[str, Any]) -> list[Any]:
    """Return the values that a schema lists as the only ones; none if it does not."""
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return choices if isinstance(choices, list) else []


def types_of(schema: Mapping[str, Any] | None) -> set[str]:
    """Return the types that a schema names, also in its branches."""
    if schema is None:
        return set()
    given = schema.get("type")
    types = {given} if isinstance(given, str) else {one for one in given or () if isinstance(one, str)}
    for key in ("anyOf", "oneOf"):
        branches = schema.get(key)
        for branch in branches if isinstance(branches, list) else ():
            types |= (
                types_of(branch) if isinstance(branch, dict) and not branch.keys() & {"anyOf", "oneOf"} else {"any"}
            )
    return types


def is_deep(value: Any) -> bool:
    """Return whether JSON objects and lists are nested deeper than `MAX_DEPTH`."""
    depth, level = 0, [value]
    while depth <= MAX_DEPTH and (level := [one for one in level if isinstance(one, (Mapping, list, tuple))]):
        depth += 1
        level = [inner for one in level for inner in (one.values() if isinstance(one, Mapping) else one)]
    return depth > MAX_DEPTH


def _checked(text: str) -> str | None:
    """Return a text if it is JSON, in one line as far as it was converted, or None."""
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return text


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _unescaped(text: str) -> str:
    """Return the text that a Python literal without its quotes stands for."""

    def character(match: re.Match[str]) -> str:
        digits = match[1] or match[2] or match[3]
        if digits is None:
            return _ESCAPES.get(match[4], match[4] if match[4] in "\\'\"" else match[0])
        return chr(int(digits, 16)) if int(digits, 16) < 0x110000 else match[0]

    return _ESCAPE.sub(character, text)

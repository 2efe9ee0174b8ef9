"""Calls written in a format, for templates that write none and for looking at a format."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from specinfer.inputs.formats.calls import (
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


def written_calls(style: CallFormat, calls: Sequence[tuple[str, Mapping[str, Any] | str]]) -> str:
    """Return calls, each a name and its arguments, as a model of this format writes them; text stays as it is."""
    texts = [
        "".join(_written_part(part, name, arguments, i) for part in style.call)
        for i, (name, arguments) in enumerate(calls)
    ]
    between = "".join(style.between) or ("" if style.begin else "\n")
    return "".join(style.begin) + between.join(texts) + "".join(style.end)


def _written_part(part: Part, name: str, arguments: Mapping[str, Any] | str, number: int) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Name):
        return json.dumps(name, ensure_ascii=False) if part.is_quoted else name
    if isinstance(part, (CallNumber, Label)):
        return f'"{number}"' if isinstance(part, Label) and part.is_quoted else str(number)
    if isinstance(arguments, str):
        return arguments
    if isinstance(part, JsonArguments):
        return json.dumps(arguments, ensure_ascii=False)
    if isinstance(part, TaggedArguments):
        return "".join(_written_value(part, key, value) for key, value in arguments.items())
    if isinstance(part, KeywordArguments):
        return f"({', '.join(f'{key}={_python(value)}' for key, value in arguments.items())})"
    return _braced(arguments, part)


def _written_value(tags: TaggedArguments, key: str, value: Any) -> str:
    is_text = isinstance(value, str)
    after = tags.after_key if is_text or not tags.after_key_of_json else tags.after_key_of_json
    text = value if is_text else json.dumps(value, ensure_ascii=False)
    line = "\n" if tags.has_lines else ""
    separator = " " if tags.after_key_of_json else ""
    return f"{tags.before_key}{key}{separator.join(after)}{line}{text}{line}{tags.after_value}\n"


def _python(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)}: {_python(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(_python, value))}]"
    words = {True: "True", False: "False", None: "None"}
    return words[value] if value is None or isinstance(value, bool) else json.dumps(value, ensure_ascii=False)


def _braced(value: Any, part: BracedArguments) -> str:
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_braced(inner, part)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return f"[{','.join(_braced(inner, part) for inner in value)}]"
    return f"{part.quote}{value}{part.quote}" if isinstance(value, str) else json.dumps(value)

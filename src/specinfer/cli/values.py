"""Parsing of option values that are more than a word; errors are ValueErrors that name the option."""

import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from specinfer.cli.flags import warn_renamed
from specinfer.core.files import read_text
from specinfer.core.options import current_names
from specinfer.core.vllm_names import from_speculative_config
from specinfer.engine_args import EngineArgs


def parse_json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: not valid JSON: {error}") from error


def parse_object(name: str, text: str, example: str) -> dict[str, Any]:
    value = parse_json(name, text) if text.lstrip().startswith("{") else None
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be a JSON object, such as {example}, not {text[:60]!r}")
    return value


def join_dotted(flag: str, words: Sequence[str]) -> list[str]:
    """Replace vLLM's `--flag.key value` in a command line by a single `--flag JSON`."""
    rest: list[str] = []
    values: dict[str, Any] = {}
    words_left = iter(words)
    for word in words_left:
        name, equals, value = word.partition("=")
        start, dot, key = name.partition(".")
        if not dot or start.replace("_", "-") != flag:
            rest.append(word)
            continue
        key = key.replace("-", "_")
        if not equals:
            value = next(words_left, "")
        if not key or not value:
            raise ValueError(f"{flag[2:]}: {name} needs a key and a value, as in {flag}.method ngram")
        try:
            values[key] = json.loads(value)
        except (ValueError, RecursionError):
            values[key] = value
    if values and any(word.partition("=")[0].replace("_", "-") == flag for word in rest):
        raise ValueError(f"{flag[2:]}: it is given as JSON and by its keys; choose one")
    return [*rest, flag, json.dumps(values)] if values else rest


def text_or_file(name: str, value: str, *, is_path: Callable[[str], bool]) -> str:
    """Return the text of the named file, or the value itself if there is no such file.

    Args:
        is_path: Returns whether a value can only be a file name; if that file is missing, the value is refused.
    """
    try:
        is_file = Path(value).is_file()
    except OSError:  # longer than a file name can be
        return value
    if not is_file and is_path(value):
        raise ValueError(f"--{name.replace('_', '-')}: no such file: {value}; check its name and folder")
    return read_text(name, value) if is_file else value


def is_file_name(value: str) -> bool:
    """Return whether a value looks like a text file's name: one word with the extension .json, .lark or .txt."""
    return not re.search(r"[\s{}]", value) and value.lower().endswith((".json", ".lark", ".txt"))


def is_file_path(value: str) -> bool:
    """Return whether a value looks like a file name or a path; for options whose other values never look like one."""
    return is_file_name(value) or (("/" in value or os.sep in value) and not re.search(r"[\s{}]", value))


def parse_token_ids(name: str, text: str | None) -> list[int]:
    parts = [part.strip() for part in text.split(",")] if text else []
    if wrong := [part for part in parts if not (part.isascii() and part.isdecimal() and len(part) < 20)]:
        raise ValueError(f"{name}: {wrong[0]!r} is not a token id; give numbers with commas, such as 2,5")
    return [int(part) for part in parts]


def parse_speculative_config(text: str | None) -> dict[str, Any]:
    """Return the arguments of `LLM` for vLLM's `speculative_config`, as JSON."""
    if text is None:
        return {}
    given = parse_object("speculative_config", text, '{"method": "ngram"}')
    return from_speculative_config(current_names(EngineArgs, given, warn_renamed))

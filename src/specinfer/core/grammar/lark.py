"""Lark grammars: forms of other parsers are changed to those that llguidance reads, and some grammars are refused."""

import json
import re
from contextlib import suppress
from typing import Any

from specinfer.core.grammar.schema_values import has_few_steps

QUOTED = r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/'
_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_PIECES = re.compile(rf"(?P<comment>(?://|#)[^\n]*)|{QUOTED}|'(?P<single>(?:\\.|[^'\\\n])*)'")
_RULE = re.compile(r"^([ \t]*[!?]*(?P<name>\w[\w-]*)[ \t]*)(?:\.-?\d+[ \t]*)?(?=:|\[[^\]\n]*\][ \t]*:)", re.MULTILINE)


def is_gbnf(grammar: str) -> bool:
    """Return whether a grammar is in llama.cpp's notation."""
    return _GBNF_RULE.search(grammar) is not None


def plain_lark(grammar: str) -> str:
    """Return a Lark grammar without comments, single quotes and priorities, and with a rule `start`; GBNF stays."""
    if is_gbnf(grammar):
        return grammar
    text = _PIECES.sub(_plain_piece, grammar)
    names = [rule["name"] for rule in _RULE.finditer(text)]
    text = _RULE.sub(r"\1", text)
    return text if "start" in names or not names else f"start: {names[0]}\n{text}"


def _plain_piece(piece: re.Match[str]) -> str:
    if piece["comment"] is not None:
        return ""
    if piece["single"] is None:
        return piece[0]
    text = re.sub(r"""\\'|"|(\\.)""", lambda match: match[1] or {'"': '\\"'}.get(match[0], "'"), piece["single"])
    return f'"{text}"'


MAX_CHARACTERS = {"json": 100_000, "regex": 100_000, "choice": 100_000, "grammar": 20_000, "grammars": 400_000}
_MAX_BRACKETS = 120  # nested brackets in a schema; llguidance's parser stops at 124 to 126
# Options of a Lark rule that have no effect here, and one whose effect may depend on which masks were computed.
_REFUSED_OPTIONS = ("temperature", "capture", "stop_capture", "max_tokens")
_RULE_OPTIONS = re.compile(
    rf'^[ \t]*[!?]*[a-z_][\w-]*[ \t]*\[((?:{QUOTED}|[^"/\]\n])*)\][ \t]*:', re.MULTILINE | re.ASCII
)
_TOKENS = re.compile(r"<\[([^\]]*)\]>")  # tokens given by id


def too_long(kind: str, text: str) -> str | None:
    """Return what is wrong with the length of a text and what to change, or None if nothing is."""
    most = MAX_CHARACTERS[kind]
    return f"{len(text)} characters; make it shorter, at most {most}" if len(text) > most else None


def refusal(lark: str, end_token: int) -> str | None:
    """Return what is wrong with a Lark grammar before it is compiled and what to change, or None if nothing is.

    Args:
        end_token: The token that marks the end of the text; no grammar may name it.
    """
    if (number := _large_multiple(_inline_schemas(lark))) is not None:
        return f"multipleOf {number} takes too much work; leave it out"
    if (option := _refused_option(lark)) is not None:
        return f"option {option!r} of a rule is ignored or not exact here; leave it out"
    if (tokens := _refused_tokens(lark, end_token)) is not None:
        return f"tokens {tokens} may include the end of the text; list others by number, or write their text"
    return None


def _inline_schemas(lark: str) -> list[Any]:
    """Return the JSON schemas in a Lark grammar. Those that cannot be parsed are left to its parser."""
    schemas = []
    for place in re.finditer(r"%json\s*", lark):
        with suppress(ValueError):
            schemas.append(json.JSONDecoder().raw_decode(lark, place.end())[0])
    return schemas


def _refused_tokens(text: str, end_token: int) -> str | None:
    """Return the first class of tokens that may include the end token, or None."""
    for tokens in _TOKENS.finditer(re.sub(QUOTED, '""', text)):
        for part in tokens[1].split(","):
            numbers = re.fullmatch(r"\s*([0-9]{1,9})(?:-([0-9]{1,9}))?\s*", part)
            if numbers is None or int(numbers[1]) <= end_token <= int(numbers[2] or numbers[1]):
                return tokens[0]
    return None


def _large_multiple(schemas: list[Any]) -> float | None:
    """Return the first "multipleOf" in a schema that needs too many states, or None."""
    nodes = schemas
    while nodes:
        node = nodes.pop()
        if isinstance(node, dict):
            number = node.get("multipleOf")
            if isinstance(number, (int, float)) and not has_few_steps(number):
                return number
            nodes.extend(node.values())
        elif isinstance(node, list):
            nodes.extend(node)
    return None


def _refused_option(text: str) -> str | None:
    """Return the first option in a Lark grammar that would not be applied, or None."""
    for rule in _RULE_OPTIONS.finditer(text):
        options = [option.partition("=")[0].strip() for option in re.sub(QUOTED, "", rule[1]).split(",")]
        if refused := [option for option in options if option in _REFUSED_OPTIONS]:
            return refused[0]
    return None


def remedy(message: str) -> str:
    """Return what is wrong and what to change, for an error message of llguidance."""
    if "recursion limit exceeded" in message:
        return (
            f"nested too deeply; have at most {_MAX_BRACKETS} braces and brackets within one another, about 40 levels "
            "of objects and arrays"
        )
    return f"cannot be read, mend it: {shortened(message)}"


def shortened(message: str) -> str:
    """Return the cause in an error message, without the grammar's text."""
    lines = message.split("<backtrace>")[0].replace("<non-verbose/>", "").strip().split("\n")
    message = next((line for line in lines if line.startswith("error:")), lines[0])
    return message.removeprefix("error:").rpartition(" (in regex): ")[2].strip()[:300]

"""Lark grammars in the forms that other parsers take, changed to those that llguidance reads."""

import re

QUOTED = r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/'
_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_PIECES = re.compile(rf"(?P<comment>(?://|#)[^\n]*)|{QUOTED}|'(?P<single>(?:\\.|[^'\\\n])*)'")
_RULE = re.compile(r"^([ \t]*[!?]*(?P<name>\w[\w-]*)[ \t]*)(?:\.-?\d+[ \t]*)?(?=:|\[[^\]\n]*\][ \t]*:)", re.MULTILINE)


def is_gbnf(grammar: str) -> bool:
    """Return whether a grammar is in llama.cpp's notation."""
    return _GBNF_RULE.search(grammar) is not None


def plain_lark(grammar: str) -> str:
    """Return a Lark grammar without comments, single quotes and priorities, with a rule `start`; GBNF is kept."""
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
    return '"' + re.sub(r"""\\'|"|(\\.)""", lambda one: one[1] or {'"': '\\"'}.get(one[0], "'"), piece["single"]) + '"'

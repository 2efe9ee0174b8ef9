"""Texts in Lark's notation. Special tokens are matched as tokens, not as text."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

# A space, or line breaks and indentation: a model that wants to end its text cannot fill it with whitespace.
SPACE = r"WS: /[ \t]|(\r?\n){1,2}[ \t]{0,16}/"


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A token added to the vocabulary; `is_shown` if decoded texts contain it, as `<think>` of some models."""

    id: int
    is_shown: bool


class Literals:
    """The texts of a format in Lark's notation.

    Args:
        texts: All texts that will be asked for.
        special_tokens: The model's special tokens, some of which may be in the texts.
    """

    def __init__(self, texts: Iterable[str], special_tokens: Mapping[str, SpecialToken]) -> None:
        joined = "\0".join(texts)
        self._tokens = {name: token.id for name, token in special_tokens.items() if name in joined}
        self._pattern = re.compile("|".join(map(re.escape, sorted(self._tokens, key=len, reverse=True))) or "(?!)")

    def text(self, text: str) -> str:
        """Return a text without the whitespace around it; "" for whitespace alone."""
        return " ".join(self._pieces(text.strip()))

    def until(self, text: str) -> tuple[str, str]:
        """Return a rule for any text that ends with this one, and the options of the rule."""
        tokens = list(self._pattern.finditer(text))
        if not tokens:
            return f"/(?s:.*){escaped(text)}/", "[lazy]"
        first, rest = text[: tokens[0].start()], text[tokens[0].start() :]
        return " ".join([f"/(?s:.*){escaped(first)}/", *self._pieces(rest)]), ""

    def _pieces(self, text: str) -> list[str]:
        pieces, at = [], 0
        for match in self._pattern.finditer(text):
            pieces += [quoted(text[at : match.start()]), f"<[{self._tokens[match[0]]}]>"]
            at = match.end()
        return [piece for piece in (*pieces, quoted(text[at:])) if piece]


def escaped(text: str) -> str:
    """Return a regular expression that matches only this text, for use between slashes."""
    return re.escape(text).replace("/", r"\/")


def ranges(numbers: list[int]) -> str:
    """Return numbers in Lark's notation, with consecutive ones as a range."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(f"{first}-{last}" if first < last else str(first) for first, last in spans)


def quoted(text: str) -> str:
    """Return what matches a text; "" if it is empty."""
    return json.dumps(text, ensure_ascii=False) if text else ""

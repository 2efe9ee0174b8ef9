"""The whitespace between the tokens of JSON and of calls, and what follows them: as written so far, or as usual."""

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import ClassVar, TypeVar

from specinfer.core.grammar.token_text import MARK, TokenText

BLANK = b" \t\r\n"
_PLACES = re.compile(rb'([{\[,:}\]]|\xff\[\d+\])(\s*)(?=(["{\[}\]\d\-tfn]|\xff\[\d+\]))')
_OPENERS, _CLOSERS = b"{[", b"}]"
_INDENT = re.compile(rb"\n( +)(?=[^ \n])")
_LINE = b"\n"
_MAX_BLANK = 4  # bytes of whitespace that are compared next to a special token
_PRIOR = 2.0  # weight of what is expected before anything was seen
_MEMORY = 32.0  # times that something was seen, after which older ones weigh less
_LEAST = 0.1  # smallest probability of whitespace

_Counted = TypeVar("_Counted", bytes, int)
_Place = tuple[bytes, bytes]  # the bytes before and after; those of special tokens are MARK


class Habits:
    """Counts of what a model writes between the tokens of JSON, in all outputs of an engine.

    It has no texts: only whitespace, the kind of a place, and which special token ends an output.
    """

    def __init__(self) -> None:
        self._blanks: dict[_Place, dict[bytes, float]] = defaultdict(dict)
        self._nexts: dict[bytes, dict[bytes, float]] = defaultdict(dict)
        self._ends: dict[int, float] = {}
        self._splits: dict[bytes, tuple[int, ...]] = {}

    def learn(self, names: TokenText, tokens: Sequence[int], end: int | None) -> None:
        """Count what was written at the places of an output, which ended with this token if with any."""
        output = names.bytes_of(tokens)
        self._learn_splits(names, tokens)
        for before, blank, after in _PLACES.findall(output):
            _count(self._blanks[before[:1], after[:1]], _kept(before[0], after[0], blank))
            _count(self._nexts[before[:1]], after)
        if end is not None:
            _count(self._ends, end)

    def _learn_splits(self, names: TokenText, tokens: Sequence[int]) -> None:
        """Take note of the tokens of whitespace behind special ones, which models write apart that tokenizers join."""
        texts = [names.bytes_of((token,)) for token in tokens]
        for place in [place for place, text in enumerate(texts) if text[:1] == bytes([MARK])]:
            end = place + 1
            while end < len(texts) and texts[end].isspace():
                end += 1
            blank = b"".join(texts[place + 1 : end])
            if end > place + 2 and len(blank) <= _MAX_BLANK:
                self._splits[blank] = tuple(tokens[place + 1 : end])

    def split(self, names: TokenText, tokens: tuple[int, ...], *, is_behind: bool) -> tuple[int, ...]:
        """Return the tokens of a text, with whitespace behind special ones as it was written before.

        Args:
            is_behind: Whether the text follows a special token.
        """
        made = list[int]()
        for token in tokens if self._splits else ():
            text = names.bytes_of((token,))
            made += self._splits.get(text, (token,)) if is_behind else (token,)
            is_behind = text[:1] == bytes([MARK])
        return tuple(made) or tokens

    def blanks(self, place: _Place, expected: Sequence[tuple[bytes, float]]) -> Sequence[tuple[bytes, float]]:
        """Return the whitespace at a place with its probability, given what is expected of it."""
        seen = self._blanks.get(place)
        if not seen:
            return expected
        total, weights = _PRIOR + sum(seen.values()), {blank: _PRIOR * prob for blank, prob in expected}
        for blank, times in seen.items():
            weights[blank] = weights.get(blank, 0.0) + times
        ranked = sorted(((weight / total, blank) for blank, weight in weights.items()), reverse=True)
        return [(blank, prob) for prob, blank in ranked if prob >= _LEAST]

    def weights(self, before: bytes, nexts: Sequence[bytes]) -> list[float]:
        """Return how often each of these followed the last byte of a text, beyond what is expected of all."""
        seen = self._nexts.get(bytes([_last_of(before.rstrip(BLANK))]), {})
        return [1.0 + seen.get(each if each[0] == MARK else each[:1], 0.0) for each in nexts]

    def end(self, ends: Sequence[int]) -> int:
        """Return which of the tokens that may end an output usually does."""
        return max(ends, key=lambda token: self._ends.get(token, 0.0))


def _count(counts: dict[_Counted, float], key: _Counted) -> None:
    counts[key] = counts.get(key, 0.0) + 1.0
    if sum(counts.values()) > _MEMORY:
        for each in counts:
            counts[each] /= 2.0


def _kept(before: int, after: int, blank: bytes) -> bytes:
    """Return the part of whitespace that is the same at each depth."""
    if MARK in (before, after):
        return blank[:_MAX_BLANK]
    return _LINE if _LINE in blank else blank[:1]


class Style:
    """The whitespace between the tokens of JSON and of calls, as it was written so far.

    Whitespace with a line break depends on the depth, so only the break and the width of a level are stored.
    """

    _KNOWN, _ASKED = 0.95, 0.7  # probability of the whitespace that the output, or the prompt, had at such a place
    _UNKNOWN: ClassVar = {  # whitespace of each kind of place, and its probability, before any was seen
        "open": ((b"", 0.5), (_LINE, 0.45)),
        "close": ((b"", 0.6), (_LINE, 0.35)),
        "comma": ((b" ", 0.6), (_LINE, 0.35)),
        "colon": ((b" ", 0.9),),
        "mark": ((_LINE, 0.6), (b"", 0.35)),
        "none": ((b"", 0.95),),
    }

    def __init__(self, prompt: bytes, habits: Habits | None = None) -> None:
        self.habits = habits or Habits()
        self._seen: dict[_Place | str, bytes] = {}
        self._unit: int | None = None  # spaces of a level
        self.read(prompt)
        self._asked, self._seen = self._seen, {}

    def read(self, text: bytes) -> None:
        """Take note of the whitespace in a text, in the place of what was seen at the same places before."""
        for before, blank, after in _PLACES.findall(text):
            kind, kept = _kind(before[0], after[0]), _kept(before[0], after[0], blank)
            self._seen[before[:1], after[:1]] = kept
            if kind != "none":  # such places have nothing in common
                self._seen[kind] = kept
        if indents := _INDENT.findall(text):
            self._unit = min(map(len, indents))

    def blanks(self, before: bytes, after: bytes) -> list[tuple[bytes, float]]:
        """Return the whitespace that may stand between two texts, as far as the first has none of it yet."""
        bare = before.rstrip(BLANK)
        written = before[len(bare) :]
        last = _last_of(bare)
        kind = _kind(last, after[0])
        options = self._options(kind, (bytes([last]), after[:1]))
        if _LINE in written and kind != "mark":
            options = ((_LINE, self._KNOWN if kind != "none" else 1 - self._KNOWN),)
        return [
            (whole[len(written) :], prob)
            for blank, of_blank in options
            for whole, prob in self._with_indent(blank, of_blank, kind, bare)
            if whole.startswith(written)
        ] or [(b"", self._KNOWN)]

    def _options(self, kind: str, place: _Place) -> Sequence[tuple[bytes, float]]:
        """Return the whitespace at a place, with its probability: as it was there, or at a place of this kind."""
        seen, asked = self._seen, self._asked
        known = seen.get(place, None if kind == "mark" else seen.get(kind))
        if known is None and kind in ("comma", "close") and "open" in seen:
            known = _LINE if seen["open"] == _LINE else seen.get("colon", b" ") if kind == "comma" else b""
        if known is not None:
            return ((known, self._KNOWN),)
        known, expected = asked.get(place, asked.get(kind)), self._UNKNOWN[kind]
        if known is not None:
            others = [blank for blank, _ in expected if blank != known][:1]
            expected = ((known, self._ASKED), *((blank, 0.95 - self._ASKED) for blank in others))
        return self.habits.blanks(place, expected)

    def _with_indent(self, blank: bytes, prob: float, kind: str, bare: bytes) -> list[tuple[bytes, float]]:
        """Return whitespace with the spaces of its line, which are those of the line before or a level more or less."""
        if blank != _LINE or kind == "mark":
            return [(blank, prob)]
        line = bare[bare.rfind(_LINE) + 1 :]
        width, sign = len(line) - len(line.lstrip(b" ")), {"open": 1, "close": -1}.get(kind, 0)
        units = (2, 4) if self._unit is None and sign else (self._unit or 0,)
        return [(blank + b" " * max(width + sign * unit, 0), prob / len(units)) for unit in units]


def _last_of(bare: bytes) -> int:
    """Return the last byte of a text, or MARK if it ends in a special token."""
    return MARK if ends_in_mark(bare) else bare[-1] if bare else 0


def _kind(last: int, after: int) -> str:
    """Return the kind of a place between two bytes."""
    if MARK in (last, after):
        return "mark"
    if after in b":,":
        return "none"
    if last in _OPENERS:
        return "none" if after in _CLOSERS else "open"
    if after in _CLOSERS:
        return "close"
    return "comma" if last == ord(",") else "colon" if last == ord(":") else "none"


def ends_in_mark(text: bytes) -> bool:
    """Return whether a text ends in a special token."""
    return text.endswith(b"]") and re.search(rb"\xff\[\d+\]$", text[-16:]) is not None

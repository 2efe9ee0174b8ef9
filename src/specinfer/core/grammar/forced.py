"""Texts that a grammar makes predictable: the one that must follow an output, or the few that may.

Where the grammar leaves one continuation, it follows with certainty: keys, quotes, names of functions. JSON may have
whitespace between its tokens, so hardly anything is forced there but for the choice of this whitespace; it is taken to
be as before in the output, else as in the prompt. Where few bytes may follow, as in an enum, each is a branch.

    {"name": "Ann", "age": 3        output
    , "kind": "                     the only text that may follow, by the whitespace so far
    a -> lpha"   b -> eta"          the first bytes of two choices, and what is forced after each

Texts are split into tokens as a whole, as the model would write them; their last token may be cut short.
"""

import re
from heapq import heappop, heappush
from itertools import count
from typing import ClassVar, NamedTuple

from specinfer.core.grammar.state import Grammar
from specinfer.core.grammar.token_text import MARK, TokenText

MAX_CHOICES = 8  # texts that may follow, of which each is a branch
MAX_TEXTS = 8
_MAX_LOOKS = 24  # states of the grammar that are looked at in one step
_MAX_BYTES = 160
_SPLIT = 0.99  # probability that the model splits forced text into these tokens
_CUT = 0.8  # the same of the last token, which might go on
_BLANK = b" \t\r\n"


class Continuation(NamedTuple):
    """Tokens that may follow an output, and the probability of each after those before it."""

    tokens: tuple[int, ...]
    probs: tuple[float, ...]


class _Place(NamedTuple):
    """Bytes from here on have this probability, given what comes before."""

    start: int
    prob: float


def continuations(grammar: Grammar, style: "Style", before: bytes, least: float = 0.1) -> list[Continuation]:
    """Return the texts that may follow an output by its grammar, the likeliest first; none where many may.

    Args:
        before: The end of the output.
        least: Smallest probability of a text.
    """
    names = grammar.text
    assert names is not None
    ended: list[Continuation] = []
    front: list[tuple[float, int, bytes, tuple[_Place, ...]]] = [(-1.0, 0, b"", ())]
    numbers = count(1)
    for _ in range(_MAX_LOOKS):
        if not front or len(ended) == MAX_TEXTS:
            break
        negated, _, text, places = heappop(front)
        choices = [] if len(text) >= _MAX_BYTES else _choices(grammar, names, style, before, text)
        likely = [(added, prob) for added, prob in choices if -negated * prob >= least]
        for added, prob in likely:
            heappush(front, (negated * prob, next(numbers), text + added, (*places, _Place(len(text), prob))))
        if not likely and text:
            ended.append(_continuation(names, text, places))
    ended += [_continuation(names, text, places) for _, _, text, places in sorted(front)[: MAX_TEXTS - len(ended)]]
    return [each for each in ended if each.tokens]


def _choices(
    grammar: Grammar, names: TokenText, style: "Style", before: bytes, text: bytes
) -> list[tuple[bytes, float]]:
    """Return the texts that may follow a text after the output, with their probabilities; none where many may."""
    path = names.tokens_of(text)
    if forced := grammar.forced_bytes(path):
        return [(forced[: _MAX_BYTES - len(text)], 1.0)]
    nexts, known = names.next_texts(grammar.bits_ahead(path)), before + text
    solid = [each for each in nexts if each not in _BLANK]
    is_blank = len(solid) < len(nexts) and (b"\n" in nexts or known[-1:] in _BLANK)
    if not is_blank:  # a space, if any, is part of the text
        return [(each, 1 / len(nexts)) for each in nexts] if len(nexts) <= MAX_CHOICES else []
    if 0 < len(solid) <= MAX_CHOICES:
        return [(blank + each, prob / len(solid)) for each in solid for blank, prob in style.blanks(known, each)]
    # Many may follow, as at the beginning of a number, but not before the usual whitespace.
    return [(blank, prob) for blank, prob in style.blanks(known, solid[-1])[:1] if blank] if solid else []


def _continuation(names: TokenText, text: bytes, places: tuple[_Place, ...]) -> Continuation:
    tokens = names.tokens_of(text)
    probs, end, passed = [], 0, 0
    for token in tokens:
        end += len(names.bytes_of((token,)))
        prob = _SPLIT
        while passed < len(places) and places[passed].start < end:
            prob *= places[passed].prob
            passed += 1
        probs.append(prob)
    if probs:
        probs[-1] *= _CUT
    return Continuation(tokens, tuple(probs))


# ------------------------------------------------------------------------------------------------------- whitespace

_PLACES = re.compile(rb'([{\[,:}\]]|\xff\[\d+\])(\s*)(?=(["{\[}\]\d\-tfn]|\xff))')
_OPENERS, _CLOSERS = b"{[", b"}]"
_INDENT = re.compile(rb"\n( +)(?=[^ \n])")
_LINE = b"\n"


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

    def __init__(self, prompt: bytes) -> None:
        self._seen: dict[tuple[bytes, bytes] | str, bytes] = {}
        self._unit: int | None = None  # spaces of a level
        self.read(prompt)
        self._asked, self._seen = self._seen, {}

    def read(self, text: bytes) -> None:
        """Take note of the whitespace in a text, in the place of what was seen at the same places before."""
        for before, blank, after in _PLACES.findall(text):
            kept = _LINE if _LINE in blank else blank[:1]
            self._seen[before[:1], after] = self._seen[_kind(before[0], after[0])] = kept
        if indents := _INDENT.findall(text):
            self._unit = min(map(len, indents))

    def blanks(self, before: bytes, after: bytes) -> list[tuple[bytes, float]]:
        """Return the whitespace that may stand between two texts, as far as the first has none of it yet."""
        bare = before.rstrip(_BLANK)
        written = before[len(bare) :]
        last = MARK if _ends_in_mark(bare) else bare[-1] if bare else 0
        kind = _kind(last, after[0])
        options = self._options(kind, (bytes([last]), after[:1]))
        if _LINE in written:
            options = ((_LINE, self._KNOWN if kind != "none" else 1 - self._KNOWN),)
        return [
            (whole[len(written) :], prob)
            for blank, of_blank in options
            for whole, prob in self._with_indent(blank, of_blank, kind, bare)
            if whole.startswith(written)
        ] or [(b"", self._KNOWN)]

    def _options(self, kind: str, place: tuple[bytes, bytes]) -> tuple[tuple[bytes, float], ...]:
        """Return the whitespace at a place, with its probability: as it was there, or at a place of this kind."""
        seen, asked = self._seen, self._asked
        known = seen.get(place, seen.get(kind))
        if known is None and kind in ("comma", "close") and "open" in seen:
            known = _LINE if seen["open"] == _LINE else seen.get("colon", b" ") if kind == "comma" else b""
        if known is not None:
            return ((known, self._KNOWN),)
        known = asked.get(place, asked.get(kind))
        if known is None:
            return self._UNKNOWN[kind]
        others = [blank for blank, _ in self._UNKNOWN[kind] if blank != known][:1]
        return ((known, self._ASKED), *((blank, 0.95 - self._ASKED) for blank in others))

    def _with_indent(self, blank: bytes, prob: float, kind: str, bare: bytes) -> list[tuple[bytes, float]]:
        """Return whitespace with the spaces of its line, which are those of the line before or a level more or less."""
        if blank != _LINE or kind == "mark":
            return [(blank, prob)]
        line = bare[bare.rfind(_LINE) + 1 :]
        width, sign = len(line) - len(line.lstrip(b" ")), {"open": 1, "close": -1}.get(kind, 0)
        units = (2, 4) if self._unit is None and sign else (self._unit or 0,)
        return [(blank + b" " * max(width + sign * unit, 0), prob / len(units)) for unit in units]


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


def _ends_in_mark(text: bytes) -> bool:
    return text.endswith(b"]") and re.search(rb"\xff\[\d+\]$", text[-16:]) is not None

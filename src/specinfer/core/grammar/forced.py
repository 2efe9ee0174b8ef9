"""Texts that a grammar makes predictable: the one that must follow an output, or the few that may.

Where the grammar leaves one continuation, it follows with certainty: keys, quotes, names of functions. JSON may have
whitespace between its tokens, so hardly anything is forced there but for the choice of this whitespace; it is taken to
be as before in the output, else as in the prompt. Where few bytes may follow, as in an enum, each is a branch.

    {"name": "Ann", "age": 3        output
    , "kind": "                     the only text that may follow, by the whitespace so far
    a -> lpha"   b -> eta"          the first bytes of two choices, and what is forced after each

Texts are split into tokens as a whole, as the model would write them; their last token may be cut short.
"""

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from specinfer.core.grammar.state import Grammar
from specinfer.core.grammar.style import BLANK, Style, ends_in_mark
from specinfer.core.grammar.wording import Wording

MAX_CHOICES = 8  # texts that may follow, of which each is a branch
MAX_TEXTS = 8
_MAX_LOOKS = 24  # states of the grammar that are looked at in one step
_MAX_BYTES = 160
_SPLIT = 0.99  # probability that the model splits forced text into these tokens
_CUT = 0.8  # the same of the last token, which might go on


class Continuation(NamedTuple):
    """Tokens that may follow an output, and the probability of each after those before it.

    Attributes:
        copied: Whether each token has text that the prompt words, and no grammar forces.
    """

    tokens: tuple[int, ...]
    probs: tuple[float, ...]
    copied: tuple[bool, ...] = ()


class _Place(NamedTuple):
    """Bytes from here on have this probability, given what comes before."""

    start: int
    prob: float
    is_copied: bool


class _Text(NamedTuple):
    """A text that may follow.

    Attributes:
        is_end: Whether it ends the output.
    """

    text: bytes
    prob: float
    is_copied: bool = False
    is_end: bool = False


class Outlook:
    """The texts that may follow an output, by its grammar, usual whitespace, and the words of its prompt.

    Args:
        before: The end of the output.
    """

    def __init__(self, grammar: Grammar, style: Style, wording: Wording, before: bytes) -> None:
        assert grammar.text is not None
        self._grammar, self._names = grammar, grammar.text
        self._style, self._wording, self._before = style, wording, before

    def continuations(self, least: float = 0.1) -> list[Continuation]:
        """Return the texts that may follow, the likeliest first; none where many may.

        Args:
            least: Smallest probability of a text.
        """
        ended: list[Continuation] = []
        front: list[tuple[float, int, bytes, tuple[_Place, ...], bool]] = [(-1.0, 0, b"", (), False)]
        numbers = count(1)
        for _ in range(_MAX_LOOKS):
            if not front or len(ended) == MAX_TEXTS:
                break
            negated, _, text, places, is_end = heappop(front)
            choices = [] if is_end or len(text) >= _MAX_BYTES else self._choices(text, places)
            likely = [choice for choice in choices if -negated * choice.prob >= least]
            for added, prob, is_copied, ends in likely:
                place = _Place(len(text), prob, is_copied)
                heappush(front, (negated * prob, next(numbers), text + added, (*places, place), ends))
            if not likely and text:
                ended.append(self._continuation(text, places, is_end=is_end))
        rest = sorted(front)[: MAX_TEXTS - len(ended)]
        ended += [self._continuation(text, places, is_end=is_end) for _, _, text, places, is_end in rest]
        return [each for each in ended if each.tokens]

    def _choices(self, text: bytes, places: Sequence[_Place]) -> Sequence[_Text]:
        """Return the texts that may follow a text after the output; none where many may."""
        known = self._before + text
        if places and places[-1].is_copied and not text.endswith(b'"'):
            return self._copies(known)  # what is legal inside of a string is not looked at
        path = self._names.tokens_of(text)
        if forced := self._grammar.forced_bytes(path):
            return [_Text(forced[: _MAX_BYTES - len(text)], 1.0)]
        legal = self._grammar.bits_ahead(path)
        nexts, ends = self._names.next_texts(legal), self._names.ends(legal)
        solid = [each for each in nexts if each not in BLANK]
        if len(solid) > MAX_CHOICES and (copies := self._copies(known)):
            return copies
        is_blank = len(solid) < len(nexts) and (b"\n" in nexts or known[-1:] in BLANK)
        # Where whitespace may follow that is no part of the text, it is taken as usual, together with what follows it.
        choices = solid if is_blank else nexts
        if 0 < len(choices) + bool(ends) <= MAX_CHOICES:
            weighted = self._weighted(known, choices, ends)
            if not is_blank:
                return weighted
            return [
                choice._replace(text=blank + choice.text, prob=prob * choice.prob)
                for choice in weighted
                for blank, prob in self._style.blanks(known, choice.text)
                if not blank or blank[:1] in nexts
            ]
        if not is_blank or not solid:
            return []
        # Many may follow, as at the beginning of a number, but not before the usual whitespace.
        return [_Text(blank, prob) for blank, prob in self._style.blanks(known, solid[-1])[:1] if blank]

    def _copies(self, known: bytes) -> list[_Text]:
        return [_Text(text, prob, is_copied=True) for text, prob in self._wording.copies(known)]

    def _weighted(self, known: bytes, nexts: Sequence[bytes], ends: Sequence[int]) -> list[_Text]:
        """Return texts, and the end, with their probabilities: by the words of the prompt, and what usually follows."""
        habits = self._style.habits
        texts = [*nexts, *([self._names.bytes_of((habits.end(ends),))] if ends else [])]
        pairs = zip(self._wording.weights(known, texts), habits.weights(known, texts), strict=True)
        weights = [asked * usual for asked, usual in pairs]
        total = sum(weights)
        return [
            _Text(text, weight / total, is_end=place == len(nexts))
            for place, (text, weight) in enumerate(zip(texts, weights, strict=True))
        ]

    def _continuation(self, text: bytes, places: Sequence[_Place], *, is_end: bool) -> Continuation:
        tokens = self._names.tokens_of(text)
        tokens = self._style.habits.split(self._names, tokens, is_behind=ends_in_mark(self._before))
        probs, copied, end, passed = [], [], 0, 0
        for token in tokens:
            end += len(self._names.bytes_of((token,)))
            prob, is_copied = _SPLIT, bool(passed) and places[passed - 1].is_copied
            while passed < len(places) and places[passed].start < end:
                prob *= places[passed].prob
                is_copied = is_copied or places[passed].is_copied
                passed += 1
            probs.append(prob)
            copied.append(is_copied)
        if probs and not is_end:
            probs[-1] *= _CUT
        return Continuation(tokens, tuple(probs), tuple(copied))

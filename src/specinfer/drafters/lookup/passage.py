"""A text that an output repeats with changes: a file that is edited, a tool result that is quoted, a prediction.

An output that has followed the text up to some place goes on there. Where the two diverge, it mostly resumes behind the
change, so a few tokens that agree near the place left count for more than a longer match anywhere else. Until any do,
the text behind a replaced token and behind an insertion are both proposed. What was replaced once is expected to be
replaced again, so a rename costs one divergence and not one for each occurrence.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from specinfer.drafters.lookup.suffix_growth import Match

MAX_MATCH = 32  # number of last output tokens that are looked up
TRUSTED = 2  # tokens that must agree before a place counts as certain
NONE = -1
_NEAR = (0, 8, 48, 256)  # distance behind the place left within which so many tokens resume the text
_CLEARLY = 4  # tokens by which a match elsewhere must be longer than one nearby
_SUBSTITUTED = 4  # tokens that are replaced by as many, at most
_INSERTED = 64  # tokens of an insertion, after which the place left is given up
_MAX_EDIT = 8  # tokens of a change that is expected again, and as many in their place
_MAX_PLACES = 64  # at which it is expected
_EXPECTED, _MOST_EXPECTED = 2, 16  # weight of a change against the text as it was, at first and at most
_CERTAIN = 6  # tokens that agree, from which on no match elsewhere is looked for
# A copy is surer than a match of as many tokens elsewhere: it is taken for one of 1.4, 8, 22, 46, ... tokens.
_ALONE, _GROWTH, _MOST_LENGTH = 1.43, 2.5, 256
_NUM_CHARACTERS = 0x110000


@dataclass(slots=True)
class _Edit:
    """A change that is expected again: the states of its first new token, and of the tokens in its place."""

    weight: int
    states: list[int] = field(default_factory=list)


class Passage:
    """A text as the growth of drafts reads one; its states are the places in it, and those inside expected changes.

    Attributes:
        only_tokens, only_targets, counts, links, lengths: As of a suffix automaton whose states have no shorter suffix.
    """

    def __init__(self, tokens: Sequence[int] | npt.NDArray[np.int32]) -> None:
        size = len(tokens)
        self.size = size
        self.only_tokens = _column(np.append(np.asarray(tokens, dtype=np.int32), NONE))
        self.only_targets = _column(np.append(np.arange(1, size + 1), NONE))
        self.counts: array[int] = array("i", [1]) * (size + 1)
        self.links: array[int] = array("i", [NONE]) * (size + 1)
        self.lengths: array[int] = array("i", [0]) * (size + 1)
        self._branches: dict[int, tuple[tuple[int, int], tuple[int, int]]] = {}
        self._edits: dict[int, _Edit] = {}  # by the first state of each

    def follow(self, state: int, token: int) -> int:
        """Return the state after one more token, or -1."""
        if self.only_tokens[state] == token:
            return self.only_targets[state]
        return next((target for known, target in self._branches.get(state, ()) if known == token), NONE)

    def continuations(self, state: int, limit: int) -> Sequence[tuple[int, int]]:
        """Return (token, state after it) of what may follow."""
        if state in self._branches:
            return self._branches[state]
        token = self.only_tokens[state]
        return () if token < 0 else ((token, self.only_targets[state]),)

    def expect(self, places: Sequence[int], num_old: int, new: Sequence[int]) -> None:
        """Expect new tokens, one at least, in place of so many at each of these places.

        Where another change is expected already, or the text goes on as the change begins, it is not.
        """
        edit = _Edit(_EXPECTED)
        for place in places:
            old, behind = self.only_tokens[place], place + num_old
            if old in (NONE, new[0]):
                continue
            first = len(self.only_tokens)
            after = self._branches[behind][1][0] if behind in self._branches else self.only_tokens[behind]
            self.only_tokens.extend((*new[1:], after))
            self.only_targets.extend((*range(first + 1, first + len(new)), self.only_targets[behind]))
            for column, value in ((self.counts, 1), (self.links, NONE), (self.lengths, 0)):
                column.extend([value] * len(new))
            self.counts[first] = edit.weight
            self._branches[place] = (new[0], first), (old, self.only_targets[place])
            self.only_tokens[place] = NONE
            self._edits[first] = edit
            edit.states.append(first)

    def note(self, state: int, token: int) -> None:
        """Learn from the token that followed a place whether the change expected there came."""
        if state not in self._branches:
            return
        (new, first), (old, _) = self._branches[state]
        edit = self._edits[first]
        if token == new:
            edit.weight = min(edit.weight + _EXPECTED, _MOST_EXPECTED)
        elif token == old:
            edit.weight = edit.weight // 2  # 0: given up
        for known in edit.states:
            self.counts[known] = edit.weight


class Alignment:
    """The place of an output in a text that it repeats with changes.

    Args:
        tokens: The text.
        begins: Whether the output is assumed to begin as the text does.

    Attributes:
        place: State of the passage after the last token of the output, or None if it is not known.
        agreed: Number of tokens before it that agree, as far as is known.
    """

    def __init__(self, tokens: Sequence[int], *, begins: bool) -> None:
        ids = np.asarray(tokens, dtype=np.int32)  # once: a prompt may have 128,000 tokens
        self._passage, self._text = Passage(ids), as_text(ids)
        self._output = list[int]()
        self.place: int | None = 0 if begins else None
        self.agreed = TRUSTED if begins else 0
        self._trusted = 0 if begins else NONE  # the last place that was more than a chance match
        self._left: tuple[int, int] | None = None  # the place where the output left the text, and its length there

    @property
    def num_read(self) -> int:
        """The number of tokens of the output that are accounted for."""
        return len(self._output)

    def read(self, tokens: Sequence[int], min_match: int = 1) -> None:
        """Take new tokens of the output into account; matches anywhere have this length at least."""
        for token in tokens:
            self._output.append(token)
            self._read(token)
        if tokens and (self.place is None or self.agreed < _CERTAIN):
            self._search(min_match)

    def matches(self, name: str) -> list[Match]:
        """Return where the output may go on, the likeliest first; draft tokens from there get this name."""
        if self.place is not None:
            length = min(_ALONE * self.agreed**_GROWTH, _MOST_LENGTH)
            return [Match(self._passage, self.place, round(length), name)]
        if self._left is None:
            return []
        place, num_output = self._left
        parted = self.num_read - num_output
        places = [place + parted] if parted <= _SUBSTITUTED else []
        places += [place] if parted <= _INSERTED else []
        return [Match(self._passage, place, 1, name) for place in places if place < self._passage.size]

    def _read(self, token: int) -> None:
        if self.place is not None:
            self._passage.note(self.place, token)
            if (target := self._passage.follow(self.place, token)) >= 0:
                self._agree(target, self.agreed + 1)
                return
            if self.agreed >= TRUSTED and self.place <= self._passage.size:
                self._left = self.place, self.num_read - 1
            self.place, self.agreed = None, 0
        if self._left is not None:
            self._resume(*self._left)

    def _agree(self, place: int, agreed: int) -> None:
        self.place, self.agreed = place, agreed
        if agreed >= TRUSTED and place <= self._passage.size:
            self._trusted = place
            if self._left is not None:
                self._learn(*self._left)
                self._left = None

    def _resume(self, place: int, num_output: int) -> None:
        """Find the last tokens since the output left the text shortly behind this place."""
        for size in range(min(self.num_read - num_output, len(_NEAR) - 1), 0, -1):
            at = self._text.find(as_text(self._output[-size:]), place, place + _NEAR[size] + size)
            if at >= 0:
                self._agree(at + size, size)
                return

    def _search(self, min_match: int) -> None:
        """Go on behind the longest suffix of the output in the text, if it is clearly longer than what agrees now.

        Of several places the first one after the trusted place is taken, and at first the last one of all.
        """
        end = as_text(self._output[-MAX_MATCH:])
        # If a suffix is in the text, each shorter one is too, so bisection finds the longest.
        low, high = 0, len(end)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if end[-middle:] in self._text else (low, middle - 1)
        if low < (min_match if self.place is None else max(self.agreed + _CLEARLY, min_match)):
            return
        # The match ends at or after the trusted place, so it may begin before it.
        at = NONE if self._trusted < 0 else self._text.find(end[-low:], max(self._trusted - low, 0))
        if at < 0:
            at = self._text.rfind(end[-low:])
        self.place, self.agreed = at + low, low
        if low >= TRUSTED:
            self._trusted, self._left = self.place, None

    def _learn(self, place: int, num_output: int) -> None:
        """Expect the change since the output left the text at this place wherever the text is as it was there."""
        assert self.place is not None
        num_old, num_new = (
            now - before - self.agreed for now, before in ((self.place, place), (self.num_read, num_output))
        )
        new = self._output[num_output : num_output + max(num_new, 0)]
        if not (new and 0 <= num_old <= _MAX_EDIT and len(new) <= _MAX_EDIT):
            return
        before = 0 if num_old else min(place, 1)  # an insertion is known by the tokens around it
        changed = self._text[place - before : place + max(num_old, 1)]
        places, at = list[int](), self.place - 1
        while changed and len(places) < _MAX_PLACES and (at := self._text.find(changed, at + 1)) >= 0:
            places.append(at + before)
        self._passage.expect(places, num_old, new)


def as_text(tokens: Sequence[int] | npt.NDArray[np.int32]) -> str:
    """Return one character per token, so that Python's string search can be used.

    Two distant token ids may share a character, which costs at worst a wrong draft.
    """
    characters = np.asarray(tokens, dtype=np.uint32) % _NUM_CHARACTERS
    return characters.astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")


def _column(numbers: npt.NDArray[Any]) -> "array[int]":
    """Return numbers as an array, whose single elements are read faster."""
    column: array[int] = array("i")
    column.frombytes(numbers.astype(np.int32).tobytes())
    return column

"""The thought of one output, and of paths of proposed tokens that follow it; and the tokens that must end it.

A thought is found by the texts of its markers. One whose budget is spent is ended by `Reasoning.end_ids`:

    budget 3, end_ids [7, 8]:    a  b  c  7  8  |  the answer
    the thought ends with 7:     a  b  7  8  |  the answer
"""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The thought in one output of a conversation.

    Attributes:
        start: Text before a thought.
        end: Text after a thought, with which the answer begins.
        end_ids: Tokens that end a thought whose budget is spent.
        is_open: Whether the prompt ends within a thought.
        has_channels: Whether each message of the output names its channel, as those of gpt-oss do.
        other_ends: Other texts that end the thought, as before a call.
    """

    start: str
    end: str
    end_ids: tuple[int, ...]
    is_open: bool
    has_channels: bool = False
    other_ends: tuple[str, ...] = ()


class Phase(enum.Enum):
    """Where an output is."""

    UNDECIDED = enum.auto()  # a thought may begin
    THOUGHT = enum.auto()
    ENDING = enum.auto()  # some of the tokens that must end the thought have been generated
    ANSWER = enum.auto()  # after a thought
    ONLY_ANSWER = enum.auto()  # there is no thought


@dataclass(frozen=True, slots=True)
class _Place:
    """A place in an output.

    Attributes:
        num_tokens: Number of tokens of the thought so far.
        tail: The last tokens, which may be the beginning of a marker.
        num_ended: Number of the ending tokens that have been generated.
    """

    phase: Phase
    num_tokens: int = 0
    tail: tuple[int, ...] = ()
    num_ended: int = 0


class Thought:
    """The thought of one output.

    Args:
        reasoning: Its markers.
        decode: Function that returns the text of tokens, special ones included.
        budget: Maximum number of its tokens, or None without a limit.
    """

    def __init__(self, reasoning: Reasoning, decode: Decode, budget: int | None = None) -> None:
        self.reasoning, self.budget = reasoning, budget if reasoning.end_ids else None
        self._decode = decode
        self._ends = (reasoning.end, *reasoning.other_ends)
        self._num_kept = max(len(end.encode()) for end in self._ends)  # a token has a byte at least
        self._place = self._begin() if reasoning.is_open else _Place(Phase.UNDECIDED)
        self._along: dict[tuple[int, ...], _Place] = {}  # places at the ends of paths

    @property
    def phase(self) -> Phase:
        return self._place.phase

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the thought, without its markers."""
        return self._place.num_tokens

    @property
    def is_over(self) -> bool:
        """True if the answer has begun, or there is no thought."""
        return self.phase in (Phase.ANSWER, Phase.ONLY_ANSWER)

    def advance(self, token: int) -> None:
        """Add a generated token to the output."""
        self._place = self._after(self._place, token)
        self._along.clear()

    def may_force(self, depth: int) -> bool:
        """Return whether only one token may be legal after a path of this length, or a shorter one."""
        if self.budget is None or self.is_over:
            return False
        return self.phase is Phase.ENDING or self.num_tokens + depth >= self.budget

    def forced(self, path: Sequence[int]) -> int | None:
        """Return the only token that is legal after the output and a path of proposed tokens, or None."""
        return self._forced_at(self._at(tuple(path))) if self.may_force(len(path)) else None

    def _at(self, path: tuple[int, ...]) -> _Place:
        known = len(path)
        while known and path[:known] not in self._along:
            known -= 1
        place = self._along[path[:known]] if known else self._place
        for length in range(known + 1, len(path) + 1):
            place = self._along[path[:length]] = self._after(place, path[length - 1])
        return place

    def _forced_at(self, place: _Place) -> int | None:
        is_spent = place.phase is Phase.THOUGHT and self.budget is not None and place.num_tokens >= self.budget
        return self.reasoning.end_ids[place.num_ended] if is_spent or place.phase is Phase.ENDING else None

    def _after(self, place: _Place, token: int) -> _Place:
        """Return the place after a token."""
        if place.phase in (Phase.ANSWER, Phase.ONLY_ANSWER):
            return place
        if token == self._forced_at(place):
            num_ended, num_before = place.num_ended + 1, 0 if place.phase is Phase.ENDING else place.num_ended
            phase = Phase.ANSWER if num_ended == len(self.reasoning.end_ids) else Phase.ENDING
            return replace(place, phase=phase, num_ended=num_ended, num_tokens=place.num_tokens - num_before)
        tail = (*place.tail, token)
        text = self._decode(tail)
        if place.phase is Phase.UNDECIDED:
            return self._decide(text.lstrip(), tail)
        if self._has_end(text):
            of_end = next(count for count in range(1, 1 + len(tail)) if self._has_end(self._decode(tail[-count:])))
            return replace(place, phase=Phase.ANSWER, num_tokens=place.num_tokens + 1 - of_end)
        return self._thinking(place.num_tokens + 1, tail[-self._num_kept :])

    def _has_end(self, text: str) -> bool:
        return any(end in text for end in self._ends)

    def _decide(self, text: str, tail: tuple[int, ...]) -> _Place:
        start = self.reasoning.start
        if text.startswith(start):
            return self._begin()
        may_begin = start.startswith(text.rstrip("\ufffd"))  # which stands for a part of a character
        return _Place(Phase.UNDECIDED, tail=tail if text else ()) if may_begin else _Place(Phase.ONLY_ANSWER)

    def _begin(self) -> _Place:
        return self._thinking(0, ())

    def _thinking(self, num_tokens: int, tail: tuple[int, ...]) -> _Place:
        """Return a place in the thought; if the budget is spent, what ends it may have begun with the last tokens."""
        num_ended, end_ids = 0, self.reasoning.end_ids
        if self.budget is not None and num_tokens >= self.budget:
            lengths = range(min(len(tail), len(end_ids) - 1), 0, -1)
            num_ended = next((length for length in lengths if tail[-length:] == end_ids[:length]), 0)
        return _Place(Phase.THOUGHT, num_tokens, tail, num_ended)

"""Limits on what a grammar may make a model do: the digits of JSON numbers, and the time that masks take."""

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

_Bits = npt.NDArray[np.uint8]
MAX_DIGITS = 20  # before the point, after it, and in an exponent: each integer of 64 bits fits
_DIGITS, _FROM_DIGIT, _AFTER_DIGITS = r"[0-9]+", r"[0-9](?s:.*)", r"[.eE,}\]<\t\n\r ](?s:.*)"
SECONDS_PER_TOKEN = 0.002  # of processor time that each token adds; masks of real schemas take a fifth of it
_MAX_CREDIT = 0.25  # seconds
_SHARE = 0.05  # of the time that goes by, which becomes credit


class DigitLimit:
    """The tokens that matter for the limit."""

    def __init__(self, tokenizer: LLTokenizer, end_bit: int) -> None:
        digits, self._from_digit, self._others = (
            _first_tokens(tokenizer, regex) for regex in (_DIGITS, _FROM_DIGIT, f"{_FROM_DIGIT}|{_AFTER_DIGITS}")
        )
        self._others = ~self._others
        self._others[end_bit // 8] &= ~np.uint8(1 << end_bit % 8)
        tokens = np.unpackbits(digits, bitorder="little").nonzero()[0].tolist()
        self._lengths = {token: len(tokenizer.decode_bytes([token])) for token in tokens if token != end_bit}

    def limited(self, legal: _Bits, backwards: Iterable[int]) -> _Bits:
        """Return the legal tokens without those that add a digit to a number that has enough.

        Args:
            legal: The tokens that the grammar allows: [vocab / 8].
            backwards: The tokens before, the last one first.
        """
        num_digits = 0
        for token in backwards:
            if token not in self._lengths or num_digits >= MAX_DIGITS:
                break
            num_digits += self._lengths[token]
        # In a string something else could follow, too; a number that must go on, such as a multiple, goes on.
        if num_digits < MAX_DIGITS or (legal & self._others).any():
            return legal
        rest = legal & ~self._from_digit
        return rest if rest.any() else legal


def _first_tokens(tokenizer: LLTokenizer, regex: str) -> _Bits:
    """Return the tokens that a text of a regular expression may begin with."""
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_regex(regex), log_level=0)
    return np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8).copy()


@dataclass(slots=True)
class MaskTime:
    """Processor time that the masks of all outputs of a request take, in seconds.

    Attributes:
        most: Limit before what each token adds.
        own, guesses: Spent on the outputs, and because of proposed tokens.
    """

    most: float = math.inf
    num_tokens: int = 0
    own: float = 0.0
    guesses: float = 0.0

    @property
    def allowed(self) -> float:
        return self.most + SECONDS_PER_TOKEN * self.num_tokens


class MaskCredit:
    """Processor time that the masks of all requests of one tenant may take, which comes back with time and with tokens.

    What one request may take is limited by `MaskTime`, and a tenant may send many.
    """

    def __init__(self) -> None:
        self._left, self._counted_at = _MAX_CREDIT, time.monotonic()

    @property
    def left(self) -> float:
        """Seconds that are left; below 0 after masks that took more."""
        now = time.monotonic()
        self._left = min(_MAX_CREDIT, self._left + (now - self._counted_at) * _SHARE)
        self._counted_at = now
        return self._left

    @property
    def is_full(self) -> bool:
        return self.left >= _MAX_CREDIT

    def add(self, seconds: float) -> None:
        self._left = min(_MAX_CREDIT, self.left + seconds)

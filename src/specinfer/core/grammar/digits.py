"""The limit on the digits of JSON numbers: llguidance's numbers have none, and a model can repeat a digit for ever."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

_Bits = npt.NDArray[np.uint8]
MAX_DIGITS = 20  # before the point, after it, and in an exponent: each integer of 64 bits fits
_DIGITS, _FROM_DIGIT, _AFTER_DIGITS = r"[0-9]+", r"[0-9](?s:.*)", r"[.eE,}\]<\t\n\r ](?s:.*)"


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

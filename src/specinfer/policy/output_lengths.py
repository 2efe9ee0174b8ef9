"""Lengths of outputs: how many more tokens an output is expected to have, by the lengths of earlier ones.

Example: outputs of 20, 100 and 300 tokens ended. One that has 50 tokens is expected to have (50 + 250) / 2 = 150
more, and one that has 400 as many as it has, 400.
"""

from collections import deque
from statistics import fmean

_USUAL = 256  # tokens of an output, before any ended
_MEMORY = 32  # outputs


class OutputLengths:
    """The lengths of the last outputs that ended."""

    def __init__(self) -> None:
        self._lengths = deque([_USUAL], _MEMORY)

    def observe(self, num_tokens: int) -> None:
        """Count an output that ended."""
        self._lengths.append(num_tokens)

    def left(self, num_tokens: int) -> float:
        """Return the further tokens that an output of so many is expected to have."""
        longer = [length - num_tokens for length in self._lengths if length > num_tokens]
        return fmean(longer) if longer else float(num_tokens)

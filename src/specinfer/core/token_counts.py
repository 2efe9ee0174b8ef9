"""Occurrences of tokens in a request's text so far, for penalties. A step adds only its new tokens."""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt


class TokenCounts:
    """Number of occurrences of each distinct token in an output.

    Args:
        seen: Tokens that are listed even if the output has none of them, such as the prompt's.
    """

    def __init__(self, seen: Iterable[int] = ()) -> None:
        self.num_counted = 0  # tokens of the output
        self._places = {token: place for place, token in enumerate(dict.fromkeys(seen))}
        self._ids = np.fromiter(self._places, dtype=np.int64)
        self._counts = np.zeros(len(self._ids), dtype=np.float32)

    def add(self, tokens: Sequence[int]) -> None:
        """Count the next tokens of the output."""
        self._ids, self._counts = self._with(tokens, self._places)
        self.num_counted += len(tokens)

    def along(self, path: Sequence[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Return distinct tokens and their counts if the output continued with this path; do not write to them."""
        return self._with(path, {})

    def _with(
        self, tokens: Sequence[int], new: dict[int, int]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Return tokens and counts with these tokens added; indices of tokens not seen before are added to `new`."""
        if not tokens:
            return self._ids, self._counts
        places = []
        size = first = len(self._ids)
        for token in tokens:
            place = self._places.get(token)
            if place is None:
                place = new.setdefault(token, size)
            size = max(size, place + 1)
            places.append(place)
        counts = np.zeros(size, dtype=np.float32)
        counts[:first] = self._counts
        np.add.at(counts, places, 1.0)
        ids = self._ids if size == first else np.concatenate([self._ids, np.empty(size - first, dtype=np.int64)])
        if size > first:
            ids[places] = tokens
        return ids, counts

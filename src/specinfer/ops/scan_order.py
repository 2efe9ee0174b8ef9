"""The order in which recurrences compute the tokens of a pass."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specinfer.ops.cpu.transfers import send_together

_Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ScanOrder:
    """The tokens of a pass in the order of a recurrence, one request after the other; all tensors are int64.

    A state is that of the token before, or of another one that was put in a place:

        parents  -1 0 0 1 2        a ─ b ─ d
        origins  -1 -1 0 1 2         └ c ─ e     of a, b, c, d, e
        places    0  1 2 -1 -1

    Attributes:
        num_results: Number of results.
        num_places: Number of states that are put down.
    """

    num_results: int
    num_places: int
    starts: Tensor  # [requests] first token of each request
    ends: Tensor  # [requests] the token after its last one
    first_rows: Tensor  # [requests] rows of the pool with the first states; -1: zeros
    first_places: Tensor  # [requests] places of the first states; -1: none
    slots: Tensor  # [tokens]
    origins: Tensor  # [tokens] places of the states before them; -1: that of the token before, or the first state
    places: Tensor  # [tokens] places of the states after them; -1: none
    rows: Tensor  # [tokens] rows of the pool for the states after them; -1: none
    results: Tensor  # [tokens] rows of their results; -1: none

    @classmethod
    def from_arrays(
        cls,
        slots: _Integers,
        parents: Sequence[_Integers],
        first_rows: Sequence[int],
        rows: _Integers,
        results: _Integers,
        num_results: int,
        device: torch.device,
    ) -> Self:
        """Return the order of tokens, each after its parent, sent to the device in one copy.

        Args:
            slots: [tokens] slots.
            parents: For each request, [its tokens] the parents among its tokens, -1 for its first state.
            first_rows: [requests] rows of the pool with the first states, or -1 for zeros.
            rows: [tokens] rows of the pool for the states after them, or -1.
            results: [tokens] rows of the results, or -1 for none.
            num_results: Number of results.
        """
        arrays, num_places = cls.arrays_of(slots, parents, first_rows, rows, results)
        return cls(num_results, num_places, *send_together(list(arrays.values()), device))

    @staticmethod
    def arrays_of(
        slots: _Integers, parents: Sequence[_Integers], first_rows: Sequence[int], rows: _Integers, results: _Integers
    ) -> tuple[dict[str, _Integers], int]:
        """Return the tensors' contents by name, and the number of places; see `from_arrays`."""
        origins, places, first_places, num_places = [], [], [], 0
        for of_request in parents:
            origin, place, first, count = _places(of_request)
            origins.append(np.where(origin < 0, -1, origin + num_places))
            places.append(np.where(place < 0, -1, place + num_places))
            first_places.append(first + num_places if first >= 0 else -1)
            num_places += count
        starts = np.cumsum([0, *map(len, parents)])
        arrays = {
            "starts": starts[:-1], "ends": starts[1:], "first_rows": first_rows, "first_places": first_places,
            "slots": slots, "origins": np.concatenate(origins), "places": np.concatenate(places), "rows": rows,
            "results": results,
        }  # fmt: skip
        return {name: np.asarray(values, dtype=np.int64) for name, values in arrays.items()}, num_places


def _places(parents: _Integers) -> tuple[_Integers, _Integers, int, int]:
    """Return origins, places, the first state's place or -1, and the number of places, of one request."""
    count = len(parents)
    follows = parents == np.arange(-1, count - 1)
    needed = np.unique(parents[~follows])  # -1 is the first state
    places = np.full(count + 1, -1)
    places[needed + 1] = np.arange(len(needed))
    return np.where(follows, -1, places[parents + 1]), places[1:], int(places[0]), len(needed)

"""Drafted tokens ("guesses") of several trees in common arrays, with one number for each guess."""

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Guesses:
    """The guesses that may still be taken and those already taken, by number in draw order."""

    def __init__(self, room: int) -> None:
        self.size = 0
        self.tree, self.node, self.token, self.level, self.row, self.rank, self.bin = np.zeros((7, room), np.int64)
        self.child = np.full(room, -1)  # the node that the guess became
        self.confidence, self.path_prob = np.zeros((2, room))

    def add(self, **columns: Ints | Floats | int) -> Ints:
        """Add guesses and return their numbers."""
        start, self.size = self.size, self.size + len(np.asarray(columns["tree"]))
        for name, values in columns.items():
            getattr(self, name)[start : self.size] = values
        return np.arange(start, self.size)


def places(owners: Ints) -> Ints:
    """Return each element's index among those of its owner, [n], from 0; the owners must ascend."""
    return np.asarray(np.arange(len(owners)) - np.searchsorted(owners, owners))

"""Guesses of several trees in common arrays, one number for each guess."""

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Guesses:
    """Guesses that could be taken, and those that were, by number, in draw order."""

    def __init__(self, room: int) -> None:
        self.size = 0
        self.tree, self.node, self.token, self.level, self.row, self.rank, self.bin = np.zeros((7, room), np.int64)
        self.child = np.full(room, -1)  # the node it became
        self.confidence, self.path_prob = np.zeros((2, room))

    def add(self, **columns: Ints | Floats | int) -> Ints:
        """The numbers of these guesses."""
        start, self.size = self.size, self.size + len(np.asarray(columns["tree"]))
        for name, values in columns.items():
            getattr(self, name)[start : self.size] = values
        return np.arange(start, self.size)


def places(owners: Ints) -> Ints:
    """[n] the how manieth of its owner each is, from 0; owners ascend."""
    return np.asarray(np.arange(len(owners)) - np.searchsorted(owners, owners))

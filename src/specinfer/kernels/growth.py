"""Growth of several trees by one level, in one native call: see growth.h."""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from specinfer.kernels.library import library

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
_GUESSES = ("tree", "node", "token", "level", "row", "rank", "bin", "child", "confidence", "path_prob")


class _Growth(ctypes.Structure):
    _fields_ = (
        ("trees", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("starts", "sizes", "num_left", "tokens", "parents", "depths")),
        *((name, ctypes.c_void_p) for name in ("path_prob", "ancestry")),
        ("ancestry_columns", ctypes.c_int64),
        *((f"guess_{name}", ctypes.c_void_p) for name in _GUESSES),
        ("size", ctypes.c_int64),
        ("open", ctypes.c_void_p),
        ("num_open", ctypes.c_int64),
        ("taken", ctypes.c_void_p),
        ("num_taken", ctypes.c_int64),
        ("edges", ctypes.c_void_p),
        ("edges_count", ctypes.c_int64),
        ("bins", ctypes.c_int64),
        ("middles", ctypes.c_void_p),
        ("middles_count", ctypes.c_int64),
        ("ranks", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("heights", "slopes", "min_path_prob")),
        *((name, ctypes.c_void_p) for name in ("frontiers", "widths", "tables", "last_bins")),
        *((name, ctypes.c_void_p) for name in ("candidates", "confidence")),
        ("columns", ctypes.c_int64),
        ("level", ctypes.c_int64),
    )


class GrowthCall:
    """The arrays of trees that grow together, ready for calls that extend them by a level.

    Args:
        nodes: Arrays of all nodes by name, as in `_Growth`: written to.
        guesses: Arrays of all guesses by name, one longer than `nodes`' budgets need: written to.
        edges: [bins - 1] the greatest path probability of each bin but the first, falling.
        middles: [middles] confidences at which the lines of the acceptance probability meet.
        lines: For each tree, heights and slopes, [ranks * (middles + 1)] each, or None in a fixed expansion.
        min_path_prob: [trees].
    """

    def __init__(
        self,
        nodes: dict[str, npt.NDArray[Any]],
        guesses: dict[str, npt.NDArray[Any]],
        edges: Floats,
        middles: Floats,
        lines: Sequence[tuple[Floats, Floats] | None],
        min_path_prob: Floats,
    ) -> None:
        self._open, self._taken = np.empty((2, len(guesses["tree"])), dtype=np.int64)
        heights, slopes = (addresses([pair and pair[i] for pair in lines]) for i in range(2))
        arrays = nodes | {f"guess_{name}": guesses[name] for name in _GUESSES}
        arrays |= {"open": self._open, "taken": self._taken, "edges": edges, "middles": middles}
        arrays |= {"heights": heights, "slopes": slopes, "min_path_prob": min_path_prob}
        self._alive = (arrays, lines)  # keeps the arrays alive as long as their addresses
        ranks = next((len(pair[0]) // (len(middles) + 1) for pair in lines if pair), 1)
        sizes = {"ancestry_columns": nodes["ancestry"].shape[1], "edges_count": len(edges), "bins": len(edges) + 1}
        sizes |= {"middles_count": len(middles), "ranks": ranks, "trees": len(lines)}
        self._growth = _Growth(**{name: array.ctypes.data for name, array in arrays.items()}, **sizes)
        self._address = ctypes.addressof(self._growth)
        assert all(array.flags.c_contiguous for array in arrays.values())
        # What changes from level to level has its places, too: an address takes as long as a level of a small tree.
        count, growth = len(lines), self._growth
        numbers = np.zeros(5 * count, dtype=np.int64)
        self._frontiers, (self._widths, self._tables, self._last_bins) = (
            numbers[: 2 * count],
            numbers[2 * count :].reshape(3, -1),
        )
        first, size = numbers.ctypes.data, count * numbers.itemsize
        growth.frontiers, growth.widths, growth.tables = first, first + 2 * size, first + 3 * size
        growth.last_bins = first + 4 * size
        self._addresses: dict[int, int] = {}  # of tables, by their identity

    def extend(
        self,
        level: int,
        frontiers: Sequence[int],
        widths: Sequence[int],
        tables: Sequence[Floats | None],
        candidates: Ints,
        confidence: npt.NDArray[np.float32],
    ) -> Ints:
        """Offer guesses below the frontiers, and return the numbers of those that became nodes, tree by tree.

        Args:
            level: Number of the level.
            frontiers: For each tree, first node and end of its frontier, one after the other.
            widths: For each tree, the largest number of candidates of a node.
            tables: For each tree, [bins] as in `SubtreeSize.reach`, or None to take all guesses that fit; kept alive by
                the caller until the trees are grown.
            candidates, confidence: [nodes of the frontiers, columns].
        """
        candidates, confidence = np.ascontiguousarray(candidates), np.ascontiguousarray(confidence)
        assert candidates.dtype == np.int64
        assert confidence.dtype == np.float32
        assert candidates.shape == confidence.shape
        assert len(candidates) == sum(frontiers[1::2]) - sum(frontiers[::2])
        growth, self._last_bins[:] = self._growth, self._growth.bins
        self._frontiers[:], self._widths[:] = frontiers, widths
        self._tables[:] = [0 if table is None else self._address_of(table) for table in tables]
        growth.candidates, growth.confidence = candidates.ctypes.data, confidence.ctypes.data
        growth.columns, growth.level = candidates.shape[1], level
        return self._call()

    def fill(self, trees: Sequence[int]) -> Ints:
        """Return the numbers of the open guesses that became nodes of these trees: as many as fit."""
        self._last_bins[:] = -1
        self._last_bins[trees] = self._growth.bins
        self._frontiers[:] = self._tables[:] = 0
        return self._call()

    def _address_of(self, table: Floats) -> int:
        if id(table) not in self._addresses:
            self._addresses[id(table)] = table.ctypes.data
        return self._addresses[id(table)]

    def _call(self) -> Ints:
        loaded = library()
        assert loaded is not None
        loaded.specinfer_grow(self._address)
        return self._taken[: self._growth.num_taken].copy()


def addresses(arrays: Sequence[Floats | None]) -> npt.NDArray[np.uint64]:
    """Return the address of each array, or 0 for None; that of an array named several times is looked up once."""
    known = {
        id(array): 0 if array is None else array.ctypes.data for array in {id(one): one for one in arrays}.values()
    }
    return np.array([known[id(array)] for array in arrays], dtype=np.uint64)

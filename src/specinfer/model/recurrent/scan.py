"""The order in which recurrent layers compute the tokens of a pass, each from its parent's state."""

from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from specinfer.model.recurrent.states import NO_ROW, Ints, RecurrentStates
from specinfer.ops.cpu.recurrence import NativeScan
from specinfer.ops.scan_order import ScanOrder


class Part(Protocol):
    """The part of a `batch.Piece` that a scan reads."""

    @property
    def prefix_slots(self) -> Ints: ...
    @property
    def earlier_slots(self) -> Ints: ...
    @property
    def slots(self) -> Ints: ...
    @property
    def visible(self) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]: ...
    @property
    def num_known(self) -> int: ...


class Scan:
    """The tokens of a pass, after those of each prefix that follow its kept state and are computed once more.

    Args:
        recomputes: Whether there are recurrences; convolutions alone compute only the tokens of the pass.
    """

    def __init__(
        self, pieces: Sequence[Part], states: RecurrentStates, device: torch.device, *, recomputes: bool = True
    ) -> None:
        self._pieces, self._states, self._device = pieces, states, device
        self._paths: dict[int, Tensor] = {}
        states.begin([piece.slots for piece in pieces])
        self._starts, self._rows = [], []
        for piece in pieces:
            start, row = states.find(piece.prefix_slots)
            if not recomputes:
                start = len(piece.prefix_slots) + len(piece.earlier_slots)
            self._starts.append(start)
            self._rows.append(row)
        self._kept = [
            states.claim(int(piece.slots[piece.num_known - 1]), row) if piece.num_known else NO_ROW
            for piece, row in zip(pieces, self._rows, strict=True)
        ]
        self._parents = [parents_of(piece) for piece in pieces]

    @cached_property
    def native(self) -> NativeScan:
        """The scan in the form that native kernels read."""
        return NativeScan(*self._arrays())

    @cached_property
    def order(self) -> ScanOrder:
        """The scan in the form that other kernels read."""
        return ScanOrder.from_arrays(*self._arrays(), self._device)

    def wrote(self, layer: int) -> None:
        """Record that a layer has written the states that are kept."""
        self._states.wrote(layer)

    @property
    def num_tokens(self) -> int:
        """Tokens of the scan."""
        return sum(len(one) - start for one, start in zip(self._parents, self._starts, strict=True))

    def host_arrays(self, taps: int) -> dict[str, Ints]:
        """Return the contents of a `PaddedScan` by the names of its tensors, as far as there are tokens."""
        arrays, _ = ScanOrder.arrays_of(*self._arrays()[:-1])
        return {**arrays, "paths": self._path_slots(taps), "new": self._new}

    def _arrays(self) -> tuple[Ints, list[Ints], list[int], Ints, Ints, int]:
        """Return slots, parents, first rows, rows, rows of the results and their number, as `ScanOrder` takes them."""
        slots, new = self._path_slots(1)[:, 0], self._new
        rows = np.full(len(slots), NO_ROW, dtype=np.int64)
        results = np.full(len(slots), NO_ROW, dtype=np.int64)
        results[new] = np.arange(len(new))
        ends = np.cumsum([len(piece.slots) for piece in self._pieces])
        for piece, kept, end in zip(self._pieces, self._kept, ends.tolist(), strict=True):
            if kept != NO_ROW:
                rows[new[end - len(piece.slots) + piece.num_known - 1]] = kept
        parents = [np.maximum(one[start:] - start, -1) for one, start in zip(self._parents, self._starts, strict=True)]
        return slots, parents, self._rows, rows, results, len(new)

    def paths(self, count: int) -> Tensor:
        """Return [scanned, count] slots of the last tokens on each token's path, itself last; -1 before the first."""
        if count not in self._paths:
            self._paths[count] = torch.from_numpy(self._path_slots(count)).to(self._device)
        return self._paths[count]

    def _path_slots(self, count: int) -> Ints:
        parts = zip(self._pieces, self._parents, self._starts, strict=True)
        return np.concatenate([path_slots(piece, parents, start, count) for piece, parents, start in parts])

    @cached_property
    def new(self) -> Tensor:
        """[tokens] index of the packed tokens of the pass in those of the scan."""
        return torch.from_numpy(self._new).to(self._device)

    @cached_property
    def _new(self) -> Ints:
        found, end = [], 0
        for piece, parents, start in zip(self._pieces, self._parents, self._starts, strict=True):
            end += len(parents) - start
            found.append(np.arange(end - len(piece.slots), end))
        return np.concatenate(found)


class PaddedScan:
    """A scan in tensors of fixed shapes, which are filled before each pass; padding belongs to no request.

    Args:
        order: The scan.
        paths: [scanned, taps] slots of the last tokens on each token's path.
        new: [tokens] index of the packed tokens of the pass in those of the scan.
    """

    def __init__(self, order: ScanOrder, paths: Tensor, new: Tensor) -> None:
        self.order, self.new, self._paths = order, new, paths

    def paths(self, count: int) -> Tensor:
        """Return [scanned, count] slots of the last tokens on each token's path, itself last; -1 before the first."""
        return self._paths[:, self._paths.shape[1] - count :]

    def wrote(self, layer: int) -> None:
        """Do nothing: states are known when the whole pass has been launched."""


def parents_of(piece: Part) -> Ints:
    """Return [context] the index of each token's parent among prefix, earlier and new tokens; -1 for the first."""
    num_prefix, num_earlier, num_new = len(piece.prefix_slots), len(piece.earlier_slots), len(piece.slots)
    parents = np.arange(-1, num_prefix + num_earlier + num_new - 1)
    known = 0 if num_earlier else piece.num_known  # of a chain, which needs no search
    rows, above = np.arange(num_new - known), piece.visible[known:].copy()
    above[rows, num_earlier + known + rows] = False
    last = above.shape[1] - 1 - above[:, ::-1].argmax(axis=1)
    parents[num_prefix + num_earlier + known :] = np.where(above[rows, last], num_prefix + last, num_prefix - 1)
    for row in piece.visible[:, :num_earlier] if num_earlier else ():
        path = num_prefix + np.flatnonzero(row)
        parents[path] = np.concatenate([[num_prefix - 1], path])[: len(path)]
    return parents


def path_slots(piece: Part, parents: Ints, start: int, count: int) -> Ints:
    """Return [context - start, count] slots of the last tokens on the path of each token from `start` on."""
    slots = np.concatenate([piece.prefix_slots, piece.earlier_slots, piece.slots, [-1]]).astype(np.int64)
    places = np.arange(start, len(parents))
    columns = []
    for _ in range(count):
        columns.append(slots[places])  # the place -1 has the slot -1
        places = np.where(places < 0, -1, parents[places])
    return np.stack(columns[::-1], axis=1)

"""The order in which recurrent layers compute the tokens of a pass: level by level, each from its parent's state."""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from specinfer.kernels.recurrence import NativeScan
from specinfer.model.recurrent.states import NO_ROW, Ints, RecurrentStates


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


class Level(NamedTuple):
    """Tokens that are computed at once.

    Attributes:
        tokens: [n] index into the tokens of the scan.
        sources: [n] index into the tokens of the level before; at the first level, rows of kept states, or -1.
        kept: [k] index into `tokens` of those whose states are kept.
        rows: [k] rows of their states.
    """

    tokens: Tensor
    sources: Tensor
    kept: Tensor
    rows: Tensor


class Scan:
    """The tokens of a pass, after those of each prefix that follow its kept state and are computed once more."""

    def __init__(self, pieces: Sequence[Part], states: RecurrentStates, device: torch.device) -> None:
        self._pieces, self._device = pieces, device
        self._paths: dict[int, Tensor] = {}
        states.begin([piece.slots for piece in pieces])
        self._starts, self._rows = [], []
        for piece in pieces:
            start, row = states.find(piece.prefix_slots)
            self._starts.append(start)
            self._rows.append(row)
        self._kept = [
            states.claim(int(piece.slots[piece.num_known - 1])) if piece.num_known else NO_ROW for piece in pieces
        ]
        self._parents = [parents_of(piece) for piece in pieces]

    @cached_property
    def native(self) -> NativeScan:
        """The scan in the form that native kernels read."""
        slots = self.slots.numpy()
        rows = np.full(len(slots), NO_ROW, dtype=np.int64)
        results = np.full(len(slots), NO_ROW, dtype=np.int64)
        new = self.new.numpy()
        results[new] = np.arange(len(new))
        ends = np.cumsum([len(piece.slots) for piece in self._pieces])
        for piece, kept, end in zip(self._pieces, self._kept, ends.tolist(), strict=True):
            if kept != NO_ROW:
                rows[new[end - len(piece.slots) + piece.num_known - 1]] = kept
        parents = [np.maximum(one[start:] - start, -1) for one, start in zip(self._parents, self._starts, strict=True)]
        return NativeScan(slots, parents, self._rows, rows, results, len(new))

    def _tensor(self, values: Sequence[int] | Ints) -> Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.int64)).to(self._device)

    @cached_property
    def slots(self) -> Tensor:
        """[scanned] slots of all tokens of the scan."""
        return self.paths(1)[:, 0]

    def paths(self, count: int) -> Tensor:
        """Return [scanned, count] slots of the last tokens on each token's path, itself last; -1 before the first."""
        if count not in self._paths:
            parts = zip(self._pieces, self._parents, self._starts, strict=True)
            paths = [path_slots(piece, parents, start, count) for piece, parents, start in parts]
            self._paths[count] = self._tensor(np.concatenate(paths))
        return self._paths[count]

    @cached_property
    def new(self) -> Tensor:
        """[tokens] index of the packed tokens of the pass in those of the scan."""
        found, end = [], 0
        for piece, parents, start in zip(self._pieces, self._parents, self._starts, strict=True):
            end += len(parents) - start
            found.append(np.arange(end - len(piece.slots), end))
        return self._tensor(np.concatenate(found))

    @cached_property
    def levels(self) -> list[Level]:
        found: list[tuple[list[int], list[int], list[int], list[int]]] = []
        first = 0  # of the piece, in the scan
        for piece, parents, start, row, kept in zip(
            self._pieces, self._parents, self._starts, self._rows, self._kept, strict=True
        ):
            places: list[tuple[int, int]] = []  # level of each token, and its index there
            last_known = len(parents) - len(piece.slots) + piece.num_known - 1
            for i, parent in enumerate(parents[start:].tolist()):
                level, source = (0, row) if parent < start else places[parent - start]
                level += parent >= start
                if level == len(found):
                    found.append(([], [], [], []))
                tokens, sources, kept_ones, rows = found[level]
                places.append((level, len(tokens)))
                if kept != NO_ROW and start + i == last_known:
                    kept_ones.append(len(tokens))
                    rows.append(kept)
                tokens.append(first + i)
                sources.append(source)
            first += len(parents) - start
        return [Level(*(self._tensor(values) for values in level)) for level in found]


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

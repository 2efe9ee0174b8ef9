"""SlotTable: the slots of the requests' prefixes on the device, for captured passes."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specinfer.model.kv_cache import Slots

Change: TypeAlias = tuple[int, Slots]  # the first of adjacent cells, and their new slots
Ints: TypeAlias = npt.NDArray[np.integer[Any]]


class SlotTable:
    """Rows of slots on the device, and the host's record of their contents.

    A request usually keeps its row, and its prefix grows by a few tokens per step. Only these are written.

    Args:
        requests: Number of rows.
        context: Number of slots per row.
    """

    def __init__(self, requests: int, context: int, device: torch.device) -> None:
        self.requests, self.context = requests, context
        # One extra cell takes the padding of update lists.
        self.cells = torch.zeros(requests * context + 1, dtype=torch.int32, device=device)
        self._known = np.zeros((requests, context), dtype=np.int64)
        self._lens = np.zeros(requests, dtype=np.int64)

    @property
    def rows(self) -> Tensor:
        """Table as [requests, context] int32."""
        return self.cells[:-1].view(self.requests, self.context)

    @property
    def no_cell(self) -> int:
        """Index of a cell that is never read."""
        return self.requests * self.context

    def holds(self, prefixes: Sequence[Slots]) -> bool:
        """Return whether there are rows for these prefixes, and cells for the longest."""
        return len(prefixes) <= self.requests and max(map(len, prefixes)) <= self.context

    def changes(self, prefixes: Sequence[Slots]) -> Iterator[Change]:
        """Yield the first cell and the slots of each change that is needed to put these prefixes in the first rows.

        The host's record is updated at the same time.
        """
        for row, prefix in enumerate(prefixes):
            start = self._first_difference(row, prefix)
            if start < len(prefix):
                self._known[row, start : len(prefix)] = prefix[start:]
                self._lens[row] = len(prefix)
                yield row * self.context + start, prefix[start:]

    def list_changes(self, changes: Iterable[Change], cells: Ints, slots: Ints) -> None:
        """List changes for a program to write; those that the lists have no room for are written now.

        Args:
            cells, slots: Written to, from the first place on.
        """
        num_listed = 0
        for cell, new in changes:
            end = num_listed + len(new)
            if end <= len(cells):
                cells[num_listed:end] = range(cell, cell + len(new))
                slots[num_listed:end] = new
                num_listed = end
            else:  # a new request, or one in another row than before
                self.write(cell, new)

    def write(self, cell: int, new: Slots) -> None:
        """Write adjacent cells in one copy, in order with the other work of the device."""
        sent = torch.from_numpy(new.astype(np.int32))
        if self.cells.is_cuda:
            sent = sent.pin_memory()  # otherwise the copy would wait for the device
        self.cells[cell : cell + len(new)].copy_(sent, non_blocking=True)

    def forget(self) -> None:
        """Discard the host's record of the contents."""
        self._lens[:] = 0

    def _first_difference(self, row: int, prefix: Slots) -> int:
        common = min(int(self._lens[row]), len(prefix))
        differs = self._known[row, :common] != prefix[:common]
        return int(differs.argmax()) if differs.any() else common

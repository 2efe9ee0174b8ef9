"""SlotTable: the slots of requests' prefixes, as a captured pass finds them on the device."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from specinfer.model.kv_cache import Slots


class SlotTable:
    """Rows of slots on the device, and what the host knows to stand there.

    A request mostly keeps its row, and its prefix grows by a few tokens a step: only these are written.

    Args:
        requests: Rows.
        context: Slots of a row.
    """

    def __init__(self, requests: int, context: int, device: torch.device) -> None:
        self.requests, self.context = requests, context
        # One cell more, for updates that are none.
        self.cells = torch.zeros(requests * context + 1, dtype=torch.int32, device=device)
        self._known = np.zeros((requests, context), dtype=np.int64)
        self._lens = np.zeros(requests, dtype=np.int64)

    @property
    def rows(self) -> Tensor:
        """[requests, context] int32."""
        return self.cells[:-1].view(self.requests, self.context)

    @property
    def no_cell(self) -> int:
        """The cell that nobody reads."""
        return self.requests * self.context

    def changes(self, prefixes: "list[Slots]") -> Iterator[tuple[int, Slots]]:
        """Where, from which cell on, and what is to be written for these prefixes to stand in the first rows.

        It is taken to stand there from then on.
        """
        for row, prefix in enumerate(prefixes):
            start = self._first_difference(row, prefix)
            if start < len(prefix):
                self._known[row, start : len(prefix)] = prefix[start:]
                self._lens[row] = len(prefix)
                yield row * self.context + start, prefix[start:]

    def write(self, cell: int, new: Slots) -> None:
        """Writes neighbouring cells at once, in the order of what else the device is asked for."""
        sent = torch.from_numpy(new.astype(np.int32))
        if self.cells.is_cuda:
            sent = sent.pin_memory()  # else the copy would wait for the device
        self.cells[cell : cell + len(new)].copy_(sent, non_blocking=True)

    def forget(self) -> None:
        """Nothing is known of what stands there."""
        self._lens[:] = 0

    def _first_difference(self, row: int, prefix: Slots) -> int:
        common = min(int(self._lens[row]), len(prefix))
        differs = self._known[row, :common] != prefix[:common]
        return int(differs.argmax()) if differs.any() else common

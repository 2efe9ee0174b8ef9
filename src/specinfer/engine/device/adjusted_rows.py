"""AdjustedRows: biases and penalties of requests on a device, for drafts of ordinary steps.

A program drafts for other requests in each step, in any order. Here each has a row that it keeps from step to step, to
which the tokens that it has emitted since are added.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import torch
from torch import Tensor

from specinfer.core.request import Request
from specinfer.engine.device.processing import Processing, make_adjustments, write_adjustments
from specinfer.ops.cpu.transfers import send
from specinfer.ops.logits import Adjustments


class AdjustedRows:
    """Rows of biases and penalties, the last of which has none.

    Args:
        num_rows: Largest number of requests of a step.
        vocab: Number of tokens of the target.
    """

    def __init__(self, num_rows: int, vocab: int, device: torch.device) -> None:
        self._sizes, self._device = (num_rows + 1, vocab), device
        self._adjustments: Adjustments | None = None
        self._lacks_memory = False
        self._free: list[int] = []
        # Row of each request, and its output tokens that are counted there; the least recently used first.
        self._rows: OrderedDict[Request, tuple[int, int]] = OrderedDict()
        self.forget()

    def can_adjust(self) -> bool:
        """Return whether there is memory, which is reserved when it is first needed."""
        if self._adjustments is None and not self._lacks_memory:
            self._adjustments = make_adjustments(*self._sizes, self._device)
            self._lacks_memory = self._adjustments is None
        return self._adjustments is not None

    def forget(self) -> None:
        """Discard what is known of the rows, which may not have been written."""
        self._rows.clear()
        self._free = list(range(self._sizes[0] - 1))

    def update(self, requests: Sequence[Request]) -> list[int]:
        """Bring the rows of these requests up to date, and return them."""
        for request in [one for one in self._rows if one.is_finished]:
            self._free.append(self._rows.pop(request)[0])
        assert self._adjustments is not None
        rows, (no_row, vocab) = [], (self._sizes[0] - 1, self._sizes[1])
        emitted = list[int]()  # cells of the table of tokens that were seen
        for request in requests:
            if Processing.of_request(request) < Processing.ADJUSTMENT:
                rows.append(no_row)
                continue
            if request not in self._rows:
                self._add(self._adjustments, request)
            row, num_counted = self._rows[request]
            emitted += [row * vocab + token for token in request.output_ids[num_counted:]]
            self._rows[request] = row, request.num_output
            self._rows.move_to_end(request)
            if request.params.min_tokens:
                self._adjustments.num_early[row].fill_(request.params.min_tokens - request.num_output)
            rows.append(row)
        if emitted:
            cells = send(np.array(emitted), self._device)
            twice = torch.full((), 2, dtype=torch.int32, device=self._device)
            self._adjustments.seen.view(-1).index_add_(0, cells, twice.expand(len(emitted)))
        return rows

    def _add(self, adjustments: Adjustments, request: Request) -> None:
        """Give a request a row, that of the request that was not drafted for the longest if there is no other."""
        row = self._free.pop() if self._free else self._rows.popitem(last=False)[1][0]
        write_adjustments(adjustments, row, request, lambda values: send(values, self._device))
        self._rows[request] = row, request.num_output

    def of(self, rows: Tensor) -> Adjustments:
        """Return those of some rows, [requests] int64."""
        assert self._adjustments is not None
        return Adjustments(*(getattr(self._adjustments, one.name).index_select(0, rows) for one in fields(Adjustments)))

"""Adapters at fixed places, so that passes with any of them can be captured: each row has the number of a lane."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specinfer.kernels import plain_layer
from specinfer.kernels.low_rank import AdapterTable, LowRank
from specinfer.kernels.triton import runs_on


class AdapterLanes:
    """The adapters that passes on a device can have now; lane 0 has none.

    Args:
        num_layers: Number of linear layers that adapters add to.
        count: Number of lanes with adapters.
        max_rank: Largest rank of what an adapter adds to one of these layers.
    """

    def __init__(self, num_layers: int, count: int, max_rank: int, device: torch.device) -> None:
        self.max_rank = max_rank
        self.tables: list[AdapterTable | None] = [None] * (count + 1)
        # Of each linear layer and lane: the addresses of both matrices, and their rank.
        self.places = torch.zeros((num_layers, 3, count + 1), dtype=torch.int64, device=device)
        self._lanes: OrderedDict[int, int] = OrderedDict((-lane, lane) for lane in range(1, count + 1))

    def place(self, tables: Sequence[AdapterTable | None]) -> list[int] | None:
        """Return the lane of each adapter, those that were used longest ago replaced; or None if there are too many."""
        wanted = {id(table): table for table in tables if table is not None}
        if len(wanted) >= len(self.tables):
            return None
        for key in wanted.keys() & self._lanes.keys():
            self._lanes.move_to_end(key)
        for key, table in wanted.items():
            if key not in self._lanes:
                _, lane = self._lanes.popitem(last=False)
                self._lanes[key] = lane
                self._write(lane, table)
        return [0 if table is None else self._lanes[id(table)] for table in tables]

    def _write(self, lane: int, table: AdapterTable) -> None:
        self.tables[lane] = table  # which keeps its memory while passes may read it
        rows = [(0, 0, 0) if one is None else _place(one) for one in table.layers]
        self.places[:, :, lane].copy_(torch.tensor(rows))


def _place(one: LowRank) -> tuple[int, int, int]:
    assert one.down.is_contiguous()
    assert one.up.is_contiguous()
    return one.down.data_ptr(), one.up.data_ptr(), len(one.down)


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The rows of a pass of fixed size, and the lane of each."""

    lanes: AdapterLanes
    of_rows: Tensor  # [rows] int32

    def add(self, number: int, x: Tensor, y: Tensor) -> None:
        """Add to `y` [rows, outputs] what the adapters add to the linear layer of this number with inputs `x`."""
        lanes = self.lanes
        if runs_on(y):
            from specinfer.kernels.triton.low_rank import add_low_rank

            add_low_rank(y, x, self.of_rows, lanes.places[number], lanes.max_rank)
        else:
            layers = [None if table is None else table.layers[number] for table in lanes.tables]
            pairs = [None if one is None else (one.down, one.up) for one in layers]
            plain_layer.add_low_rank(y, x, self.of_rows, pairs)

"""Adapters in numbered slots, so that passes with any of them can be captured: each row has the index of a slot."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specinfer.ops import layer_ops
from specinfer.ops.cpu.low_rank import AdapterTable, LowRank


class AdapterSlots:
    """The adapters that passes on a device can have now; slot 0 is that of rows without one.

    Args:
        num_layers: Number of linear layers that adapters add to.
        count: Number of slots for adapters.
        max_rank: Largest rank of what an adapter adds to one of these layers.
    """

    def __init__(self, num_layers: int, count: int, max_rank: int, device: torch.device) -> None:
        self.max_rank = max_rank
        self.tables: list[AdapterTable | None] = [None] * (count + 1)
        # Of each linear layer and slot: the addresses of both matrices, and their rank.
        self.places = torch.zeros((num_layers, 3, count + 1), dtype=torch.int64, device=device)
        self._slots: OrderedDict[int, int] = OrderedDict((-slot, slot) for slot in range(1, count + 1))

    def place(self, tables: Sequence[AdapterTable | None]) -> list[int] | None:
        """Return the slot of each adapter, or None if there are too many; the least recently used ones are replaced."""
        wanted = {id(table): table for table in tables if table is not None}
        if len(wanted) >= len(self.tables):
            return None
        for key in wanted.keys() & self._slots.keys():
            self._slots.move_to_end(key)
        for key, table in wanted.items():
            if key not in self._slots:
                _, slot = self._slots.popitem(last=False)
                self._slots[key] = slot
                self._write(slot, table)
        return [0 if table is None else self._slots[id(table)] for table in tables]

    def _write(self, slot: int, table: AdapterTable) -> None:
        self.tables[slot] = table  # which keeps its memory while passes may read it
        rows = [(0, 0, 0) if one is None else _place(one) for one in table.layers]
        self.places[:, :, slot].copy_(torch.tensor(rows))


def _place(one: LowRank) -> tuple[int, int, int]:
    assert one.down.is_contiguous()
    assert one.up.is_contiguous()
    return one.down.data_ptr(), one.up.data_ptr(), len(one.down)


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The rows of a pass of fixed size, and the slot of each row's adapter."""

    slots: AdapterSlots
    lora_indices: Tensor  # [rows] int32

    def add(self, number: int, x: Tensor, y: Tensor) -> None:
        """Add to `y` [rows, outputs] what the adapters add to the linear layer of this number with inputs `x`."""
        slots = self.slots
        layer_ops.add_low_rank(y, x, self.lora_indices, slots.places[number], slots.max_rank)

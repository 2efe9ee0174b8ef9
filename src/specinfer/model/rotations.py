"""The tables of rotary embeddings, for native layers."""

import torch
from torch import Tensor, nn

Table = tuple[Tensor, Tensor]  # [positions, rotated] cosines and sines


class Rotations:
    """The tables of a rotary embedding, which grow with the positions that are asked for; empty if there is none."""

    def __init__(self, rotary: nn.Module | None) -> None:
        self._rotary = rotary
        self._tables: dict[tuple[str, ...] | None, Table] = {}

    def table(self, rotation: tuple[str, ...] | None, positions: int) -> Table:
        """Return a rotation's table for at least this many positions; a table too short is replaced by a longer one."""
        table = self._tables.get(rotation)
        if table is None or positions > len(table[0]):
            places = torch.arange(max(2 * positions, 512), device="cpu").unsqueeze(0)
            none = torch.empty(1, places.shape[1], 0)
            if hasattr(self._rotary, "mrope_section"):  # transformers 5.17 does not repeat them for the axes of images
                places = places.expand(3, 1, -1)
            if self._rotary is None or rotation is None:
                cosines, sines = none, none
            else:
                cosines, sines = self._rotary(torch.empty(0), places, *rotation)
            table = self._tables[rotation] = cosines[0].contiguous(), sines[0].contiguous()
        return table

"""DraftColumns: positions and slots of the tokens that a drafter computes in a draft loop, laid out for its passes."""

from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor

from specinfer.engine.device.growth import DraftShape
from specinfer.ops.tree_layout import TreeLayout


@dataclass(frozen=True, slots=True)
class PassLayout:
    """The layout of a pass but for its attention mask; fields are those of `TreeLayout`."""

    prefix_lens: Tensor
    starts: Tensor
    node_slots: Tensor
    node_positions: Tensor
    node_lens: Tensor
    positions: Tensor
    width: int

    def over(self, slot_table: Tensor, visible: Tensor | None) -> TreeLayout:
        """Return the layout with a mask [tokens, words], or None for a chain."""
        return TreeLayout(
            slot_table, self.prefix_lens, self.starts, self.node_slots, self.node_positions, self.node_lens,
            self.positions.unsqueeze(1) if visible is None else visible,  # of a chain, never read
            self.positions, self.width, is_chain=visible is None,
        )  # fmt: skip


class PassInputs(NamedTuple):
    """The inputs of a pass, but for its tokens and mask."""

    layout: PassLayout
    positions: Tensor  # [requests * width] int64
    slots: Tensor  # [requests * width] int64


class DraftColumns:
    """The columns of a draft shape: known tokens, as many of them as a request has, then those of each later pass.

    Args:
        shape: The draft loop of one model.
        num_rows: Number of requests.
    """

    def __init__(self, shape: DraftShape, num_rows: int, device: torch.device) -> None:
        self._widths = (shape.num_known, *map(len, shape.passes))
        self._ends = tuple(accumulate(self._widths))
        stores_drafts = shape.kinds[0].stores_drafts
        seen = self._ends if stores_drafts else [0] * len(self._ends)
        columns = torch.arange(num_rows * self._ends[-1], dtype=torch.int32).view(num_rows, -1)
        in_order = [
            columns[:, end - width : end].flatten() for end, width in zip(self._ends, self._widths, strict=True)
        ]
        depths = [*range(shape.num_known), *chain.from_iterable(shape.passes)]
        with torch.inference_mode(mode=False):
            self._order = torch.cat(in_order).long().to(device)  # of columns, pass by pass instead of row by row
            self._depths = torch.tensor(depths, dtype=torch.int32, device=device)
            # Copies and assistants compute roots alone; how many tokens a copy attends to is not the root's position.
            num_counted = 0 if shape.kinds[0].shares_cache else shape.num_known
            self._is_known = torch.arange(len(depths), device=device) < num_counted
            self._numbers = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
            # Of drafts that are not stored only the output is kept, until the next pass.
            self._in_pass = None if stores_drafts else torch.arange(num_rows * max(self._widths), device=device)
            self._each = torch.tensor([self._widths, seen], dtype=torch.int32, device=device).unsqueeze(2)

    def lay_out(
        self, slots: Tensor, drafts: Tensor, draft_known: Tensor, roots: Tensor, num: Tensor, last: int
    ) -> list[PassInputs]:
        """Return the inputs of each pass.

        Args:
            slots: [requests, columns] int32 reserved for a request.
            drafts: [requests] bool, True if there are drafts for the request.
            draft_known: [requests] int32 tokens that the drafter has computed.
            roots: [requests] int32 positions of the roots.
            num: [1] int32 number of requests.
            last: Highest position.
        """
        slots = torch.where(drafts.unsqueeze(1), slots, -1)
        node_slots, flat_slots = slots.clamp(min=0), slots.flatten()[self._order].long()
        places = torch.where(self._is_known, draft_known.unsqueeze(1), roots.unsqueeze(1)) + self._depths
        places = places.clamp(max=last)
        flat_places = places.flatten()[self._order]
        wide_places = flat_places.long()
        starts = torch.minimum(self._numbers, num) * self._each[0]
        lens = drafts * self._each[1]
        passes, first = list[PassInputs](), 0
        for number, (width, end) in enumerate(zip(self._widths, self._ends, strict=True)):
            part = slice(first, first + len(drafts) * width)
            first = part.stop
            known = draft_known, starts[number], node_slots[:, :end], places[:, :end], lens[number]
            layout = PassLayout(*known, flat_places[part], width)
            own_slots = flat_slots[part] if self._in_pass is None else self._in_pass[: part.stop - part.start]
            passes.append(PassInputs(layout, wide_places[part], own_slots))
        return passes

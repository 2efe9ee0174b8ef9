"""What of a layer is streamed, and where it lies in a buffer: one part after the other.

Straight from the shards, a chunk is some rows of a matrix: they are read, cast if the model computes in another type,
and packed to where the kernels expect them. A chunk of panels needs nothing but its own rows.
"""

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from specinfer.kernels import WIDTH, LinearCall
from specinfer.model.offload.direct import CHUNK, aligned_up, room_for
from specinfer.model.offload.shards import Source
from specinfer.model.offload.stream import Chunk, Room

_APART = 64  # parts begin with a cache line
_HALF = WIDTH // 2  # of a panel that has gates and values


class Part(Protocol):
    """One of a layer's matrices."""

    num_bytes: int  # in the buffer
    widest: int  # inputs or outputs
    sources: Sequence[Source]

    def bind(self, view: Tensor) -> None:
        """Computes with the bytes [num_bytes] from now on."""

    def chunks(self, view: Tensor) -> list[Chunk]:
        """What reads it from the shards."""


class LinearPart:
    """A linear layer on native kernels, of the outputs of one or more matrices.

    Args:
        sources: Of each matrix [outputs, inputs].
        interleaved: 16 outputs of the first and 16 of the second by turns; else one after the other.
    """

    def __init__(self, call: LinearCall, sources: Sequence[Source], *, interleaved: bool = False) -> None:
        self._call, self._interleaved = call, interleaved
        self.sources = sources
        panels = call.panels
        self.widest = max(panels.inputs, panels.outputs)
        self._packed_bytes = panels.packed.nbytes
        self._scales_start = -(-self._packed_bytes // _APART) * _APART
        self.num_bytes = self._packed_bytes
        if panels.scales is not None:
            self.num_bytes = self._scales_start + panels.scales.nbytes

    def bind(self, view: Tensor) -> None:
        panels = self._call.panels
        packed = view[: self._packed_bytes].view(panels.packed.dtype)
        scales = None
        if panels.scales is not None:
            scales = view[self._scales_start :].view(torch.bfloat16).view(panels.scales.shape)
        self._call.bind(packed, scales)

    def chunks(self, view: Tensor) -> list[Chunk]:
        panels = self._call.panels
        assert panels.scales is None, "codes come from a packed copy"
        row_bytes = max(source.num_bytes // source.shape[0] for source in self.sources)
        step = max(CHUNK // row_bytes // WIDTH, 1) * WIDTH
        starts = range(0, panels.outputs, step)
        return [partial(self._pack, view, start, min(start + step, panels.outputs)) for start in starts]

    def _pack(self, view: Tensor, start: int, end: int, room: Room) -> int:
        """Outputs `start` to `end`, whole panels but for the last."""
        panels = self._call.panels
        into = type(panels)(
            view[: self._packed_bytes].view(panels.packed.dtype), None, None, panels.inputs, panels.outputs, panels.type
        )
        first, last = start // WIDTH * panels.bytes_per_panel, -(-end // WIDTH) * panels.bytes_per_panel
        if panels.outputs % WIDTH or panels.inputs * WIDTH * panels.packed.element_size() != panels.bytes_per_panel:
            view[first:last].zero_()  # another layer's numbers may be where this one has none
        num_read = 0
        if self._interleaved:
            for half, source in enumerate(self.sources):
                rows = _rows(source, start // 2, end // 2, panels.packed.dtype, room)
                num_read += (end - start) // 2 * source.num_bytes // source.shape[0]
                for i in range(0, len(rows), _HALF):
                    into.place(start + 2 * i + half * _HALF, rows[i : i + _HALF])
            return num_read
        before = 0
        for source in self.sources:
            low, high = max(start - before, 0), min(end - before, source.shape[0])
            if low < high:
                into.place(before + low, _rows(source, low, high, panels.packed.dtype, room))
                num_read += (high - low) * source.num_bytes // source.shape[0]
            before += source.shape[0]
        return num_read


def _rows(source: Source, first: int, last: int, dtype: torch.dtype, room: Room) -> Tensor:
    """[last - first, ...] of a tensor, in a type; good until the thread reads again."""
    row_bytes = source.num_bytes // source.shape[0]
    size = (last - first) * row_bytes
    staging = room.get("staging", room_for(size))
    skipped = source.file.read(source.offset + first * row_bytes, size, staging)
    found = staging[skipped : skipped + size]
    if skipped % source.dtype.itemsize:
        found = found.clone()
    return found.view(source.dtype).view(last - first, *source.shape[1:]).to(dtype)


class LayerImage:
    """A layer's parts in a buffer, read straight from the shards."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts, self._starts, end = parts, [], 0
        for part in parts:
            self._starts.append(end)
            end += -(-part.num_bytes // _APART) * _APART
        self.num_bytes = aligned_up(end)
        sources = [source for part in parts for source in part.sources]
        self.num_read = sum(source.num_bytes for source in sources)
        self.widest = max(part.widest for part in parts)
        self._files = {id(source.file): source.file for source in sources}.values()

    def chunks(self, buffer: Tensor) -> list[Chunk]:
        return [chunk for part, view in self._views(buffer) for chunk in part.chunks(view)]

    def bind(self, buffer: Tensor) -> None:
        for part, view in self._views(buffer):
            part.bind(view)

    def check(self) -> None:
        for file in self._files:
            file.check()

    def _views(self, buffer: Tensor) -> list[tuple[Part, Tensor]]:
        return [
            (part, buffer[start : start + part.num_bytes])
            for part, start in zip(self._parts, self._starts, strict=True)
        ]

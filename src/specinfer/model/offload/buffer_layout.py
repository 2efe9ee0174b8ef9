"""The layout of a streamed layer in a buffer, one entry after the other, and reading it from the shards.

When a layer is read straight from the shards, a chunk is some rows of a matrix. They are read, cast if the model
computes in another type, and packed to where the kernels expect them. A chunk of panels needs only its own rows.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from specinfer.model.offload.direct import CHUNK, Scratch, aligned_up
from specinfer.model.offload.shards import Source
from specinfer.model.offload.streamed_layer import Chunk
from specinfer.ops import WIDTH, LinearCall

_APART = 64  # entries begin at a cache line
_HALF = WIDTH // 2  # of a panel with gates and values


class LayoutEntry(Protocol):
    """One of a layer's tensors, or a linear layer on native kernels."""

    num_bytes: int  # in the buffer
    widest: int  # inputs or outputs
    sources: Sequence[Source] | None  # None if it is made of more than their rows

    def tensors(self) -> list[Tensor]:
        """Return the entry's tensors in the buffer; they are on the meta device until the entry is bound."""

    def bind(self, view: Tensor) -> None:
        """Make the entry compute with the bytes [num_bytes] from now on."""

    def chunks(self, view: Tensor) -> list[Chunk]:
        """Return the work that reads the entry from the shards."""


class LinearEntry:
    """A linear layer on native kernels, with the outputs of one or more matrices.

    Args:
        calls: Its calls, more than one for weights of several types or for experts, which come from a packed copy.
        sources: Source of each matrix [outputs, inputs], or None if it comes from a packed copy.
        interleaved: Whether blocks of 16 outputs of the first and of the second matrix alternate. Otherwise the
            matrices follow one another.
    """

    def __init__(
        self, calls: Sequence[LinearCall], sources: Sequence[Source] | None, *, interleaved: bool = False
    ) -> None:
        self._calls, self._interleaved = calls, interleaved
        self.sources = sources
        self.widest = max(size for call in calls for size in (call.panels.inputs, call.panels.outputs))
        self.num_bytes = sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> list[Tensor]:
        each = [tensor for call in self._calls for tensor in (call.panels.packed, call.panels.scales)]
        return [tensor for tensor in each if tensor is not None]

    def bind(self, view: Tensor) -> None:
        sizes = [tensor.nbytes for tensor in self.tensors()]
        parts = iter(view[: sum(sizes)].split(sizes))
        for call in self._calls:
            packed, scales = call.panels.packed, call.panels.scales
            stored = next(parts).view(packed.dtype)
            call.bind(stored, None if scales is None else next(parts).view(scales.dtype).view(scales.shape))

    def chunks(self, view: Tensor) -> list[Chunk]:
        panels = self._calls[0].panels
        assert self.sources is not None
        assert panels.scales is None, "codes come from a packed copy"
        row_bytes = max(source.num_bytes // source.shape[0] for source in self.sources)
        step = max(CHUNK // row_bytes // WIDTH, 1) * WIDTH
        starts = range(0, panels.outputs, step)
        return [partial(self._pack, view, start, min(start + step, panels.outputs)) for start in starts]

    def _pack(self, view: Tensor, start: int, end: int, scratch: Scratch) -> int:
        """Pack outputs `start` to `end`, which are whole panels except the last, and return the bytes read."""
        assert self.sources is not None
        panels = self._calls[0].panels
        into = type(panels)(view.view(panels.packed.dtype), None, None, panels.inputs, panels.outputs, panels.type)
        first, last = start // WIDTH * panels.bytes_per_panel, -(-end // WIDTH) * panels.bytes_per_panel
        if panels.outputs % WIDTH or panels.inputs * WIDTH * panels.packed.element_size() != panels.bytes_per_panel:
            view[first:last].zero_()  # numbers of another layer may be where this one has none
        num_read = 0
        if self._interleaved:
            for half, source in enumerate(self.sources):
                rows = _rows(source, start // 2, end // 2, panels.packed.dtype, scratch)
                num_read += (end - start) // 2 * source.num_bytes // source.shape[0]
                for i in range(0, len(rows), _HALF):
                    into.place(start + 2 * i + half * _HALF, rows[i : i + _HALF])
            return num_read
        before = 0
        for source in self.sources:
            low, high = max(start - before, 0), min(end - before, source.shape[0])
            if low < high:
                into.place(before + low, _rows(source, low, high, panels.packed.dtype, scratch))
                num_read += (high - low) * source.num_bytes // source.shape[0]
            before += source.shape[0]
        return num_read


class TensorEntry:
    """A module's parameter or buffer, unchanged."""

    def __init__(self, module: nn.Module, name: str, tensor: Tensor, sources: Sequence[Source] | None) -> None:
        self._module, self._name, self._tensor = module, name, tensor
        self.sources = sources
        self.num_bytes, self.widest = tensor.nbytes, max(tensor.shape, default=1)

    def tensors(self) -> list[Tensor]:
        return [self._tensor]

    def bind(self, view: Tensor) -> None:
        set_tensor(self._module, self._name, self._in(view))

    def chunks(self, view: Tensor) -> list[Chunk]:
        assert self.sources is not None
        (source,) = self.sources
        step = max(CHUNK * source.shape[0] // source.num_bytes, 1)
        starts = range(0, source.shape[0], step)
        return [partial(self._copy, view, start, min(start + step, source.shape[0])) for start in starts]

    def _copy(self, view: Tensor, start: int, end: int, scratch: Scratch) -> int:
        assert self.sources is not None
        (source,) = self.sources
        self._in(view)[start:end] = _rows(source, start, end, self._tensor.dtype, scratch)
        return (end - start) * source.num_bytes // source.shape[0]

    def _in(self, view: Tensor) -> Tensor:
        return view.view(self._tensor.dtype).view(self._tensor.shape)


def set_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Set a module's parameter or buffer."""
    if name in module._buffers:
        module._buffers[name] = tensor
    else:
        whole = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)
        module._parameters[name] = whole


def _rows(source: Source, first: int, last: int, dtype: torch.dtype, scratch: Scratch) -> Tensor:
    """Return [last - first, ...] rows of a tensor in type `dtype`; valid until the thread's next read."""
    row_bytes = source.num_bytes // source.shape[0]
    found = source.file.read_bytes(source.offset + first * row_bytes, (last - first) * row_bytes, scratch)
    if found.storage_offset() % source.dtype.itemsize:
        found = found.clone()
    found = found.view(source.dtype)
    if source.columns is not None:
        columns = slice(source.columns.start, source.columns.stop)
        return found.view(last - first, -1)[:, columns].to(dtype).contiguous()
    return found.view(last - first, *source.shape[1:]).to(dtype)


class BufferLayout:
    """A layer's entries in a buffer, read straight from the shards."""

    def __init__(self, entries: Sequence[LayoutEntry]) -> None:
        self._entries, self._starts, end = entries, [], 0
        for entry in entries:
            self._starts.append(end)
            end += -(-entry.num_bytes // _APART) * _APART
        self.num_bytes = aligned_up(end)
        sources = [source for entry in entries for source in entry.sources or ()]
        self.num_read = sum(source.num_bytes for source in sources)
        self.widest = max(entry.widest for entry in entries)
        self._files = {id(source.file): source.file for source in sources}.values()

    def chunks(self, buffer: Tensor) -> list[Chunk]:
        return [chunk for entry, view in self._views(buffer) for chunk in entry.chunks(view)]

    def bind(self, buffer: Tensor) -> None:
        for entry, view in self._views(buffer):
            entry.bind(view)

    def check(self) -> None:
        for file in self._files:
            file.check()

    def write(self, buffer: Tensor, entries: Sequence[LayoutEntry]) -> None:
        """Fill a buffer from the same entries with their weights."""
        for entry, (_, view) in zip(entries, self._views(buffer), strict=True):
            done = 0
            for tensor in entry.tensors():
                view[done : done + tensor.nbytes] = tensor.contiguous().flatten().view(torch.uint8)
                done += tensor.nbytes

    def _views(self, buffer: Tensor) -> list[tuple[LayoutEntry, Tensor]]:
        return [
            (entry, buffer[start : start + entry.num_bytes])
            for entry, start in zip(self._entries, self._starts, strict=True)
        ]


class ConvertedLayer:
    """A layer that is made when it is read: quantized, or built from several tensors.

    Args:
        names: Names of its entries, in the layout's order.
        real: Returns its entries with their weights by name, and possibly others.
    """

    _alone = threading.Lock()  # one thread makes a model at a time, to limit the weights in memory

    def __init__(
        self, layout: BufferLayout, names: Sequence[str], real: Callable[[], Mapping[str, LayoutEntry]]
    ) -> None:
        self._layout, self._names, self._real = layout, names, real
        self.num_bytes = self.num_read = layout.num_bytes
        self.widest = layout.widest

    def chunks(self, buffer: Tensor) -> list[Chunk]:
        return [partial(self._make, buffer)]

    def _make(self, buffer: Tensor, _scratch: Scratch) -> int:
        with self._alone:
            entries = self._real()
            self._layout.write(buffer, [entries[name] for name in self._names])
        return self.num_read

    def bind(self, buffer: Tensor) -> None:
        self._layout.bind(buffer)

    def check(self) -> None:
        self._layout.check()

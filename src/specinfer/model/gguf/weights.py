"""A GGUF file's tensors as a model's weights, dequantized a few rows at a time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from specinfer.model.gguf import blocks
from specinfer.model.gguf.header import TensorPlace
from specinfer.ops import QuantizedWeight, each_alone

_AT_ONCE = 2**20  # numbers that a thread decodes at a time, with some tens of MB in float32
_MOST_AT_ONCE = 4 * _AT_ONCE  # of all threads: budgets of memory allow for little more


@dataclass(frozen=True, slots=True)
class Weight:
    """The weight that a tensor of the file becomes.

    Attributes:
        name: Name of the model's parameter.
        heads: Number of heads of a matrix whose rows llama.cpp reorders, or 0 for other weights.
        less: Number subtracted from the stored values.
        expert: Index of the expert among `num_experts` in the tensor, or None for a tensor of its own.
        stored: Shape in the file where its sizes are others than those of `shape`, but for sizes of 1.
        order: Function of the stored rows that returns those of the weight in its order, or None.
        inputs: Ranges of stored inputs in the order of the weight's inputs, or none if they are stored in order.
        is_log: Whether the file has minus the exponentials of the numbers.
    """

    name: str
    shape: tuple[int, ...]
    heads: int = 0
    less: float = 0.0
    expert: int | None = None
    num_experts: int = 1
    stored: tuple[int, ...] | None = None
    order: Callable[[Tensor], Tensor] | None = None
    inputs: tuple[range, ...] = ()
    is_log: bool = False

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor in the file, up to sizes of 1."""
        shape = self.stored or self.shape
        return shape if self.expert is None else (self.num_experts, *shape)


def read_tensor(place: TensorPlace, dtype: torch.dtype, less: float = 0.0) -> Tensor:
    """Decode a tensor of a file; `less` is subtracted before rounding to `dtype`."""
    rows, columns = int(np.prod(place.shape[:-1])), place.shape[-1]
    data = np.memmap(place.file, mode="r", offset=place.offset, shape=(rows, place.num_bytes // rows))
    with torch.inference_mode(mode=False):  # which other threads are not in
        result = torch.empty((rows, columns), dtype=dtype)
    step = max(min(_AT_ONCE, _MOST_AT_ONCE // torch.get_num_threads()) // columns, 1)

    def decode(start: int) -> None:
        # Plain numbers are decoded as blocks of one number. The copy makes the memory writable.
        with np.errstate(invalid="ignore"):  # NaN is refused later, by the name of the weight
            decoded = _decode(np.array(data[start : start + step]), place.kind) * np.float32(place.factor)
        result[start : start + step] = torch.from_numpy(decoded) - less if less else torch.from_numpy(decoded)

    each_alone(decode, range(0, rows, step))
    return result.view(place.shape)


def _decode(rows: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    with np.errstate(invalid="ignore", over="ignore"):  # values that are not finite are refused by name after loading
        found: np.ndarray = dequantize(rows, kind)
    return found


def _in_halves(rows: Tensor, heads: int) -> Tensor:
    """Return rows as transformers rotates them: those half a head apart together, in llama.cpp neighbouring ones."""
    return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def in_pairs(rows: Tensor, heads: int) -> Tensor:
    """Return rows in the order of llama.cpp's converter; undoes `_in_halves`."""
    return rows.view(heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


@dataclass(frozen=True, slots=True)
class GgufSource:
    """A weight in a GGUF file.

    Attributes:
        num_bytes: Bytes that it takes once it is read.
    """

    place: TensorPlace
    weight: Weight
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def read(self) -> Tensor:
        """Read the whole weight, with rows and inputs in the model's order."""
        weight = self.weight
        if weight.is_log:
            tensor = read_tensor(self.place, torch.float32).neg_().log_().to(self.dtype)
        else:
            tensor = read_tensor(self.place, self.dtype, weight.less)
        if weight.stored is not None:
            tensor = tensor.view(weight.stored)
        tensor = self._in_order(tensor)
        if weight.inputs:
            tensor = torch.cat([tensor[:, part.start : part.stop] for part in weight.inputs], dim=1)
        return tensor.reshape(weight.shape)

    def _in_order(self, rows: Tensor) -> Tensor:
        if self.weight.order is not None:
            return self.weight.order(rows)
        return _in_halves(rows, self.weight.heads) if self.weight.heads else rows

    @property
    def has_codes(self) -> bool:
        """True if the weight is a matrix whose codes our kernels take as they are."""
        return len(self.shape) == len(self.place.shape) == 2 and blocks.has_codes(self.place.kind)

    def outline(self) -> tuple[str, QuantizedWeight]:
        """Return what `codes` does, on the meta device."""
        row = torch.zeros((1, self.place.num_bytes // self.place.shape[0]), dtype=torch.uint8)
        kind, weight = self._coded(row)
        return kind, weight.outline(self.shape[0])

    def codes(self) -> tuple[str, QuantizedWeight]:
        """Read the whole weight as it is stored, with rows in the model's order; return its type's name, too."""
        place = self.place
        data = torch.from_numpy(np.fromfile(place.file, np.uint8, place.num_bytes, offset=place.offset))
        kind, weight = self._coded(data.view(place.shape[0], -1))
        is_reordered = self.weight.heads or self.weight.order is not None
        return kind, weight.reordered(self._in_order) if is_reordered else weight

    def _coded(self, rows: Tensor) -> tuple[str, QuantizedWeight]:
        weight = blocks.weight_of(rows, self.place.kind)
        if self.place.factor != 1:
            weight = replace(weight, scales=weight.scales * self.place.factor)
        return self.place.kind.name, weight.with_inputs(self.weight.inputs) if self.weight.inputs else weight


@dataclass(frozen=True, slots=True)
class JoinedSource:
    """Tensors of a file that are the rows of one weight.

    Attributes:
        pieces: Sources of rows [out, in], one after the other, or of rows of each head [heads, out, in], which follow
            one another head by head.
    """

    pieces: Sequence[GgufSource]

    @property
    def shape(self) -> tuple[int, int]:
        *heads, _rows, inputs = self.pieces[0].shape
        return prod(heads) * sum(piece.shape[-2] for piece in self.pieces), inputs

    @property
    def dtype(self) -> torch.dtype:
        return self.pieces[0].dtype

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces)

    def read(self) -> Tensor:
        """Read and decode the whole weight."""
        return torch.cat([piece.read() for piece in self.pieces], dim=-2).view(self.shape)

    @property
    def has_codes(self) -> bool:
        """True if our kernels take the codes of all pieces as they are, and all are of one type."""
        return all(piece.has_codes for piece in self.pieces) and len({one.place.kind for one in self.pieces}) == 1

    def outline(self) -> tuple[str, QuantizedWeight]:
        """Return what `codes` does, on the meta device."""
        return _joined([piece.outline() for piece in self.pieces])

    def codes(self) -> tuple[str, QuantizedWeight]:
        """Read the whole weight as it is stored, and return its type's name, too."""
        return _joined([piece.codes() for piece in self.pieces])


def _joined(stored: Sequence[tuple[str, QuantizedWeight]]) -> tuple[str, QuantizedWeight]:
    return stored[0][0], QuantizedWeight.joined([weight for _, weight in stored])

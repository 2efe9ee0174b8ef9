"""A GGUF file's tensors as a model's weights, dequantized a few rows at a time."""

from dataclasses import dataclass

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from specinfer.kernels import QuantizedWeight
from specinfer.model.cut import Cut
from specinfer.model.gguf import blocks
from specinfer.model.gguf.header import TensorPlace

_AT_ONCE = 2**20  # numbers decoded at a time, with some tens of MB in float32


@dataclass(frozen=True, slots=True)
class Weight:
    """The weight that a tensor of the file becomes.

    Attributes:
        name: Name of the model's parameter.
        heads: Number of heads of a matrix whose rows llama.cpp reorders, or 0 for other weights.
        less: Number subtracted from the stored values.
        expert: Index of the expert among `num_experts` in the tensor, or None for a tensor of its own.
    """

    name: str
    shape: tuple[int, ...]
    heads: int = 0
    less: float = 0.0
    expert: int | None = None
    num_experts: int = 1


def read_tensor(place: TensorPlace, dtype: torch.dtype, less: float = 0.0) -> Tensor:
    """Decode a tensor of a file; `less` is subtracted before rounding to `dtype`."""
    rows, columns = int(np.prod(place.shape[:-1])), place.shape[-1]
    data = np.memmap(place.file, mode="r", offset=place.offset, shape=(rows, place.num_bytes // rows))
    result = torch.empty((rows, columns), dtype=dtype)
    step = max(_AT_ONCE // columns, 1)
    for start in range(0, rows, step):
        # Plain numbers are decoded as blocks of one number. The copy makes the memory writable.
        decoded = _decode(np.array(data[start : start + step]), place.kind)
        result[start : start + step] = torch.from_numpy(decoded) - less if less else torch.from_numpy(decoded)
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
        """Read the whole weight, with rows in the model's order."""
        tensor = read_tensor(self.place, self.dtype, self.weight.less)
        return _in_halves(tensor, self.weight.heads) if self.weight.heads else tensor

    @property
    def has_codes(self) -> bool:
        """True if the weight is a matrix whose codes our kernels take as they are."""
        return len(self.shape) == 2 and blocks.has_codes(self.place.kind)

    def outline(self) -> tuple[str, QuantizedWeight]:
        """Return what `codes` does, on the meta device."""
        row = torch.zeros((1, self.place.num_bytes // self.shape[0]), dtype=torch.uint8)
        return self.place.kind.name, blocks.weight_of(row, self.place.kind).outline(self.shape[0])

    def codes(self) -> tuple[str, QuantizedWeight]:
        """Read the whole weight as it is stored, with rows in the model's order; return its type's name, too."""
        place, heads = self.place, self.weight.heads
        shape = (self.shape[0], place.num_bytes // self.shape[0])
        data = torch.from_numpy(np.fromfile(place.file, np.uint8, place.num_bytes, offset=place.offset))
        weight = blocks.weight_of(data.view(shape), place.kind)
        return place.kind.name, weight.reordered(lambda rows: _in_halves(rows, heads)) if heads else weight

    def read_part(self, cut: Cut) -> Tensor:
        """Read a part of the weight."""
        return cut.of(self.read())

    def parts(self, cut: Cut | None) -> None:
        """Return None: no part is stored in the file in the form used for computing, see `Source.parts`."""

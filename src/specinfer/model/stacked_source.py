"""StackedSource: matrices of experts, each stored for itself, as the one weight that definitions have them in."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specinfer.kernels import QuantizedWeight
from specinfer.model.cut import Cut


@dataclass(frozen=True, slots=True)
class StackedSource:
    """The matrices of all experts, or their biases, as one weight.

    Attributes:
        experts: Of each expert the sources of one matrix [out, in] or of several.
        is_transposed: Whether the weight is [experts, in, out] and the outputs of several matrices alternate, as in
            gpt-oss. Otherwise it is [experts, out, in] and they follow one another.
    """

    experts: Sequence[Sequence[Any]]
    is_transposed: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        outputs, *inputs = self.experts[0][0].shape
        whole = outputs * len(self.experts[0])
        return (len(self.experts), *inputs, whole) if self.is_transposed else (len(self.experts), whole, *inputs)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.experts[0][0].dtype
        return dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def read(self) -> Tensor:
        """Read and decode the whole weight, an expert at a time."""
        result = torch.empty(self.shape, dtype=self.dtype)
        for expert, sources in zip(result, self.experts, strict=True):
            found = self._join([source.read() for source in sources])
            expert.copy_(found.T if found.ndim > 1 and self.is_transposed else found)
        return result

    def read_part(self, cut: Cut) -> Tensor:
        """Read a part of the weight."""
        return cut.of(self.read())

    def parts(self, cut: Cut | None) -> None:
        """Return None: no part is stored in the form used for computing, see `Source.parts`."""

    @property
    def has_codes(self) -> bool:
        """True if our kernels take the codes of each expert's matrix as they are; all experts are stored alike."""
        first = self.experts[0]
        return all(one.has_codes for one in first) and len({one.outline()[1].format for one in first}) == 1

    def codes(self, expert: int = 0) -> tuple[str, QuantizedWeight]:
        """Read an expert's matrix [out, in] as it is stored, and return its type's name, too."""
        return self._joined([source.codes() for source in self.experts[expert]])

    def outline(self) -> tuple[str, QuantizedWeight]:
        """Return what `codes` does, on the meta device."""
        return self._joined([source.outline() for source in self.experts[0]])

    def _joined(self, stored: Sequence[tuple[str, QuantizedWeight]]) -> tuple[str, QuantizedWeight]:
        return stored[0][0], QuantizedWeight.joined([weight for _, weight in stored], self._join)

    @property
    def _join(self) -> Callable[[list[Tensor]], Tensor]:
        return _alternating if self.is_transposed else torch.cat


def _alternating(tensors: Sequence[Tensor]) -> Tensor:
    """Return the first rows of all tensors, then the second ones, and so on."""
    return torch.stack(list(tensors), dim=1).flatten(0, 1)

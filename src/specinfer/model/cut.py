"""The slice of a tensor that belongs to one rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Cut:
    """Ranges of one dimension of a tensor, which are concatenated.

    Attributes:
        dim: Index of the dimension, not negative.
        ranges: Half-open ranges with steps of 1.
    """

    dim: int
    ranges: tuple[range, ...]

    @property
    def size(self) -> int:
        """Size of the dimension after the cut."""
        return sum(map(len, self.ranges))

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the part of a tensor of shape `whole`."""
        return (*whole[: self.dim], self.size, *whole[self.dim + 1 :])

    def of(self, tensor: Tensor) -> Tensor:
        """Return the part of the tensor, in memory of its own."""
        return torch.cat([tensor.narrow(self.dim, one.start, len(one)) for one in self.ranges], dim=self.dim)


class LinearCut(NamedTuple):
    """The slice of a linear layer's weight [out, in] that belongs to one rank.

    Attributes:
        size: Size of the dimension before the cut.
    """

    cut: Cut
    size: int

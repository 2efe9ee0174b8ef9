"""The part of a tensor that a rank holds."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Cut:
    """Some ranges of one dimension, one after the other.

    Attributes:
        dim: Counted from the first.
        ranges: Half-open, with steps of 1.
    """

    dim: int
    ranges: tuple[range, ...]

    @property
    def size(self) -> int:
        """Of the dimension, afterwards."""
        return sum(map(len, self.ranges))

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Of the part of a tensor of that shape."""
        return (*whole[: self.dim], self.size, *whole[self.dim + 1 :])

    def of(self, tensor: Tensor) -> Tensor:
        """The part, with memory of its own."""
        return torch.cat([tensor.narrow(self.dim, one.start, len(one)) for one in self.ranges], dim=self.dim)

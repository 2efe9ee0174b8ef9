"""Meta weights for weights that were not read: a shape, a type, and the name of the checkpoint's tensor.

transformers loads meta weights as it loads weights, and so shows what a family's definition makes of a checkpoint. A
weight that was only renamed or cast is still known by name afterwards. One that was built from several tensors is not.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Operations that keep the numbers, at most in another type.
_KEEPING = {Tensor.to, Tensor.detach, Tensor.requires_grad_, Tensor.contiguous, Tensor.__getitem__}


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

    def taken_from(self, tensor: Tensor) -> Tensor:
        """Return the part of the tensor, in memory of its own."""
        return torch.cat([tensor.narrow(self.dim, one.start, len(one)) for one in self.ranges], dim=self.dim)


class LinearCut(NamedTuple):
    """The slice of a linear layer's weight [out, in] that belongs to one rank.

    Attributes:
        size: Size of the dimension before the cut.
    """

    cut: Cut
    size: int


class MetaWeight(Tensor):
    """A tensor without data, which stays on the meta device whatever device it is moved to."""

    source: str | None  # name in the checkpoint, or None if it is no longer a single tensor of it
    cut: Cut | None  # part of that tensor, or None for all of it

    @staticmethod
    def from_source(
        source: str | None, shape: tuple[int, ...], dtype: torch.dtype, cut: Cut | None = None
    ) -> "MetaWeight":
        found = torch.empty(shape, dtype=dtype, device="meta").as_subclass(MetaWeight)
        found.source, found.cut = source, cut
        return found

    def part(self, cut: Cut) -> "MetaWeight":
        """Return a meta weight for a part of a whole tensor."""
        origin = origin_of(self)
        assert origin is None or origin[1] is None
        return MetaWeight.from_source(None if origin is None else origin[0], cut.shape(self.shape), self.dtype, cut)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.to:
            given = [*args[1:], *(kwargs or {}).values()]
            dtypes = [one.dtype if isinstance(one, Tensor) else one for one in given]
            dtype = next((one for one in dtypes if isinstance(one, torch.dtype)), None)
            if dtype is None or dtype == args[0].dtype:
                return args[0]
            args, kwargs = (args[0], dtype), {}
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if isinstance(result, MetaWeight) and func in _KEEPING:
            first = args[0]
            keeps = isinstance(first, MetaWeight) and first.shape == result.shape
            result.source = getattr(first, "source", None) if keeps else None
            result.cut = getattr(first, "cut", None) if keeps else None
        return result


def origin_of(tensor: Tensor) -> tuple[str, Cut | None] | None:
    """Return the checkpoint's tensor that a meta weight represents, and the slice of it (None for all), or None."""
    source: str | None = getattr(tensor, "source", None)
    return None if source is None else (source, getattr(tensor, "cut", None))

"""Sums over ranks within a captured pass: a graph ends before each, and another begins after it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from specinfer.parallel.group import Group


class RankSums:
    """The sums of one model's passes over the ranks of a group.

    Sums are not part of graphs: they may go through the host, and end when a rank is gone. What is summed is copied to
    a buffer whose address does not change.

    Args:
        copies: Whether results are copied from the buffer; otherwise each must be used before the next sum.
    """

    def __init__(self, group: Group, *, copies: bool = False) -> None:
        self.group, self._copies = group, copies
        self._buffer: Tensor | None = None  # bytes of the largest sum; graphs keep earlier ones
        self._between: Callable[[Tensor], None] | None = None

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over all ranks, or do what `instead_of_sums` asks for in its place."""
        if self._between is None:
            return self.group.all_reduce(tensor)
        own = self._part(tensor)
        own.copy_(tensor)
        self._between(own)
        return own.clone() if self._copies else own

    def _part(self, like: Tensor) -> Tensor:
        """Return a tensor of this type and shape in the buffer, which grows before a capture, when programs run."""
        if self._buffer is None or len(self._buffer) < like.nbytes:
            with torch.inference_mode(mode=False):
                self._buffer = torch.empty(like.nbytes, dtype=torch.uint8, device=like.device)
        return self._buffer[: like.nbytes].view(like.dtype).view(like.shape)

    def complete(self, own: Tensor) -> None:
        """Do the same in place with a part of the buffer that a graph has written."""
        if self._between is None:
            own.copy_(self.group.all_reduce(own))
        else:
            self._between(own)


@contextmanager
def instead_of_sums(sums: RankSums | None, between: Callable[[Tensor], None] = lambda _: None) -> Iterator[None]:
    """Call `between` with what would be summed, a part of the buffer, within the context; no rank waits for another.

    Args:
        sums: The sums, or None if there are none.
    """
    if sums is None:
        yield
        return
    before, sums._between = sums._between, between
    try:
        yield
    finally:
        sums._between = before

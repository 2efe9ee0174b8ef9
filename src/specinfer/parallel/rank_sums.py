"""Sums over ranks amid a captured pass: a graph ends before each, and another begins after it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from specinfer.parallel.group import Group


class RankSums:
    """The sums of one model's passes over the ranks of a group.

    Sums are not part of graphs: they may go through the host, and end when a rank is gone. What is summed is copied to
    a buffer, so a result must be used before the next sum.

    Attributes:
        buffer: [tokens, width], or None where nothing is captured.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.buffer: Tensor | None = None
        self._between: Callable[[Tensor], None] | None = None

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over all ranks, or do what `instead_of_sums` asks for in its place."""
        if self._between is None:
            return self.group.all_reduce(tensor)
        assert self.buffer is not None
        own = self.buffer[: len(tensor)]
        own.copy_(tensor)
        self._between(own)
        return own

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

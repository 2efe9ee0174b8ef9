"""Groups of ranks and their collective operations, independent of the transport."""

from typing import Protocol

from torch import Tensor


class Group(Protocol):
    """Interface of ranks that compute together. All of them call the same methods in the same order."""

    @property
    def rank(self) -> int:
        """Number of this process in the group."""
        ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over all ranks, added in the order of ranks: the same bits everywhere, whatever the batch."""
        ...

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return each rank's tensor, in the order of ranks; all have the same shape."""
        ...

    def send(self, tensor: Tensor, to: int) -> None:
        """Start sending a tensor and return before it has arrived; it must not be changed any more."""
        ...

    def recv(self, tensor: Tensor, source: int) -> None:
        """Receive the next tensor that `source` sends into this one."""
        ...


class Alone:
    """The group of one process."""

    rank, size = 0, 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor]

    def send(self, tensor: Tensor, to: int) -> None:
        raise AssertionError("a group of one sends nothing")

    def recv(self, tensor: Tensor, source: int) -> None:
        raise AssertionError("a group of one sends nothing")

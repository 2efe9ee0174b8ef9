"""Groups of ranks, and what they do together. Who carries the bytes is not known here."""

from typing import Protocol

from torch import Tensor


class Group(Protocol):
    """Ranks that compute together. All of them call the same methods in the same order."""

    @property
    def rank(self) -> int:
        """Of this process, within the group."""
        ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, added in the order of ranks: the same bits everywhere, whatever else is in a pass."""
        ...

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Each rank's tensor, in the order of ranks; all have the same shape."""
        ...

    def send(self, tensor: Tensor, to: int) -> None:
        """Returns before it has arrived; the tensor must not be changed any more."""
        ...

    def recv(self, tensor: Tensor, source: int) -> None:
        """Fills the tensor with the next one that `source` sends."""
        ...


class Alone:
    """The group of one process."""

    rank, size = 0, 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor]

    def send(self, tensor: Tensor, to: int) -> None:
        raise AssertionError("there is nobody else")

    def recv(self, tensor: Tensor, source: int) -> None:
        raise AssertionError("there is nobody else")

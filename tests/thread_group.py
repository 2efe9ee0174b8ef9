"""Ranks as threads of one process: a `Group` without sockets, and models loaded by all of them."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from torch import Tensor

from specinfer.parallel.group import Alone
from specinfer.parallel.share import Share

_PATIENCE = 60  # seconds, after which a rank that waits for others gives up

Result = TypeVar("Result")


class _Meeting:
    """Where the ranks of a group lay down their tensors."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.tensors: list[Tensor | None] = [None] * size
        self.barrier = threading.Barrier(size)


class ThreadGroup:
    """One rank's view of it."""

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self._meeting = meeting
        self.rank, self.size = rank, meeting.size
        self.num_sums = 0

    @classmethod
    def make(cls, size: int) -> "list[ThreadGroup | Alone]":
        meeting = _Meeting(size)
        return [cls(meeting, rank) for rank in range(size)] if size > 1 else [Alone()]

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        meeting = self._meeting
        meeting.tensors[self.rank] = tensor.clone()
        meeting.barrier.wait(_PATIENCE)
        found = [one for one in meeting.tensors if one is not None]
        meeting.barrier.wait(_PATIENCE)
        assert all(one.shape == tensor.shape and one.dtype == tensor.dtype for one in found)
        return found

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.num_sums += 1
        first, *others = self.all_gather(tensor)
        total = first.clone()
        for one in others:
            total += one
        return total

    def send(self, tensor: Tensor, to: int) -> None:
        raise AssertionError("hidden states go from hand to hand here")

    def recv(self, tensor: Tensor, source: int) -> None:
        raise AssertionError("hidden states go from hand to hand here")

    def abort(self) -> None:
        """Lets nobody wait for this rank any more."""
        self._meeting.barrier.abort()


def make_shares(tensor: int, stages: int) -> list[list[Share]]:
    """Of each stage, from the first, the shares of its ranks."""
    return [[Share(group, stage, stages) for group in ThreadGroup.make(tensor)] for stage in range(stages)]


def at_once(work: Callable[[Any], Result], items: Sequence[Any]) -> list[Result]:
    """One thread for each item, all at the same time; the first error is raised."""
    if len(items) == 1:
        return [work(items[0])]
    with ThreadPoolExecutor(len(items)) as pool:
        futures = [pool.submit(work, item) for item in items]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]

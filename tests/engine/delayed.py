"""A target runner that has several passes in flight, as a pipeline of stages does, in one process."""

import weakref
from collections.abc import Callable, Sequence

from torch import Tensor

from specinfer.model.batch import Piece
from specinfer.model.runner import ModelRunner


class Delayed(ModelRunner):
    """Computes a pass only when it, or a later one, is waited for; in the order they were begun in.

    No pass may read slots that an unfinished one writes to, or write to any that it uses; unless that one was
    forgotten, since each stage computes it before any later one nevertheless.

    Args:
        inner: Whose model and cache are used.
        fault: Told the number of each pass that is waited for; what it returns is raised instead of a result.

    Attributes:
        numbers_in_flight: How many passes were in flight when each one had begun.
        log: What happened, in order.
        ending: Slots that the pass writes to which was waited for last.
    """

    def __init__(
        self, inner: ModelRunner, max_in_flight: int, fault: Callable[[int], BaseException | None] = lambda _: None
    ) -> None:
        self.loaded, self.cache, self.tensors, self.capacity = inner.loaded, inner.cache, inner.tensors, inner.capacity
        self.graphs, self.padded, self.num_replaced = inner.graphs, inner.padded, inner.num_replaced
        self.max_in_flight = max_in_flight
        self.fault = fault
        self.numbers_in_flight: list[int] = []
        self.log: list[str] = []
        self.ending: set[int] = set()
        self._queue: list[_Queued] = []

    def begin(self, pieces: Sequence[Piece]) -> "_Begun":
        new = _Queued(len(self.numbers_in_flight), pieces)
        unfinished = [one for one in self._queue if one.begun() is not None]
        for other in unfinished:
            assert not new.written & (other.written | other.read), "slots of a pass in flight were given away"
            assert not new.read & other.written, "a pass reads what is not yet written"
        assert len(unfinished) < self.max_in_flight
        self.numbers_in_flight.append(len(unfinished) + 1)
        self.log.append(f"begin {new.number}")
        begun = _Begun(self, new.number)
        new.begun = weakref.ref(begun)
        self._queue.append(new)
        return begun

    def forward(self, pieces: Sequence[Piece]) -> Tensor:
        return self.begin(pieces).wait()

    def end(self, number: int) -> Tensor:
        """Those before it were forgotten."""
        self._check()
        self.log.append(f"end {number}")
        while self._queue[0].number != number:
            assert self._queue[0].begun() is None, "passes must end in the order they began in"
            self.compute(self._queue.pop(0).pieces)
        ending = self._queue.pop(0)
        self.ending = ending.written
        if (error := self.fault(number)) is not None:
            raise error
        return self.compute(ending.pieces)

    def compute(self, pieces: Sequence[Piece]) -> Tensor:
        return super().forward(pieces)

    def _check(self) -> None:
        """Slots in use are not free, and the cache is balanced."""
        free = set(self.cache._free[: self.cache.num_free].tolist())
        assert not any(free & (one.written | one.read) for one in self._queue if one.begun() is not None)
        assert self.cache.is_balanced()


class _Queued:
    """A pass that is not computed yet."""

    def __init__(self, number: int, pieces: Sequence[Piece]) -> None:
        self.number, self.pieces = number, list(pieces)
        self.written = {slot for piece in pieces for slot in piece.slots.tolist()}
        self.read = {slot for piece in pieces for slot in piece.prefix_slots.tolist()}
        self.begun: Callable[[], _Begun | None] = lambda: None


class _Begun:
    """What the engine has of a pass."""

    def __init__(self, runner: Delayed, number: int) -> None:
        self._runner, self._number = runner, number

    def wait(self) -> Tensor:
        return self._runner.end(self._number)

"""What passes cost whose weights are read for each: as long as reading takes, or computing where that takes longer.

A pass says both, wherever the bend between them lies: how long it did not wait for weights is what its rows cost, and
how long it took, if it waited, is what reading costs. So the bend is known from passes on either side of it, and a
disk that is slow for a while does not move the price of a row.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
# One row, and where passes of common machines begin to bend.
SIZES = (1, 128, 256)
MOST_ROWS = 512  # of a pass that tells what rows cost: longer ones are prompts, and cost more a row than trees
_MOST_SECONDS = 30.0  # after which no further size is measured
_WAITS = 0.1  # share of a pass that must have been waiting for its time to be that of reading
_KEPT = 0.95  # of the weight of what was seen, after another pass
_RATE, _FAST, _FAST_RATE = 0.1, 0.7, 0.5  # how reading is followed; faster than thought: other load was there before
_MAX_RATIO = 3.0
_LEAST_SECONDS = 1e-9


class Pass(NamedTuple):
    """A pass that was timed."""

    num_rows: float
    seconds: float
    waited: float  # seconds of it, for weights

    @property
    def computing(self) -> float:
        return max(self.seconds - self.waited, _LEAST_SECONDS)

    @property
    def is_bound(self) -> bool:
        """Whether reading is what it took."""
        return self.waited > _WAITS * self.seconds


class StreamedCurve:
    """Seconds of a pass as a function of its rows: the longer of reading and computing, which is a straight line.

    Args:
        passes: At least one; they count as long as the curve lives, those observed later for some dozen passes.
    """

    def __init__(self, passes: Sequence[Pass]) -> None:
        self.passes = tuple(passes)
        bound = [one.seconds for one in passes if one.is_bound]
        self.reading: float = median(bound) if bound else min(one.seconds for one in passes)
        self._known = sum((_sums(one) for one in passes), np.zeros(5))
        self._seen = np.zeros(5)
        self._fit()

    def _fit(self) -> None:
        """The line with the least squared error."""
        weight, rows, squares, seconds, products = map(float, self._known + self._seen)
        spread = weight * squares - rows * rows
        if spread > 1e-6 * weight * squares:
            self.row = max((weight * products - rows * seconds) / spread, _LEAST_SECONDS)
            self.base = (seconds - rows * self.row) / weight
        if spread <= 1e-6 * weight * squares or self.base < 0:  # one size only, or the larger are dearer by the row
            self.base, self.row = 0.0, products / squares
        assert self.row > 0

    def __call__(self, num_tokens: npt.ArrayLike) -> Floats:
        rows = np.asarray(num_tokens, dtype=np.float64)
        return np.asarray(np.maximum(self.reading, self.base + self.row * rows))

    def observe(self, num_tokens: float, seconds: float, waited: float = 0.0) -> None:
        one = Pass(num_tokens, seconds, min(max(waited, 0.0), seconds))
        if one.is_bound:
            rate = _FAST_RATE if seconds < _FAST * self.reading else _RATE
            self.reading += rate * (min(seconds, _MAX_RATIO * self.reading) - self.reading)
        else:
            self.reading = min(self.reading, seconds)  # it was read by then
        self._seen = _KEPT * self._seen + _sums(one)
        self._fit()

    @property
    def bend(self) -> float:
        """Rows from which on computing takes longer; at least one."""
        return max((self.reading - self.base) / self.row, 1.0)

    @property
    def sizes(self) -> Floats:
        """[sizes] from which the rest follows."""
        return np.unique([1.0, round(self.bend), 2.0 * round(self.bend)])

    @property
    def seconds(self) -> Floats:
        """[sizes]"""
        return self(self.sizes)

    def as_dict(self) -> dict[str, object]:
        """Plain numbers, to be kept in a file."""
        return {"passes": [list(one) for one in self.passes]}

    @classmethod
    def from_dict(cls, numbers: Mapping[str, Any]) -> "StreamedCurve":
        """Raises KeyError, TypeError or ValueError if these are no passes."""
        passes = [Pass(*map(float, one)) for one in numbers["passes"]]
        usable = bool(passes) and bool(np.isfinite(passes).all())
        if not (usable and all(one.num_rows >= 1 and 0 <= one.waited <= one.seconds > 0 for one in passes)):
            raise ValueError("no passes: each needs rows, and a time that it waited less than it took")
        return cls(passes)


def _sums(one: Pass) -> Floats:
    rows, seconds = one.num_rows, one.computing
    return np.asarray([1.0, rows, rows * rows, seconds, rows * seconds])


def measure_streamed(sizes: Sequence[int], run: Callable[[int], None], waited: Callable[[], float]) -> StreamedCurve:
    """Few passes, which may take seconds each.

    Args:
        run: A pass over so many rows.
        waited: Seconds that passes have waited for weights so far.
    """
    started = perf_counter()
    passes: list[Pass] = []
    for size in sizes:
        if len(passes) > 1 and perf_counter() - started > _MOST_SECONDS:
            break
        before, waited_before = perf_counter(), waited()
        run(size)
        seconds = perf_counter() - before
        passes.append(Pass(size, seconds, min(waited() - waited_before, seconds)))
    return StreamedCurve(passes)

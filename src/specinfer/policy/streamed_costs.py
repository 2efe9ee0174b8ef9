"""Cost of passes whose weights are read each time: the longer of the reading time and the computing time.

A pass gives both times, on either side of the bend: the time that it did not wait for weights is the cost of its rows,
and its whole time, if it waited, is the cost of reading. So the bend is known from passes on either side of it, and a
disk that is slow for a while does not change the price of a row.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from specinfer.policy.curves import MAX_RATIO, Floats, learning_rate

# One row, and the sizes at which passes of common machines begin to bend.
SIZES = (1, 128, 256)
MOST_ROWS = 512  # of a pass that rows are priced by: longer ones are prompts, and cost more per row than trees
_MOST_SECONDS = 30.0  # seconds after which no further size is measured
_WAITS = 0.1  # share of a pass spent waiting, above which its time counts as that of reading
_KEPT = 0.95  # decay of the observations per pass
_LEAST_SECONDS = 1e-9


class Pass(NamedTuple):
    """The times of one pass."""

    num_rows: float
    seconds: float
    waited: float  # part of the seconds spent waiting for weights

    @property
    def computing(self) -> float:
        return max(self.seconds - self.waited, _LEAST_SECONDS)

    @property
    def is_bound(self) -> bool:
        """True if reading the weights limited the pass."""
        return self.waited > _WAITS * self.seconds


class StreamedCurve:
    """Seconds of a pass as a function of its rows: the longer of reading (constant) and computing (a straight line).

    Args:
        passes: Initial passes, at least one. They count permanently; those observed later for some dozen passes.
    """

    def __init__(self, passes: Sequence[Pass]) -> None:
        self.passes = tuple(passes)
        bound = [measured.seconds for measured in passes if measured.is_bound]
        self.reading: float = median(bound) if bound else min(measured.seconds for measured in passes)
        self._known = sum((_sums(measured) for measured in passes), np.zeros(5))
        self._seen = np.zeros(5)
        self._fit()

    def _fit(self) -> None:
        """Fit the line with the least squared error."""
        weight, rows, squares, seconds, products = map(float, self._known + self._seen)
        spread = weight * squares - rows * rows
        if spread > 1e-6 * weight * squares:
            self.row = max((weight * products - rows * seconds) / spread, _LEAST_SECONDS)
            self.base = (seconds - rows * self.row) / weight
        if spread <= 1e-6 * weight * squares or self.base < 0:  # one size only, or larger passes cost more per row
            self.base, self.row = 0.0, products / squares
        assert self.row > 0

    def __call__(self, num_tokens: npt.ArrayLike) -> Floats:
        rows = np.asarray(num_tokens, dtype=np.float64)
        return np.asarray(np.maximum(self.reading, self.base + self.row * rows))

    def observe(self, num_tokens: float, seconds: float, waited: float = 0.0) -> None:
        measured = Pass(num_tokens, seconds, min(max(waited, 0.0), seconds))
        if measured.is_bound:
            rate = learning_rate(seconds, self.reading)
            self.reading += rate * (min(seconds, MAX_RATIO * self.reading) - self.reading)
        else:
            self.reading = min(self.reading, seconds)  # reading took no longer than this
        self._seen = _KEPT * self._seen + _sums(measured)
        self._fit()

    def reading_for(self, seconds: float) -> "StreamedCurve":
        """Return the curve of passes with other weights to read, for this many seconds."""
        changed = copy.copy(self)
        changed.reading = seconds
        return changed

    @property
    def bend(self) -> float:
        """Number of rows above which computing takes longer than reading; at least one."""
        return max((self.reading - self.base) / self.row, 1.0)

    @property
    def sizes(self) -> Floats:
        """Numbers of rows that determine the curve: [sizes]."""
        return np.unique([1.0, round(self.bend), 2.0 * round(self.bend)])

    @property
    def seconds(self) -> Floats:
        """Seconds at `sizes`: [sizes]."""
        return self(self.sizes)

    def as_dict(self) -> dict[str, object]:
        """Return plain numbers, to be stored in a file."""
        return {"passes": [list(measured) for measured in self.passes]}

    @classmethod
    def from_dict(cls, numbers: Mapping[str, Any]) -> "StreamedCurve":
        """Make a curve from `as_dict`'s numbers. Raises KeyError, TypeError or ValueError if they are not passes."""
        passes = [Pass(*map(float, entry)) for entry in numbers["passes"]]
        usable = bool(passes) and bool(np.isfinite(passes).all())
        if not (
            usable
            and all(measured.num_rows >= 1 and 0 <= measured.waited <= measured.seconds > 0 for measured in passes)
        ):
            raise ValueError("no passes: each needs rows, and a time that it waited less than it took")
        return cls(passes)


def _sums(one: Pass) -> Floats:
    rows, seconds = one.num_rows, one.computing
    return np.asarray([1.0, rows, rows * rows, seconds, rows * seconds])


def measure_streamed(sizes: Sequence[int], run: Callable[[int], None], waited: Callable[[], float]) -> StreamedCurve:
    """Time one pass of each size; a pass may take seconds.

    Args:
        sizes: Numbers of rows.
        run: Function that runs a pass over this many rows.
        waited: Function that returns the seconds that passes have waited for weights so far.
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

"""Curves: seconds as a function of a number of tokens, measured at some sizes and updated by every pass."""

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from specinfer.model.pass_work import PassWork

Floats = npt.NDArray[np.float64]
# Weight of a new observation: a few steps follow a change, and one slow step does not count much. What took much less
# time than expected counts more: the estimate dates from a time of higher load.
LEARNING_RATE, FAST, _FAST_RATE = 0.1, 0.7, 0.5
MAX_RATIO = 3.0  # of what was observed to what was expected, beyond which it counts no more
_SHARED = 0.9  # factor of the rate for sizes that were not observed
_BENT = 1.5  # a pass that takes this many times as long as a smaller one is bound by computing
_ATTENTION = 2.0  # factor of the time of an operation in attention over one in products with weights
# Variances of the seconds of weights, and of reading and computing with contexts, which are not measured at start-up.
_DOUBTED = np.asarray([1.0, 4.0, 4.0])


def learning_rate(seconds: float, expected: float) -> float:
    """Return the weight of an observation of some seconds where others were expected."""
    return _FAST_RATE if seconds < FAST * expected else LEARNING_RATE


class Curve:
    """Seconds as a function of a number of tokens, interpolated linearly between measured sizes.

    Args:
        sizes: Numbers of tokens, ascending.
        seconds: [sizes] seconds.
    """

    def __init__(self, sizes: npt.ArrayLike, seconds: npt.ArrayLike) -> None:
        self.sizes = np.asarray(sizes, dtype=np.float64)
        self.seconds = np.maximum.accumulate(np.asarray(seconds, dtype=np.float64))  # more tokens never cost less

    def __call__(self, num_tokens: npt.ArrayLike) -> Floats:
        """Return the seconds for each number of tokens."""
        return self.interpolated(num_tokens)

    def interpolated(self, num_tokens: npt.ArrayLike) -> Floats:
        """Return the seconds between measured sizes. Beyond the largest the cost is taken as proportional."""
        wanted = np.asarray(num_tokens, dtype=np.float64)
        beyond = np.maximum(wanted / self.sizes[-1], 1.0)
        return np.asarray(np.interp(wanted, self.sizes, self.seconds) * beyond)

    def observe(self, num_tokens: float, seconds: float, waited: float = 0.0) -> None:
        """Learn from a pass; all sizes follow.

        Other load slows all sizes. A change of one size alone shows only after many steps. The time `waited` for
        weights is ignored here.
        """
        expected = float(self.interpolated(num_tokens))
        ratio, rate = min(seconds / expected, MAX_RATIO), learning_rate(seconds, expected)
        right = int(np.searchsorted(self.sizes, num_tokens))
        rates = np.full(len(self.sizes), rate * _SHARED)
        rates[max(right - 1, 0) : right + 1] = rate
        learned = self.seconds * (1.0 + rates * (ratio - 1.0))
        # More tokens never cost less: a fast pass lowers the smaller sizes, and a slow one raises the larger ones.
        self.seconds = falling(learned) if ratio < FAST else np.maximum.accumulate(learned)

    def adopting(self, seconds: Mapping[int, float]) -> "Curve":
        """Return the curve with the seconds measured at some sizes; between them the change goes over gradually.

        Beyond the largest of them every token costs its share if that size cost clearly more than the smallest.
        """
        known = sorted(seconds)
        last, most = known[-1], seconds[known[-1]]
        changes = np.log([seconds[size] for size in known]) - np.log(self.interpolated(known))
        adopted = self.seconds * np.exp(np.interp(np.log(self.sizes), np.log(known), changes))
        if most > _BENT * seconds[known[0]]:
            adopted = np.where(self.sizes > last, np.maximum(adopted, most * self.sizes / last), adopted)
        return Curve(self.sizes, adopted)


def falling(seconds: Floats) -> Floats:
    """Return seconds that do not fall with size, [sizes], by lowering smaller sizes to the time of larger ones."""
    return np.minimum.accumulate(seconds[::-1])[::-1]


class ContextCurve(Curve):
    """Seconds of a pass by its number of rows, with the contexts of the step that is planned or observed.

    Example: a pass over 1 and 8 rows takes 1.0 and 1.2 s. Attention to a token of context takes 0.0009 s for reading
    it, and 0.0001 s for each row. With 1,000 tokens, a pass takes 1.0 + 1.0 s over 1 row, and 1.2 + 1.7 s over 8.

    Args:
        sizes, seconds: As for `Curve`, over hardly any context.
        read_token: Seconds of reading a token of context.
        attend_token: Seconds of attention to it, for each row of its request.
    """

    def __init__(self, sizes: npt.ArrayLike, seconds: npt.ArrayLike, read_token: float, attend_token: float) -> None:
        super().__init__(sizes, seconds)
        self.read_token, self.attend_token = read_token, attend_token
        self._num_context, self._num_requests = 0, 1

    @classmethod
    def assumed(cls, passes: Curve, work: PassWork) -> "ContextCurve":
        """Return the costs if attention reads as fast as a small pass, and computes half as fast as a large one."""
        read_byte, compute = float(passes.seconds[0]) / work.weight_bytes, 0.0
        if len(passes.sizes) > 1:
            row_seconds = np.diff(passes.seconds[-2:]) / np.diff(passes.sizes[-2:])
            compute = _ATTENTION * float(row_seconds[0]) / work.row_flops
        return cls(passes.sizes, passes.seconds, work.token_bytes * read_byte, work.pair_flops * compute)

    def __call__(self, num_tokens: npt.ArrayLike) -> Floats:
        rows = np.asarray(num_tokens) / self._num_requests
        return self.interpolated(num_tokens) + self._num_context * (self.read_token + rows * self.attend_token)

    def follow(self, num_context: int, num_requests: int) -> None:
        """Take this many tokens of context, of this many requests, as those of a pass."""
        self._num_context, self._num_requests = num_context, num_requests

    def parts(self, num_tokens: float) -> Floats:
        """Return the seconds of a pass for its weights, for reading contexts and for computing with them, [3]."""
        rows = num_tokens / self._num_requests
        attention = self._num_context * np.asarray([self.read_token, rows * self.attend_token])
        return np.asarray([float(self.interpolated(num_tokens)), *attention])

    def observe(self, num_tokens: float, seconds: float, waited: float = 0.0) -> None:
        """Learn from a pass, mostly about the parts that take most of it, and that are known least.

        The change is divided by the rule of normalized least mean squares, on the logarithms of the parts.
        """
        parts = self.parts(num_tokens)
        expected, shares = float(parts.sum()), parts / parts.sum()
        ratio, rate = min(seconds / expected, MAX_RATIO), learning_rate(seconds, expected)
        doubts = shares * _DOUBTED
        weights, reading, attending = np.exp(math.log(ratio) * doubts / (doubts @ shares)).tolist()
        super().observe(num_tokens, float(parts[0]) * weights, waited)
        self.read_token *= 1.0 + rate * (min(reading, MAX_RATIO) - 1.0)
        self.attend_token *= 1.0 + rate * (min(attending, MAX_RATIO) - 1.0)

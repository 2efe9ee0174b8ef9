"""StepSeconds: what steps cost, learned from the steps themselves, so that it is known without `auto`, too.

Example: passes over 2 and 16 rows took 12 and 40 ms. A pass over 4 rows is expected to take 16 ms. Where nothing was
seen, each row is expected to cost its share: 6 ms for 1 row, 80 ms for 32. If that is wrong, steps show it.
"""

import math
from bisect import bisect_right
from collections.abc import Callable
from itertools import pairwise

from specinfer.core.decayed_ratio import DecayedRatio
from specinfer.core.request import Request, ScoringTime
from specinfer.core.step_record import StepRecord
from specinfer.policy.curves import MAX_RATIO, learning_rate

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_MEMORY = 0.9  # weight of the steps before, for each further step
_SHARED = 0.9  # factor of the rate for other numbers of rows: other load slows all of them


class StepSeconds:
    """Seconds of passes by their rows, of a draft token, and of log-probabilities."""

    def __init__(self) -> None:
        self._seen: dict[int, list[float]] = {}  # rows and seconds of passes, by the bits of the number of rows
        self._points = [(0.0, 0.0)]  # the same, so that more rows cost no less, and none costs more
        self._drafting = DecayedRatio(_MEMORY)  # seconds of a draft token
        self._reading = DecayedRatio(_MEMORY)  # seconds of a token of a prompt that drafters read
        self._scoring = DecayedRatio(_MEMORY)  # seconds of a log-probability

    def expect(self, pass_seconds: Callable[[int], float]) -> None:
        """Take over what passes were measured to take, where no step was seen."""
        for size in _SIZES:
            self._seen.setdefault(size.bit_length(), [float(size), pass_seconds(size)])
        self._points = self._curve()

    def observe(self, step: StepRecord, scoring: ScoringTime) -> None:
        """Learn from a step, and from the log-probabilities of its requests."""
        if scoring.count:
            self._scoring.observe(scoring.seconds, scoring.count)
        if step.is_first_of_size:  # it took most of its time for a capture
            return
        if step.num_read:
            seconds = step.draft_time - self._drafting.value * step.num_guessed
            self._reading.observe(max(seconds, 0.0), step.num_read)
        elif step.num_guessed:
            self._drafting.observe(step.draft_time, step.num_guessed)
        self._observe_pass(step.num_rows, max(step.target_time + step.rest_time - scoring.seconds, 1e-9))

    @property
    def is_known(self) -> bool:
        """True if a step was seen."""
        return len(self._points) > 1

    @property
    def longest(self) -> float:
        """Seconds of the largest pass that was seen."""
        return self._points[-1][1]

    def of_pass(self, num_rows: float) -> float:
        """Return the seconds of a pass over so many rows."""
        last_rows, last = self._points[-1]
        if num_rows >= last_rows:
            return last * num_rows / last_rows
        place = bisect_right(self._points, (num_rows, math.inf))
        (rows, seconds), (more, longer) = self._points[place - 1 : place + 1]
        return seconds + (longer - seconds) * (num_rows - rows) / (more - rows)

    def rows_within(self, seconds: float) -> float:
        """Return the rows of a pass that takes so long."""
        last_rows, last = self._points[-1]
        if seconds >= last:
            return last_rows * seconds / last
        for (rows, begin), (more, end) in reversed(list(pairwise(self._points))):
            if seconds >= begin:
                return rows + (more - rows) * (seconds - begin) / (end - begin)
        return 0.0

    @property
    def of_node(self) -> float:
        """Seconds that drafting a token takes, beside its row."""
        return self._drafting.value

    def of_reading(self, num_tokens: int) -> float:
        """Return the seconds in which drafters read so many tokens, at most those of the target if none were read."""
        if not num_tokens:
            return 0.0
        return num_tokens * self._reading.value if self._reading.denominator else self.of_pass(num_tokens)

    def on_host(self, request: Request) -> float:
        """Return the seconds that log-probabilities and the grammar of a request take for each of its rows."""
        seconds = 0.0 if request.grammar is None else request.grammar.last_seconds
        return seconds + self._scoring.value * request.num_scored

    def _observe_pass(self, num_rows: int, seconds: float) -> None:
        """Learn from a pass: about its number of rows at once, and about others as far as all have changed."""
        place = num_rows.bit_length()
        seen = self._seen.setdefault(place, [float(num_rows), seconds])
        ratio, rate = min(seconds / seen[1] * seen[0] / num_rows, MAX_RATIO), learning_rate(seconds, seen[1])
        for other in self._seen.values():
            other[1] *= 1.0 + (rate if other is seen else _SHARED * rate) * (ratio - 1.0)
        moved = rate * (num_rows - seen[0])
        seen[1] *= 1.0 + moved / seen[0]
        seen[0] += moved
        self._points = self._curve()

    def _curve(self) -> list[tuple[float, float]]:
        """Return what was seen, without passes that took longer than one over more rows, or than two over fewer."""
        points = [tuple(self._seen[place]) for place in sorted(self._seen)]
        least, falling = math.inf, list[tuple[float, float]]()
        for rows, seconds in reversed(points):
            least = min(least, seconds)
            falling.append((rows, least))
        curve = [falling.pop()]
        while falling:
            rows, seconds = falling.pop()
            curve.append((rows, min(seconds, curve[-1][1] * rows / curve[-1][0])))
        return [(0.0, 0.0), *curve]

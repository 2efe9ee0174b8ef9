"""One record a step, and what is read off them. Observers only: the algorithm never branches on these."""

import time
from collections import deque
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one step did and where its time went, in seconds."""

    num_requests: int
    num_rows: int  # tokens in the target's pass
    num_guessed: int
    num_levels: int  # depth of the deepest tree
    num_said: int  # tokens given to requests
    draft_time: float
    target_time: float
    rest_time: float

    @property
    def time(self) -> float:
        return self.draft_time + self.target_time + self.rest_time


class StageClock:
    """Splits one step's time into stages."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap."""
        now = time.perf_counter()
        elapsed, self._last = now - self._last, now
        return elapsed


@dataclass(slots=True)
class EngineMetrics:
    """Recent steps, and totals since the start."""

    recent: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=10_000))
    num_steps: int = 0
    num_preempted: int = 0
    num_draft_failures: int = 0

    def record(self, step: StepRecord) -> None:
        self.recent.append(step)
        self.num_steps += 1

"""Times of the stages of a step on the device's own timeline.

A GPU computes after the call that launched the work has returned, so the host's clock shows only when work was
launched. Here marks are put between the work itself, in some steps only. Marks are read, and waited for, at the end.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch

from specinfer.core.step_record import StepRecord

STAGES = ("draft", "target", "verify", "rest")
_SAMPLED_STEPS = 4  # every fourth on a GPU: a mark costs the host some microseconds


class Mark(Protocol):
    """Interface of a point on the timeline, such as an event of a CUDA stream."""

    def elapsed_time(self, end: Any, /) -> float:
        """Return the milliseconds from this mark to `end`, once the device has reached both."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has reached this mark."""
        ...


@dataclass(frozen=True, slots=True)
class HostMark:
    """A time of the host's clock, for devices that work synchronously."""

    seconds: float

    def elapsed_time(self, end: "HostMark", /) -> float:
        return 1000 * (end.seconds - self.seconds)

    def synchronize(self) -> None:
        """Do nothing: the device has worked by then."""


def _mark(device: torch.device) -> Mark:
    """Return a mark after all work that was launched so far."""
    if device.type != "cuda":
        return HostMark(time.perf_counter())
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


class Marks:
    """Points in the work of a device, of which the last one can be waited for."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._marks = device, list[Mark]()

    def mark(self) -> None:
        self._marks.append(_mark(self._device))

    def wait(self) -> None:
        """Wait for the last mark."""
        self._marks[-1].synchronize()

    def seconds(self) -> list[float]:
        """Return the seconds from each mark to the next, once the last one is reached."""
        return [before.elapsed_time(after) / 1000 for before, after in pairwise(self._marks)]


class StageMarks:
    """The marks of one step, in the order of the work.

    Attributes:
        record: Record of the step, or None if it was dropped or had no requests.
    """

    def __init__(self, make: Callable[[], Mark], start: Mark) -> None:
        self.record: StepRecord | None = None
        self._make = make
        self._marks: list[tuple[str, Mark]] = [("rest", start)]
        self._is_launched = False

    def lap(self, stage: str) -> None:
        """Assign the work launched since the last mark to this stage."""
        # After the first stage the host only reads results, and the next step's work may come before this mark.
        is_late = stage == "rest" and len({name for name, _ in self._marks}) > 1
        if not self._is_launched and not is_late:
            self._marks.append((stage, self._make()))

    def launched(self) -> None:
        """Note that everything was launched: later laps are the host's alone."""
        self._is_launched = True

    def seconds(self, end: Mark) -> dict[str, float]:
        """Return the seconds of each stage up to `end`, where the next step begins; unassigned time is "rest"."""
        by_stage = dict.fromkeys(STAGES, 0.0)
        for (_, before), (stage, mark) in zip(self._marks, self._marks[1:], strict=False):
            by_stage[stage] += before.elapsed_time(mark) / 1000
        by_stage["rest"] += self._marks[-1][1].elapsed_time(end) / 1000
        return by_stage


@dataclass(frozen=True, slots=True)
class TimedStep:
    """Seconds of each stage of one step, by the names in `STAGES`, and the record of the step."""

    seconds: dict[str, float]
    record: StepRecord


class DeviceTimer:
    """A timer that marks steps one after the other; each ends where the next begins.

    Args:
        device: The device.
        every: Interval of marked steps, or None for all on a CPU, where marks cost nothing, and few on a GPU.
    """

    def __init__(self, device: torch.device, every: int | None = None) -> None:
        is_gpu = device.type == "cuda"
        self._make = partial(_mark, device)
        self._device = device
        self._every = every or (_SAMPLED_STEPS if is_gpu else 1)
        self._num_steps = 0
        self._open: StageMarks | None = None
        self._ended: list[tuple[StageMarks, Mark]] = []

    def begin(self) -> StageMarks | None:
        """Begin a step and end the previous one. Return the marks, or None if this step is not marked."""
        self._num_steps += 1
        is_sampled = self._num_steps % self._every == 0
        if self._open is None and not is_sampled:
            return None
        mark = self._make()
        if self._open is not None:
            self._ended.append((self._open, mark))
        self._open = StageMarks(self._make, mark) if is_sampled else None
        return self._open

    def take(self) -> list[TimedStep]:
        """Return the steps that ended since the last call, without the open one; waits for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        ended, self._ended, self._open, self._num_steps = self._ended, [], None, 0
        did = [(marks, end, marks.record) for marks, end in ended if marks.record is not None]
        # A step whose requests had all ended served none of them.
        return [TimedStep(marks.seconds(end), record) for marks, end, record in did if record.num_requests]


class StageClock:
    """A clock that splits one step's time into stages.

    Args:
        timer: Timer that marks some steps on the device's timeline too.
    """

    def __init__(self, timer: DeviceTimer | None = None) -> None:
        self._last = time.perf_counter()
        self.seconds = {"draft": 0.0, "target": 0.0, "verify": 0.0, "rest": 0.0}
        self.marks = None if timer is None else timer.begin()

    def lap(self, stage: str) -> None:
        """Assign the time since the last lap to this stage."""
        now = time.perf_counter()
        self.seconds[stage] += now - self._last
        self._last = now
        self.mark(stage)

    def mark(self, stage: str) -> None:
        """Assign the device's work since the last mark to this stage; the host's time is not split."""
        if self.marks is not None:
            self.marks.lap(stage)

    def launched(self) -> None:
        """Note that all of the step's work was launched: later laps are the host's alone."""
        if self.marks is not None:
            self.marks.launched()

    def assign(self, stage: str, seconds: float) -> None:
        """Add seconds measured by a device to this stage, and take them off the rest as far as it goes."""
        self.seconds[stage] += seconds
        self.seconds["rest"] = max(self.seconds["rest"] - seconds, 0.0)

    def skip_to(self, moment: float) -> None:
        """Leave out the time before this moment, which belongs to another step."""
        self._last = max(self._last, moment)

    def end(self, record: StepRecord) -> None:
        """Add the record of the step to its marks on the device's timeline."""
        if self.marks is not None:
            self.marks.record = record

    @property
    def last(self) -> float:
        """End of the last lap, by `time.perf_counter`."""
        return self._last

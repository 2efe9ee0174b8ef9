"""When the stages of a step began and ended on the device's own timeline.

A GPU computes after the call that asked for it has returned: the host's clock tells when work was asked for. Here marks
are put between the work itself, in some steps only. Nobody waits for a mark before it is read, when all is done.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from specinfer.engine.metrics import StepRecord

STAGES = ("draft", "target", "verify", "rest")
_SAMPLED_STEPS = 4  # on a GPU every fourth: a mark costs the host some microseconds


class Mark(Protocol):
    """A place on the timeline, such as an event of a CUDA stream."""

    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds from here to there, once the device has reached both."""
        ...


@dataclass(frozen=True, slots=True)
class HostMark:
    """A moment of the host's clock: what a device without a timeline of its own has done by then is done."""

    seconds: float

    def elapsed_time(self, end: "HostMark", /) -> float:
        return 1000 * (end.seconds - self.seconds)


def _event(device: torch.device) -> Mark:
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


class StageMarks:
    """Those of one step, in the order of the work.

    Attributes:
        record: What the step did; None: it was given up, or there was nobody to serve.
    """

    def __init__(self, make: Callable[[], Mark], start: Mark) -> None:
        self.record: StepRecord | None = None
        self._make = make
        self._marks: list[tuple[str, Mark]] = [("rest", start)]
        self._is_launched = False

    def lap(self, stage: str) -> None:
        """What was asked of the device since the last mark belongs to this stage."""
        # After the first stage the host only looks on, and the next step's work may stand before this mark.
        is_late = stage == "rest" and len({name for name, _ in self._marks}) > 1
        if not self._is_launched and not is_late:
            self._marks.append((stage, self._make()))

    def launched(self) -> None:
        """All was asked for: laps from now on are the host's alone."""
        self._is_launched = True

    def seconds(self, end: Mark) -> dict[str, float]:
        """Of each stage up to `end`, where the next step begins; what belongs to no other is "rest"."""
        found = dict.fromkeys(STAGES, 0.0)
        for (_, before), (stage, mark) in zip(self._marks, self._marks[1:], strict=False):
            found[stage] += before.elapsed_time(mark) / 1000
        found["rest"] += self._marks[-1][1].elapsed_time(end) / 1000
        return found


@dataclass(frozen=True, slots=True)
class TimedStep:
    """Seconds of each stage of one step, by names of `STAGES`, and what the step did."""

    seconds: dict[str, float]
    record: "StepRecord"


class DeviceTimer:
    """Marks steps, one after the other; each ends where the next begins.

    Args:
        every: One step in so many is marked; None: all on a CPU, where it costs nothing, and few on a GPU.
    """

    def __init__(self, device: torch.device, every: int | None = None) -> None:
        is_gpu = device.type == "cuda"
        self._make: Callable[[], Mark] = (lambda: _event(device)) if is_gpu else (lambda: HostMark(time.perf_counter()))
        self._device = device
        self._every = every or (_SAMPLED_STEPS if is_gpu else 1)
        self._num_steps = 0
        self._open: StageMarks | None = None
        self._ended: list[tuple[StageMarks, Mark]] = []

    def begin(self) -> StageMarks | None:
        """A step begins, and the one before it ends; None: this one is not marked."""
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
        """Steps that ended since the last call; waits for the device. The step now open is left out."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        ended, self._ended, self._open, self._num_steps = self._ended, [], None, 0
        did = [(marks, end, marks.record) for marks, end in ended if marks.record is not None]
        # What was on its way for a request that ended meanwhile served nobody.
        return [TimedStep(marks.seconds(end), record) for marks, end, record in did if record.num_requests]

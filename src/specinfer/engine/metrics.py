"""One record a step, and what is read off them. The policy is the only reader within the loop."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

from torch import Tensor

from specinfer.config import LOOKUP_NAMES
from specinfer.engine.device.timer import DeviceTimer
from specinfer.request import Request, Span
from specinfer.tree import TokenTree
from specinfer.verify import Acceptance

_NO_MODELS = frozenset((*LOOKUP_NAMES, "prediction"))  # drafters whose levels cost nothing


class StageClock:
    """Splits one step's time into stages.

    Args:
        timer: Marks some steps on the device's timeline too.
    """

    def __init__(self, timer: DeviceTimer | None = None) -> None:
        self._last = time.perf_counter()
        self.seconds = {"draft": 0.0, "target": 0.0, "verify": 0.0, "rest": 0.0}
        self.marks = None if timer is None else timer.begin()

    def lap(self, stage: str) -> None:
        """The time since the last lap was spent on this stage."""
        now = time.perf_counter()
        self.seconds[stage] += now - self._last
        self._last = now
        self.mark(stage)

    def mark(self, stage: str) -> None:
        """The device does what it was asked for since the last mark for this stage; the host's time is not split."""
        if self.marks is not None:
            self.marks.lap(stage)

    def launched(self) -> None:
        """All of the step was asked of the device: later laps are the host's alone."""
        if self.marks is not None:
            self.marks.launched()

    def assign(self, stage: str, seconds: float) -> None:
        """So much of the rest was this stage's, as a device has measured it; more, if it began before."""
        self.seconds[stage] += seconds
        self.seconds["rest"] = max(self.seconds["rest"] - seconds, 0.0)

    def skip_to(self, moment: float) -> None:
        """What came before is no time of this step; it was another one's."""
        self._last = max(self._last, moment)

    @property
    def last(self) -> float:
        """When the last lap ended, by `time.perf_counter`."""
        return self._last


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one step did and where its time went, in seconds."""

    num_requests: int
    num_rows: int  # tokens in the target's pass
    num_guessed: int
    num_levels: int  # depth of the deepest tree
    num_generated: int  # tokens given to requests
    num_read: int  # tokens of requests that the drafter met for the first time
    draft_time: float
    target_time: float  # the pass, since it was begun or the one before it ended, and what is said at each node
    rest_time: float
    num_budgeted: int = 0  # nodes that the policy allowed
    num_model_levels: int | None = None  # that models drafted; None: not told apart from those of lookups
    waiting_time: float = 0.0  # of `target_time`, in which the pass waited for weights
    verify_time: float = 0.0  # of `target_time`, what came after the pass was called: on a GPU also the wait for it
    num_context: int = 0  # tokens before those of the pass, whose keys and values it reads

    @classmethod
    def of(
        cls,
        spans: Sequence[Span],
        trees: Sequence[TokenTree | None],
        num_generated: int,
        num_read: int,
        clock: StageClock,
        num_budgeted: int = 0,
        waiting_time: float = 0.0,
        num_model_levels: int | None = None,
    ) -> Self:
        """Of what a step did; without `num_model_levels` those that its trees show."""
        if num_model_levels is None:
            num_model_levels = max((_model_levels(tree) for tree in trees if tree is not None), default=0)
        num_guessed = sum(tree.num_guessed for tree in trees if tree is not None)
        record = cls(
            num_requests=len(spans),
            num_rows=sum(span.end - span.start for span in spans) + num_guessed,
            num_guessed=num_guessed,
            num_levels=max((tree.max_depth for tree in trees if tree is not None), default=0),
            num_generated=num_generated,
            num_read=num_read,
            draft_time=clock.seconds["draft"],
            target_time=clock.seconds["target"] + clock.seconds["verify"],
            rest_time=clock.seconds["rest"],
            num_budgeted=num_budgeted,
            num_model_levels=num_model_levels,
            waiting_time=waiting_time,
            verify_time=clock.seconds["verify"],
            num_context=sum(span.start for span in spans),
        )
        if clock.marks is not None:
            clock.marks.record = record
        return record

    @property
    def time(self) -> float:
        return self.draft_time + self.target_time + self.rest_time


def _model_levels(tree: TokenTree) -> int:
    """The depth of the deepest guess that a model made: each level was a pass of it."""
    names = {draw[1] for draw in tree.draws}
    if names <= _NO_MODELS:
        return 0
    depths = tree.depths
    return max(depths[draw[0]] for draw in tree.draws if draw[1] not in _NO_MODELS)


class Observer(Protocol):
    """Sees what the engine does, in the engine's thread; it changes nothing.

    Attributes:
        reads_logits: Whether it looks at logits, which requests served on the device do not have, but for those of
            requests that are traced.
    """

    reads_logits: bool

    def on_tokens(
        self, request: Request, tree: TokenTree, acceptance: Acceptance, logits: Tensor, num_generated: int
    ) -> None:
        """A request has just taken `num_generated` tokens: an end of the accepted path and the token after it.

        Args:
            logits: [len(tree), vocab] what the target said at each node, before processing.
        """
        ...

    def on_step(self, record: StepRecord) -> None:
        """A step is done."""
        ...


@dataclass(slots=True)
class EngineMetrics:
    """Recent steps, and totals since the start."""

    recent: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=10_000))
    num_steps: int = 0
    num_generated: int = 0
    num_preempted: int = 0
    num_draft_failures: int = 0

    def record(self, step: StepRecord) -> None:
        self.recent.append(step)
        self.num_steps += 1
        self.num_generated += step.num_generated

"""One record per step, and the metrics made from them. Within the loop only the policy reads them."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

from torch import Tensor

from specinfer.core.lookups import is_model
from specinfer.core.request import Request, Span
from specinfer.core.tree import TokenTree
from specinfer.engine.device.timer import DeviceTimer
from specinfer.verify import Acceptance


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

    @property
    def last(self) -> float:
        """End of the last lap, by `time.perf_counter`."""
        return self._last


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Counts of one step and its times in seconds."""

    num_requests: int
    num_rows: int  # tokens in the target's pass
    num_guessed: int
    num_levels: int  # depth of the deepest tree
    num_generated: int  # tokens emitted
    num_read: int  # tokens of requests that the drafter read for the first time
    draft_time: float
    target_time: float  # the pass, from its begin or the end of the one before it, and its verification
    rest_time: float
    num_budgeted: int = 0  # nodes that the policy allowed
    num_model_levels: int | None = None  # levels drafted by models; None if not distinguished from those of lookups
    waiting_time: float = 0.0  # part of `target_time` in which the pass waited for weights
    verify_time: float = 0.0  # part of `target_time` after the pass was called; on a GPU this includes the wait for it
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
        """Make the record of a step; without `num_model_levels` they are counted from its trees."""
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
    """Return the depth of the deepest draft token of a model, since each of its levels was a pass."""
    models = set(filter(is_model, {draw[1] for draw in tree.draws}))
    if not models:
        return 0
    depths = tree.depths
    return max(depths[draw[0]] for draw in tree.draws if draw[1] in models)


class Observer(Protocol):
    """Interface of objects that see what the engine does, in the engine's thread, and change nothing.

    Attributes:
        reads_logits: True if it reads logits, which requests served on the device do not have. Logits of traced
            requests need no such flag.
    """

    reads_logits: bool

    def on_tokens(
        self, request: Request, tree: TokenTree, acceptance: Acceptance, logits: Tensor, num_generated: int
    ) -> None:
        """Receive the tokens that a request just emitted: part of the accepted path and the token after it.

        Args:
            request: The request, with the new tokens.
            tree: Its tree.
            acceptance: The accepted path and the next token.
            logits: [len(tree), vocab] the target's logits at each node, before processing.
            num_generated: Number of new tokens; the request may have ended inside the path.
        """
        ...

    def on_step(self, record: StepRecord) -> None:
        """Receive the record of a step that has ended."""
        ...


@dataclass(slots=True)
class EngineMetrics:
    """The most recent steps, and totals since the start."""

    recent: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=10_000))
    num_steps: int = 0
    num_generated: int = 0
    num_preempted: int = 0
    num_draft_failures: int = 0

    def record(self, step: StepRecord) -> None:
        self.recent.append(step)
        self.num_steps += 1
        self.num_generated += step.num_generated

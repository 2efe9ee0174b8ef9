"""The interface of executors, which run the target's passes on the host (`host_executor`) or the device (`device/`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from specinfer.core.logprob import Logprob
from specinfer.core.request import Span
from specinfer.core.tree import TokenTree
from specinfer.engine.learners import Learners
from specinfer.engine.timer import DeviceTimer, StageClock
from specinfer.verify import Acceptance

NO_LOGITS = torch.empty((0, 0))  # of requests that emit no token, and of those on the device


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a step for one request.

    Attributes:
        tree: The tree that was scored, or None for a chunk of a prompt.
        acceptance: The accepted path, or None if the request emits no token.
        logits: [len(tree), vocab] the target's logits at each node; empty on the device.
        logprobs: Of a request on the device that asks for them: log-probabilities of each emitted token and of the most
            probable ones, by token id, without texts.
        probs: Of a traced request on the device: what `emission.target_probs` returns.
        num_slots: Slots reserved for this step, or None if no later step has any.
    """

    span: Span
    tree: TokenTree | None
    acceptance: Acceptance | None = None
    logits: Tensor = NO_LOGITS
    logprobs: Sequence[dict[int, Logprob]] = ()
    probs: Sequence[float] = ()
    num_slots: int | None = None


@dataclass(slots=True)
class StepResult:
    """The result of a step, or the error of its pass.

    Attributes:
        spans: What the pass computed.
        num_read: Tokens that the drafter read for the first time.
        num_budgeted: Nodes that the policy allowed.
        waiting_time: Seconds in which the pass waited for weights.
        num_model_levels: Levels drafted by models.
        device_seconds: Seconds of stages that the device measured.
        is_first_of_size: True if a pass was captured, or prepared to be.
        error: The error of the pass, whose requests keep nothing that it computed.
    """

    spans: Sequence[Span]
    clock: StageClock
    outcomes: Sequence[Outcome] = ()
    num_read: int = 0
    num_budgeted: int = 0
    waiting_time: float = 0.0
    num_model_levels: int = 0
    device_seconds: Mapping[str, float] = field(default_factory=dict)
    is_first_of_size: bool = False
    error: Exception | None = None


Plan = TypeVar("Plan")


class Executor(Protocol[Plan]):
    """An executor of the steps of its requests, which end in the order in which they began.

    A step is planned, drafted and scored. It is verified at once on the host, or while the next one is under way on a
    device.
    """

    @property
    def num_in_flight(self) -> int:
        """Number of steps that were scored and are not verified."""
        ...

    def plan(self, learners: Learners, timer: DeviceTimer | None) -> Plan | None:
        """Return the requests of the next step and their budgets, or None if none can begin now.

        Args:
            learners: The policy, which sets the budgets, and the observers; they know whether any of them reads logits.
            timer: Timer that marks some steps on the device's timeline.
        """
        ...

    def draft(self, plan: Plan) -> None:
        """Grow the trees of this step, or prepare the drafters of a device to do so."""
        ...

    def score(self, plan: Plan) -> None:
        """Begin the target's pass over all nodes. A failure is in the result of the step."""
        ...

    def verify(self) -> StepResult:
        """Wait for the oldest step, and return what is accepted; the caller stores it in the cache and the requests."""
        ...

    def abandon(self) -> None:
        """Drop all steps in flight, and the last one verified if it is not stored; its requests compute it again."""
        ...

"""Learners: everything that learns from steps or observes them, without any effect on the outputs, and the metrics."""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from specinfer.core.request import Request
from specinfer.core.step_record import StepRecord
from specinfer.core.text import counted
from specinfer.core.tree import TokenTree
from specinfer.policy.base import SpeculationPolicy
from specinfer.verify import Acceptance


class Observer(Protocol):
    """Interface of objects that see what the engine does, in the engine's thread, and change nothing.

    Attributes:
        reads_logits: True if it reads logits, which requests served on the device do not have.
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
    num_device_steps: int = 0
    num_generated: int = 0
    num_preempted: int = 0
    num_draft_failures: int = 0

    def record(self, step: StepRecord) -> None:
        self.recent.append(step)
        self.num_steps += 1
        self.num_device_steps += step.is_on_device
        self.num_generated += step.num_generated


logger = logging.getLogger(__name__)


class Learners:
    """The metrics, the policy and the observers. If one fails, that is logged, and the step goes on."""

    def __init__(self, policy: SpeculationPolicy) -> None:
        self.policy = policy
        self.metrics = EngineMetrics()
        self.observers: list[Observer] = []

    @property
    def reads_logits(self) -> bool:
        """True if the policy or an observer reads logits."""
        return self.policy.reads_logits or any(observer.reads_logits for observer in self.observers)

    def on_tokens(
        self, request: Request, tree: TokenTree, acceptance: Acceptance, logits: Tensor, num_generated: int
    ) -> None:
        """Report the tokens that a request just emitted; `logits` [len(tree), vocab]."""
        for observer in tuple(self.observers):
            _call(observer, observer.on_tokens, request, tree, acceptance, logits, num_generated)
        _call(self.policy, self.policy.on_tokens, request, tree, acceptance, logits, num_generated)

    def explain(self, request: Request) -> None:
        """Note why most passes of a request that has ended had no tree, or that trees were cut."""
        stats, reasons = request.speculation, list[str]()
        if stats.num_plain_steps > stats.num_spec_steps:
            reasons.append(_crowded(request) or self._plain(request))
        if stats.num_cut_steps:
            reasons.append(f"trees were cut in {counted(stats.num_cut_steps, 'pass')} beside {_OTHERS}")
        stats.reason = "; ".join(reasons) or None

    def _plain(self, request: Request) -> str:
        """Return why the drafters or the policy had no tree for most passes of a request."""
        try:
            if (reason := self.policy.reason(request)) is not None:
                return reason
        except Exception:
            logger.exception("%s failed", type(self.policy).__name__)
        if not request.drafting.is_allowed:
            return "with draft tokens the model computed values that are not numbers"
        if request.num_output == 1:
            return "the output has a single token"
        return "the drafters proposed no tokens for most passes"

    def on_step(self, record: StepRecord, outcomes: Sequence[tuple[TokenTree, Acceptance]]) -> None:
        """Report a step that has ended."""
        self.metrics.record(record)
        _call(self.policy, self.policy.observe, record, outcomes)
        for observer in tuple(self.observers):
            _call(observer, observer.on_step, record)


_OTHERS = "requests of other API keys"


def _crowded(request: Request) -> str | None:
    """Return what took the trees of most plain passes, if the parts of other tenants did."""
    drafting, most = request.drafting, request.speculation.num_plain_steps / 2
    if drafting.num_crowded_steps <= most:
        return None
    if drafting.num_unread_steps > drafting.num_crowded_steps / 2:
        return f"a drafter takes too long to read the tokens so far beside {_OTHERS}"
    return f"{_OTHERS} left no time for draft tokens"


def _call(learner: object, report: Callable[..., None], *args: object) -> None:
    try:
        report(*args)
    except Exception:
        logger.exception("%s failed", type(learner).__name__)

"""Learners: everything that learns from steps or observes them, without any effect on the outputs."""

import logging
from collections.abc import Callable, Sequence

from torch import Tensor

from specinfer.core.request import Request
from specinfer.core.step_record import StepRecord
from specinfer.core.tree import TokenTree
from specinfer.engine.metrics import EngineMetrics, Observer
from specinfer.policy.base import SpeculationPolicy
from specinfer.verify import Acceptance

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
        """Note why most passes of a request that has ended had no tree."""
        stats = request.speculation
        if stats.num_plain_steps <= stats.num_spec_steps:
            return
        try:
            stats.reason = self.policy.reason(request)
        except Exception:
            logger.exception("%s failed", type(self.policy).__name__)
        if stats.reason is None:
            if not request.may_guess:
                stats.reason = "with draft tokens the model computed values that are not numbers"
            elif request.num_output == 1:
                stats.reason = "the output has a single token"
            else:
                stats.reason = "the drafters proposed no tokens for most passes"

    def on_step(self, record: StepRecord, outcomes: Sequence[tuple[TokenTree, Acceptance]]) -> None:
        """Report a step that has ended."""
        self.metrics.record(record)
        _call(self.policy, self.policy.observe, record, outcomes)
        for observer in tuple(self.observers):
            _call(observer, observer.on_step, record)


def _call(learner: object, report: Callable[..., None], *args: object) -> None:
    try:
        report(*args)
    except Exception:
        logger.exception("%s failed", type(learner).__name__)

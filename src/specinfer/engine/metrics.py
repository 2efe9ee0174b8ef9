"""Metrics made from the records of steps, and the interface of objects that observe them."""

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from specinfer.core.request import Request
from specinfer.core.step_record import StepRecord
from specinfer.core.tree import TokenTree
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

"""A step on the host that was scheduled and is not finished, with everything needed to finish it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from specinfer.core.request import Span
from specinfer.core.tree import TokenTree
from specinfer.engine.emission import reads_prompt
from specinfer.engine.timer import StageClock
from specinfer.model.runner import Pass


@dataclass(slots=True)
class InFlightStep:
    """One group of requests in a pass through the target's stages.

    Attributes:
        trees: Tree of each span, or None for a chunk of a prompt.
        num_read: Tokens that the drafter read for the first time.
        num_budgeted: Nodes that the policy allowed.
        clock: Clock of the time spent on this group alone.
        waited: Seconds that passes had waited for weights when this one began.
        num_programs: Passes that had been captured before it was drafted.
        reads_prompt: For each span, whether the pass has logits for log-probabilities of its prompt. Another output of
            the prompt may add these first.
        target_pass: The pass, or None if it could not begin; then `error` is raised when it is to be finished.
    """

    spans: Sequence[Span]
    trees: Sequence[TokenTree | None]
    num_read: int
    num_budgeted: int
    clock: StageClock
    waited: float = 0.0
    num_programs: int = 0
    target_pass: Pass | None = None
    error: Exception | None = None
    reads_prompt: Sequence[bool] = field(init=False)

    def __post_init__(self) -> None:
        self.reads_prompt = [reads_prompt(span) for span in self.spans]

    def add(self, spans: Sequence[Span]) -> None:
        """Add spans without draft tokens to a step that has not begun."""
        self.spans, self.trees = [*self.spans, *spans], [*self.trees, *(span.tree() for span in spans)]
        self.reads_prompt = [*self.reads_prompt, *map(reads_prompt, spans)]

    @property
    def num_guessed(self) -> int:
        """Number of nodes of all trees."""
        return sum(tree.num_guessed for tree in self.trees if tree is not None)

    def wait(self) -> Tensor:
        """Wait for the pass and return its logits: [rows, vocab].

        Raises:
            Exception: Any failure of the pass.
        """
        if self.error is not None:
            raise self.error
        assert self.target_pass is not None
        return self.target_pass.wait()

"""A pass of the target that was begun and has not ended, with all that is needed to end it."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from specinfer.engine.metrics import StageClock
from specinfer.model.runner import Pass
from specinfer.request import Span
from specinfer.tree import TokenTree


@dataclass(slots=True)
class InFlightStep:
    """One group of requests on its way through the target's stages.

    Attributes:
        trees: For each span; None for a chunk of a prompt.
        num_read: Tokens that the drafter met for the first time.
        num_budgeted: Nodes that the policy allowed.
        clock: Of what this group alone took.
        waited: Seconds that passes had waited for weights when it began.
        target_pass: None: it could not be begun; `error` says why, when it is this pass's turn to end.
    """

    spans: Sequence[Span]
    trees: Sequence[TokenTree | None]
    num_read: int
    num_budgeted: int
    clock: StageClock
    waited: float = 0.0
    target_pass: Pass | None = None
    error: Exception | None = None

    def saying(self) -> list[tuple[Span, TokenTree]]:
        """Who may say tokens now, with what was guessed for it; not those that ended meanwhile."""
        both = zip(self.spans, self.trees, strict=True)
        return [(span, tree) for span, tree in both if tree is not None and not span.request.is_finished]

    def wait(self) -> Tensor:
        """[rows, vocab] logits of the pass, once it has ended.

        Raises:
            Exception: Whatever went wrong in it.
        """
        if self.error is not None:
            raise self.error
        assert self.target_pass is not None
        return self.target_pass.wait()

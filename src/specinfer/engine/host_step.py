"""HostStep: a step on the host from its plan to its results, and the rows of its target pass.

For each span the model gets the known tokens, the last of which is the root of the tree, and then the draft tokens.
Each node has logits, and so have the known tokens before it if log-probabilities of the prompt are asked for.

    rows of logits    [known tokens before the tree, if asked for | root, draft tokens]
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from specinfer.core.request import Span
from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.engine.emission import note_prompt, scores_prompt
from specinfer.engine.timer import StageClock
from specinfer.model.batch import Piece
from specinfer.model.kv_cache import KVCache
from specinfer.model.runner import Pass


@dataclass(slots=True)
class HostStep:
    """One group of requests in a pass through the target's stages.

    Attributes:
        budgets: The nodes that each span's tree may have, as planned.
        trees: Tree of each span, or None for a chunk of a prompt.
        num_read: Tokens that the drafter read for the first time.
        num_model_levels: Levels drafted by models.
        clock: Clock of the time spent on this group alone.
        waited: Seconds that passes had waited for weights when this one began.
        num_programs: Passes that had been captured before it was drafted.
        scores_prompt: For each span, whether the pass has logits for log-probabilities of its prompt. Another output of
            the prompt may add these first.
        target_pass: The pass, or None if it could not begin; then `error` is raised when it is to be finished.
    """

    spans: Sequence[Span]
    clock: StageClock
    budgets: Sequence[TreeBudget] = ()
    num_programs: int = 0
    num_read: int = 0
    num_model_levels: int = 0
    waited: float = 0.0
    target_pass: Pass | None = None
    error: Exception | None = None
    trees: Sequence[TokenTree | None] = field(init=False)
    scores_prompt: Sequence[bool] = field(init=False)

    def __post_init__(self) -> None:
        self.trees = [span.tree() for span in self.spans]
        self.scores_prompt = [scores_prompt(span) for span in self.spans]

    def add(self, spans: Sequence[Span]) -> None:
        """Add spans without draft tokens to a step that has not begun."""
        self.spans, self.trees = [*self.spans, *spans], [*self.trees, *(span.tree() for span in spans)]
        self.scores_prompt = [*self.scores_prompt, *map(scores_prompt, spans)]

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


def pieces_of(step: HostStep, cache: KVCache) -> list[Piece]:
    """Reserve slots for the new tokens of a step, and return what the model gets for each span."""
    pieces = []
    for span, tree, reads in zip(step.spans, step.trees, step.scores_prompt, strict=True):
        request_id = span.request.request_id
        num_new = span.end - span.start + (tree.num_guessed if tree else 0)
        slots = cache.reserve(request_id, num_new)
        piece = Piece.from_span(span.tokens, tree, cache.slots(request_id), slots)
        if reads:
            piece = replace(piece, num_logits=num_new)
        if span.request.adapter is not None:
            piece = replace(piece, adapter=span.request.adapter.table)
        pieces.append(piece)
    return pieces


def logits_by_tree(step: HostStep, logits: Tensor) -> list[Tensor]:
    """Return the logits of each tree: [nodes, vocab]. Rows for prompt log-probabilities go to their requests.

    Requests that ended while the pass was in flight are skipped.
    """
    rows, start = [], 0
    for span, tree, reads in zip(step.spans, step.trees, step.scores_prompt, strict=True):
        num_tree = len(tree) if tree else 0
        if reads:
            num_before = span.end - span.start - (1 if tree else 0)
            if not span.request.is_finished:
                note_prompt(span, logits[start : start + num_before + (1 if tree else 0)])
            start += num_before
        if tree and not span.request.is_finished:
            rows.append(logits[start : start + num_tree])
        start += num_tree
    return rows

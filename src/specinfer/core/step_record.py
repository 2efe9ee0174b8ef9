"""The counts and times of one step: what policies, metrics and observers learn from it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from specinfer.core.request import Span
from specinfer.core.tree import TokenTree


class PromptCounts(NamedTuple):
    """Tokens of prompts in one step.

    Attributes:
        num_new: Tokens that were computed for the first time, or found in the cache by a request that began.
        num_begun: Tokens of all prompts of requests that began.
        num_cached: Of these, tokens found in the cache.
    """

    num_new: int = 0
    num_begun: int = 0
    num_cached: int = 0

    @classmethod
    def note(cls, spans: Sequence[Span]) -> Self:
        """Note in the requests of a step that its spans are computed, and return the counts."""
        begun = [span.request for span in spans if not span.request.num_prompt_computed]
        return cls(
            sum(span.request.note_computed(span.end) for span in spans),
            sum(len(request.prompt_ids) for request in begun),
            sum(request.num_cached for request in begun),
        )


NO_PROMPTS = PromptCounts()


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
    is_first_of_size: bool = False  # a pass of the target or a drafter was captured, which took most of the time
    is_on_device: bool = False  # a step on the device, not a host step
    prompts: PromptCounts = NO_PROMPTS

    @property
    def num_drafted_levels(self) -> int:
        """The number of levels that took passes: those of models, or all if lookups are counted, too."""
        return self.num_levels if self.num_model_levels is None else self.num_model_levels

    @classmethod
    def from_step(
        cls,
        spans: Sequence[Span],
        trees: Sequence[TokenTree | None],
        num_generated: int,
        num_read: int,
        seconds: Mapping[str, float],
        num_budgeted: int = 0,
        waiting_time: float = 0.0,
        num_model_levels: int = 0,
        is_first_of_size: bool = False,
        is_on_device: bool = False,
        prompts: PromptCounts = NO_PROMPTS,
    ) -> Self:
        """Make the record of a step from its seconds by stage."""
        num_guessed = sum(tree.num_guessed for tree in trees if tree is not None)
        return cls(
            num_requests=len(spans),
            num_rows=sum(span.end - span.start for span in spans) + num_guessed,
            num_guessed=num_guessed,
            num_levels=max((tree.max_depth for tree in trees if tree is not None), default=0),
            num_generated=num_generated,
            num_read=num_read,
            draft_time=seconds["draft"],
            target_time=seconds["target"] + seconds["verify"],
            rest_time=seconds["rest"],
            num_budgeted=num_budgeted,
            num_model_levels=num_model_levels,
            waiting_time=waiting_time,
            verify_time=seconds["verify"],
            num_context=sum(span.start for span in spans),
            is_first_of_size=is_first_of_size,
            is_on_device=is_on_device,
            prompts=prompts,
        )

    @property
    def time(self) -> float:
        return self.draft_time + self.target_time + self.rest_time

    @property
    def reads_prompts(self) -> bool:
        """True if a request read more than one known token. Chunks of one token do not count."""
        return self.num_rows != self.num_requests + self.num_guessed

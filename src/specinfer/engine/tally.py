"""Counts of the engine's work, from which the metrics and the log lines are made.

Only the engine's thread counts; other threads read. The counts are integers and may be a step apart from one another.
"""

from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field, fields

from torch import Tensor

from specinfer.core.request import Request
from specinfer.core.step_record import StepRecord
from specinfer.core.tree import TokenTree
from specinfer.verify import Acceptance

MAX_POSITION = 32  # tokens at deeper positions are counted at the last one


@dataclass(slots=True)
class Totals:
    """Counts since the start, or in an interval.

    Attributes:
        num_prompt_tokens: Tokens of prompts that were computed, or found in the prefix cache.
        num_begun_tokens: Tokens of all prompts that began, which were looked up in the prefix cache.
        num_cached_tokens: Tokens that were found there.
        num_drafts: Passes of one request with at least one proposed token.
        accepted_at: Number of accepted tokens at each depth of the path, from 0.
        read_by, accepted_by: Nodes by drafter; a node that two drafters proposed counts for both.
        drafts_by_rule, generated_by_rule: Such passes and their tokens by the rule that was chosen for the request.
    """

    num_prompt_tokens: int = 0
    num_begun_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_at: list[int] = field(default_factory=lambda: [0] * MAX_POSITION)
    read_by: Counter[str] = field(default_factory=Counter)
    accepted_by: Counter[str] = field(default_factory=Counter)
    drafts_by_rule: Counter[str] = field(default_factory=Counter)
    generated_by_rule: Counter[str] = field(default_factory=Counter)

    def since(self, earlier: "Totals") -> "Totals":
        """Return the counts between an earlier copy and this one."""
        counts = {count.name: getattr(self, count.name) for count in fields(self) if count.name != "accepted_at"}
        changes = {name: count - getattr(earlier, name) for name, count in counts.items()}
        accepted_at = [now - before for now, before in zip(self.accepted_at, earlier.accepted_at, strict=True)]
        return Totals(**changes, accepted_at=accepted_at)


class Tally:
    """A counter of tokens in the engine's thread."""

    reads_logits = False

    def __init__(self) -> None:
        self.totals = Totals()

    def on_tokens(
        self, request: Request, tree: TokenTree, acceptance: Acceptance, logits: Tensor, num_generated: int
    ) -> None:
        totals = self.totals
        totals.num_generated_tokens += num_generated
        if not tree.num_guessed:
            return
        path = acceptance.path[:num_generated]  # the output may have ended within the path
        totals.num_drafts += 1
        totals.num_draft_tokens += tree.num_guessed
        totals.num_accepted_tokens += len(path)
        if request.verification is not None:
            totals.drafts_by_rule[request.verification] += 1
            totals.generated_by_rule[request.verification] += num_generated
        for position in range(len(path)):
            totals.accepted_at[min(position, MAX_POSITION - 1)] += 1
        kept = set(path)
        draws = tree.arrays.draws
        for node, maker in set(zip(draws.nodes.tolist(), draws.makers.tolist(), strict=True)):
            name = draws.names[maker]
            totals.read_by[name] += 1
            totals.accepted_by[name] += node in kept

    def on_step(self, record: StepRecord) -> None:
        prompts = record.prompts
        self.totals.num_prompt_tokens += prompts.num_new
        self.totals.num_begun_tokens += prompts.num_begun
        self.totals.num_cached_tokens += prompts.num_cached

    def copy(self) -> Totals:
        """Return a copy of the counts; for other threads."""
        while True:
            try:
                return deepcopy(self.totals)
            except RuntimeError:  # in the rare moment when a drafter is counted for the first time
                continue

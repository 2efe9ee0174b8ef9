"""Record of speculation in one request: counters, and traces of its steps."""

from dataclasses import dataclass, field
from typing import TypedDict


class SpeculativeDecodingMetrics(TypedDict, total=False):
    """Speculation counters of a request, empty until it has ended.

    The names are vLLM's, except `num_target_passes`, `tokens_per_pass` and `reason`.

    Attributes:
        mean_acceptance_length: Tokens for each pass with a tree: the accepted ones and the one after them.
        draft_acceptance_rate: Accepted share of the draft tokens.
        acceptance_histogram: Passes with a tree, by the number of accepted tokens.
        acceptance_histogram_by_draft_length: The same for each depth of trees.
        num_spec_steps: Target passes with at least one draft token.
        num_spec_tokens: Depth of the deepest tree.
        num_target_passes: Target passes that generated tokens, with and without trees.
        tokens_per_pass: Tokens generated per target pass; 1.0 is plain decoding.
        reason: Why most of the passes had no tree, or smaller ones than asked for; None if they had.
    """

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    acceptance_histogram_by_draft_length: dict[str, list[int]]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    num_target_passes: int
    tokens_per_pass: float
    reason: str | None


@dataclass(slots=True)
class SpeculationStats:
    """Speculation counters of one request.

    Attributes:
        num_cut_steps: Passes whose tree was made smaller than the request asked for, beside requests of other tenants.
        reason: Why most of the passes had no tree, or smaller ones than asked for; None if they had, or the request has
            not ended.
    """

    max_depth: int = 0
    num_spec_steps: int = 0  # target passes with at least one draft token
    num_plain_steps: int = 0  # target passes that emitted a token without a draft
    num_draft_tokens: int = 0
    num_generated: int = 0
    num_cut_steps: int = 0
    histograms: dict[int, dict[int, int]] = field(default_factory=dict)  # tree depth -> accepted tokens -> steps
    reason: str | None = None

    def record(self, num_guessed: int, depth: int, num_accepted: int, num_generated: int) -> None:
        """Count one pass: the size and depth of its tree, and the accepted and emitted tokens."""
        self.num_generated += num_generated
        if not num_guessed:
            self.num_plain_steps += 1
            return
        self.max_depth = max(self.max_depth, depth)
        self.num_spec_steps += 1
        self.num_draft_tokens += num_guessed
        histogram = self.histograms.setdefault(depth, {})
        histogram[num_accepted] = histogram.get(num_accepted, 0) + 1

    def __add__(self, other: "SpeculationStats") -> "SpeculationStats":
        histograms = {
            depth: _summed(self.histograms.get(depth, {}), other.histograms.get(depth, {}))
            for depth in sorted({*self.histograms, *other.histograms})
        }
        return SpeculationStats(
            max(self.max_depth, other.max_depth),
            self.num_spec_steps + other.num_spec_steps,
            self.num_plain_steps + other.num_plain_steps,
            self.num_draft_tokens + other.num_draft_tokens,
            self.num_generated + other.num_generated,
            self.num_cut_steps + other.num_cut_steps,
            histograms,
            self.reason or other.reason,
        )

    @property
    def acceptance_histogram(self) -> dict[int, int]:
        """Number of steps, by number of accepted tokens."""
        return _summed(*self.histograms.values())

    @property
    def num_unaided_steps(self) -> int:
        """Target passes that emitted a single token, with or without draft tokens."""
        return self.num_plain_steps + sum(histogram.get(0, 0) for histogram in self.histograms.values())

    @property
    def num_accepted_draft_tokens(self) -> int:
        return sum(accepted * steps for accepted, steps in self.acceptance_histogram.items())

    @property
    def num_target_passes(self) -> int:
        """Target passes that emitted tokens; prefill passes before the first token do not count."""
        return self.num_spec_steps + self.num_plain_steps

    @property
    def tokens_per_pass(self) -> float:
        """Tokens emitted per target pass; 1.0 is plain decoding."""
        passes = self.num_target_passes
        return self.num_generated / passes if passes else 0.0

    def as_dict(self) -> SpeculativeDecodingMetrics:
        accepted, steps = self.num_accepted_draft_tokens, self.num_spec_steps
        all_depths = self.acceptance_histogram
        return {
            "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
            "draft_acceptance_rate": accepted / self.num_draft_tokens if self.num_draft_tokens else 0.0,
            "acceptance_histogram": [all_depths.get(i, 0) for i in range(self.max_depth + 1)],
            "acceptance_histogram_by_draft_length": {
                str(depth): [histogram.get(i, 0) for i in range(depth + 1)]
                for depth, histogram in sorted(self.histograms.items())
            },
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": self.num_draft_tokens,
            "num_spec_tokens": self.max_depth,
            "num_target_passes": self.num_target_passes,
            "tokens_per_pass": self.tokens_per_pass,
            "reason": self.reason,
        }


def _summed(*histograms: dict[int, int]) -> dict[int, int]:
    total: dict[int, int] = {}
    for histogram in histograms:
        for accepted, steps in histogram.items():
            total[accepted] = total.get(accepted, 0) + steps
    return total


@dataclass(frozen=True, slots=True)
class TracedNode:
    """One draft token of a traced step.

    Attributes:
        parent: Index of its parent; 0 is the root, and the first node of `StepTrace.nodes` is 1.
        drafters: Names of the drafters that proposed it.
        q: Confidence as the drafters reported it, from 0 to 1.
        p: Target probability of the token after its parent, before processing.
    """

    token: int
    parent: int
    drafters: tuple[str, ...]
    q: float
    p: float
    accepted: bool


@dataclass(frozen=True, slots=True)
class StepTrace:
    """The token tree of one request in one step, and the result of its verification.

    Attributes:
        time: Seconds since the epoch.
        position: Position of the root in prompt and output, from 0.
        nodes: Draft tokens in tree order, without the root.
        path: Indices of the accepted nodes.
        next_token: Token emitted by the target after the path, or None if the output ended inside the path.
    """

    time: float
    position: int
    root: int
    nodes: tuple[TracedNode, ...]
    path: tuple[int, ...]
    next_token: int | None
    next_p: float | None

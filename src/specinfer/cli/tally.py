"""Statistics of a trace's steps: how often proposed tokens were accepted, and how often that was expected."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from specinfer.cli.recording import Step


@dataclass(slots=True)
class AcceptanceCounts:
    """Counts of the proposed tokens that were verified, which are those whose parent was accepted.

    Attributes:
        q: Sum of the drafters' probabilities.
        p: Sum of the target's probabilities. With sampling from the plain distribution, it is the expected `kept`.
    """

    tried: int = 0
    kept: int = 0
    q: float = 0.0
    p: float = 0.0

    def add(self, q: float | None, p: float | None, *, kept: bool) -> None:
        self.tried += 1
        self.kept += kept
        self.q += q or 0.0
        self.p += p or 0.0


@dataclass(slots=True)
class Tally:
    """Counts over any number of steps."""

    num_passes: int = 0
    num_generated: int = 0
    num_guessed: int = 0
    num_kept: int = 0
    by_depth: dict[int, AcceptanceCounts] = field(default_factory=dict)
    by_rank: dict[int, AcceptanceCounts] = field(default_factory=dict)
    by_drafter: dict[str, AcceptanceCounts] = field(default_factory=dict)
    passes_by_generated: dict[int, int] = field(default_factory=dict)

    def add(self, steps: Iterable[Step]) -> None:
        for step in steps:
            self._add(step)

    def _add(self, step: Step) -> None:
        self.num_passes += 1
        self.num_generated += step.num_generated
        self.num_guessed += len(step.nodes)
        self.num_kept += len(step.path)
        self.passes_by_generated[step.num_generated] = self.passes_by_generated.get(step.num_generated, 0) + 1
        tested = {0, *step.path}
        if step.next is None and step.path:
            tested.remove(step.path[-1])  # the output ended at this node, so its children were not verified
        for place, node in enumerate(step.nodes, start=1):
            if node.parent in tested:
                kept = place in step.path
                self.by_depth.setdefault(node.depth, AcceptanceCounts()).add(node.q, node.p, kept=kept)
                self.by_rank.setdefault(node.rank, AcceptanceCounts()).add(node.q, node.p, kept=kept)
                for name in node.drafters:
                    self.by_drafter.setdefault(name, AcceptanceCounts()).add(node.q, node.p, kept=kept)

    @property
    def tokens_per_pass(self) -> float:
        return self.num_generated / self.num_passes if self.num_passes else 0.0

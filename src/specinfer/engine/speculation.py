"""How far to guess: the policy that gives each request its tree budget, step by step."""

from collections.abc import Sequence
from typing import Protocol

from specinfer.engine.metrics import StepRecord
from specinfer.request import Span
from specinfer.tree import TokenTree, TreeBudget
from specinfer.verify import Acceptance


class Policy(Protocol):
    """Decides budgets before a step and learns from what came of it."""

    def budgets(self, spans: Sequence[Span]) -> list[TreeBudget]:
        """One budget for each span; the empty one means plain decoding, and costs nothing."""
        ...

    def observe(self, step: StepRecord, outcomes: Sequence[tuple[TokenTree, Acceptance]]) -> None:
        """What the step cost, and what each tree yielded."""
        ...


class FixedPolicy:
    """The same expansion for every request in every step."""

    def __init__(self, widths: Sequence[int]) -> None:
        self._budget = TreeBudget(tuple(widths))

    def budgets(self, spans: Sequence[Span]) -> list[TreeBudget]:
        return [self._budget] * len(spans)

    def observe(self, step: StepRecord, outcomes: Sequence[tuple[TokenTree, Acceptance]]) -> None:
        pass


def make_policy(widths: Sequence[int] | None, target: object, drafter: object) -> Policy:
    return FixedPolicy((1, 1, 1, 1) if widths is None else widths)

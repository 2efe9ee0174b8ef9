"""Speculation policies: what gives each request its tree budget, step by step."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from specinfer.core.request import Request, Span
from specinfer.core.step_record import StepRecord
from specinfer.core.tree import OFF, TokenTree, TreeBudget
from specinfer.core.tree_shape import TreeShape
from specinfer.policy.slo_planner import SLOPlanner
from specinfer.policy.speedup import Speedup
from specinfer.verify import Acceptance

TREE_OFF = "tree off: plain decoding was asked for"
NO_DRAFTER = "no drafter is loaded"


class SpeculationPolicy(Protocol):
    """Interface that sets budgets before a step, and may learn from its results and plan the batch.

    A subclass defines `budgets`. What else it does not define is that of a policy which learns and plans nothing.
    """

    @property
    def reads_logits(self) -> bool:
        """True if it reads logits, as `Observer.reads_logits`."""
        return False

    @property
    def planner(self) -> SLOPlanner | None:
        """The planner for latency targets, or None if nothing has costs."""
        return None

    def prepare(self) -> None:
        """Measure the costs that a request with "auto" needs, so that requests need not wait for it later."""
        return

    def budgets(self, spans: Sequence[Span], reading: Sequence[Span] = ()) -> list[TreeBudget]:
        """Return one budget for each span; the empty one means plain decoding, and costs nothing.

        Args:
            spans: Spans that emit tokens.
            reading: Spans of the same step that read parts of prompts.
        """
        ...

    def with_forced(self, spans: Sequence[Span], budgets: Sequence[TreeBudget]) -> list[TreeBudget]:
        """Return the budgets of `budgets` with what the grammars of requests may add, which takes no time to draft."""
        return list(budgets)

    def observe(self, step: StepRecord, outcomes: Sequence[tuple[TokenTree, Acceptance]]) -> None:
        """Learn from the costs of a step, and from each tree and what was accepted of it."""
        return

    def on_tokens(
        self, request: Request, tree: TokenTree, acceptance: Acceptance, logits: Tensor, num_generated: int
    ) -> None:
        """Receive the emitted tokens of a request, as `Observer.on_tokens`; called before `observe`."""
        return

    def reason(self, request: Request) -> str | None:
        """Return one line on why this request gets no tree at present, or None if it gets one."""
        return None

    @property
    def speedup(self) -> Speedup | None:
        """The expected and the measured speed of "auto", or None if it does not decide."""
        return None

    def summary(self) -> str | None:
        """Return one line on what "auto" promises for a single request, or None if it does not decide."""
        return None


class FixedPolicy(SpeculationPolicy):
    """A speculation policy with the same budget for every request in every step.

    Args:
        budget: The budget.
        why_off: Reason for an empty budget.
    """

    def __init__(self, budget: TreeBudget = OFF, why_off: str = TREE_OFF) -> None:
        self._budget, self._why_off = budget, why_off

    def budgets(self, spans: Sequence[Span], reading: Sequence[Span] = ()) -> list[TreeBudget]:
        return [self._budget] * len(spans)

    def reason(self, request: Request) -> str | None:
        return None if self._budget.max_nodes else self._why_off


_USUAL_AUTO = (TreeBudget(max_nodes=15, max_depth=6), TreeBudget(max_nodes=63, max_depth=8))


def usual_budgets(shape: TreeShape) -> tuple[TreeBudget, ...]:
    """Return budgets whose trees hold most of those that a policy for this shape asks for, the smallest first."""
    return _USUAL_AUTO if shape.is_auto else (budget_of(shape),)


def budget_of(shape: TreeShape, num_drafters: int = 1) -> TreeBudget:
    """Return the budget for a shape other than "auto"; each of the drafters grows a fixed expansion."""
    assert not shape.is_auto
    if shape.widths:
        return TreeBudget.expansion(shape.widths, num_drafters)
    return TreeBudget(shape.max_nodes, shape.max_depth)

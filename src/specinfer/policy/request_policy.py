"""The speculation policy of an engine: what each request asks for, or else the default."""

from collections.abc import Callable, Sequence

from torch import Tensor

from specinfer.core.request import Request, Span
from specinfer.core.step_record import StepRecord
from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.core.tree_shape import TreeShape, parse_tree
from specinfer.drafters.lookup.grammar import has_forced
from specinfer.policy.auto_policy import AutoPolicy
from specinfer.policy.base import TREE_OFF, FixedPolicy, SpeculationPolicy, budget_of
from specinfer.policy.cost_model import CostModel
from specinfer.policy.slo_planner import SLOPlanner
from specinfer.policy.speedup import Speedup
from specinfer.verify import Acceptance


class RequestPolicy(SpeculationPolicy):
    """A speculation policy that lets the setting of a request override the default.

    Args:
        default: Policy for requests without a setting.
        make_auto: Function that makes the policy for requests that ask for "auto"; called for the first one.
        num_drafters: Number of drafters; each grows a fixed expansion.
        is_auto: True if the default is the policy that "auto" stands for.
    """

    def __init__(
        self,
        default: SpeculationPolicy,
        make_auto: Callable[[], SpeculationPolicy],
        num_drafters: int = 1,
        *,
        is_auto: bool = False,
    ) -> None:
        self._default = default
        self._make_auto = make_auto
        self._auto: SpeculationPolicy | None = None
        self._num_drafters = num_drafters
        self._of_default = (None, "auto") if is_auto else (None,)

    @property
    def _policies(self) -> list[SpeculationPolicy]:
        return [self._default] if self._auto is None else [self._default, self._auto]

    @property
    def reads_logits(self) -> bool:
        return any(policy.reads_logits for policy in self._policies)

    @property
    def planner(self) -> SLOPlanner | None:
        return next((policy.planner for policy in self._policies if policy.planner is not None), None)

    def prepare(self) -> None:
        if self._auto is None and "auto" not in self._of_default:
            self._auto = self._make_auto()

    def budgets(self, spans: Sequence[Span], reading: Sequence[Span] = ()) -> list[TreeBudget]:
        of_default, of_auto = [], []
        for span in spans:
            if span.request.params.tree in self._of_default:
                of_default.append(span)
            elif span.request.params.tree == "auto":
                of_auto.append(span)
        if of_auto:
            self.prepare()
        from_default = iter(self._default.budgets(of_default, reading) if of_default else ())
        from_auto = iter(self._auto.budgets(of_auto, reading) if of_auto and self._auto else ())
        budgets = []
        for span in spans:
            tree = span.request.params.tree
            if tree is None or tree in self._of_default:
                budget = next(from_default)
            elif tree == "auto":
                budget = next(from_auto)
            else:
                budget = budget_of(parse_tree(tree), self._num_drafters)
            if budget.widths and span.request.prediction_ids:  # the prediction is one more drafter
                budget = budget.with_drafter()
            budgets.append(budget)
        return budgets

    def with_forced(self, spans: Sequence[Span], budgets: Sequence[TreeBudget]) -> list[TreeBudget]:
        """Return the budgets with what grammars add; a grammar is one more drafter of a fixed expansion."""
        widened = list(budgets)
        for policy in self._policies:
            asked = [i for i, span in enumerate(spans) if self._policy_of(span.request.params.tree) is policy]
            of_policy = policy.with_forced([spans[i] for i in asked], [budgets[i] for i in asked])
            for i, budget in zip(asked, of_policy, strict=True):
                widened[i] = budget
        return [
            budget.with_drafter() if budget.widths and has_forced(span.request) else budget
            for span, budget in zip(spans, widened, strict=True)
        ]

    def _policy_of(self, tree: str | None) -> SpeculationPolicy | None:
        """Return the policy for requests with this setting, or None if it is a shape."""
        return self._default if tree in self._of_default else self._auto if tree == "auto" else None

    def observe(self, step: StepRecord, outcomes: Sequence[tuple[TokenTree, Acceptance]]) -> None:
        for policy in self._policies:
            policy.observe(step, outcomes)

    def on_tokens(
        self, request: Request, tree: TokenTree, acceptance: Acceptance, logits: Tensor, num_generated: int
    ) -> None:
        for policy in self._policies:
            policy.on_tokens(request, tree, acceptance, logits, num_generated)

    def reason(self, request: Request) -> str | None:
        tree = request.params.tree
        if tree in self._of_default:
            return self._default.reason(request)
        if tree == "auto" and self._auto is not None:
            return self._auto.reason(request)
        return TREE_OFF if tree == "off" else None

    @property
    def speedup(self) -> Speedup | None:
        return next((policy.speedup for policy in self._policies if policy.speedup is not None), None)

    def summary(self) -> str | None:
        return self._default.summary()


def make_policy(
    shape: TreeShape,
    make_costs: Callable[[], CostModel],
    num_drafters: int = 1,
    auto: Callable[[CostModel], SpeculationPolicy] = AutoPolicy,
) -> RequestPolicy:
    """Make the policy for a shape; costs are measured only if something asks for "auto".

    Args:
        shape: Tree shape of requests without a setting.
        make_costs: Function that measures or loads the costs.
        num_drafters: Number of drafters; each grows a fixed expansion.
        auto: Function that makes the policy for "auto" from costs.
    """

    def make_auto() -> SpeculationPolicy:
        return auto(make_costs())

    default = make_auto() if shape.is_auto else FixedPolicy(budget_of(shape, num_drafters))
    return RequestPolicy(default, make_auto, num_drafters, is_auto=shape.is_auto)

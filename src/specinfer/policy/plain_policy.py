"""The speculation policy of an engine without speculation whose costs are known: latency targets are planned for."""

from collections.abc import Sequence

from specinfer.core.step_record import StepRecord
from specinfer.core.tree import OFF, TokenTree
from specinfer.policy.acceptance import AcceptanceModel
from specinfer.policy.base import FixedPolicy
from specinfer.policy.cost_model import CostModel
from specinfer.policy.optimizer import TreeOptimizer, TreeSizes
from specinfer.policy.slo_planner import SLOPlanner
from specinfer.verify import Acceptance


class PlannedPlainPolicy(FixedPolicy):
    """Plain decoding, with a planner of the batch and of the reading of prompts that knows what passes cost.

    Args:
        costs: Costs of passes; no drafter belongs to them.
        why_off: Reason for the lack of trees.
    """

    def __init__(self, costs: CostModel, why_off: str) -> None:
        super().__init__(OFF, why_off)
        self._costs = costs
        self.planner = SLOPlanner(costs, TreeOptimizer(costs, AcceptanceModel(), TreeSizes.none()))

    def observe(self, step: StepRecord, outcomes: Sequence[tuple[TokenTree, Acceptance]]) -> None:
        self.planner.observe(step)
        if not step.is_first_of_size:
            learn = self._costs.observe if step.num_rows == len(outcomes) else self._costs.observe_prompts
            learn(step)

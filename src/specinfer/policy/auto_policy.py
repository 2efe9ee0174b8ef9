"""The speculation policy "auto": the tree size that is fastest at the observed acceptance and costs, or plain decoding.

Each step teaches the acceptance model and the cost model; the optimiser chooses from both. So a busy batch or a poor
drafter leads to small trees or none, and an idle machine and a good drafter to large ones.
"""

from collections.abc import Sequence

from torch import Tensor

from specinfer.core.request import Request, Span
from specinfer.core.step_record import StepRecord
from specinfer.core.text import counted
from specinfer.core.tree import OFF, TokenTree, TreeBudget
from specinfer.policy.acceptance import AcceptanceModel
from specinfer.policy.cost_model import CostModel
from specinfer.policy.optimizer import TreeOptimizer, num_to_read
from specinfer.verify import Acceptance


class AutoPolicy:
    """A speculation policy that chooses the trees with the most expected tokens per second for the whole batch."""

    reads_logits = False
    REVIEW = 8  # steps between choices for the same number of requests, because choosing costs time too
    RETRY = 50  # steps without speculation before one step tests whether it would be worthwhile, for whatever reason

    def __init__(self, costs: CostModel) -> None:
        self.costs = costs
        self.acceptance = AcceptanceModel()
        self.optimizer = TreeOptimizer(costs, self.acceptance)
        self._budget = OFF
        self._num_plain = 0
        self._num_requests = self._age = 0  # those of the last choice

    def budgets(self, spans: Sequence[Span]) -> list[TreeBudget]:
        if len(spans) != self._num_requests or self._age >= (1 if self.optimizer.sizes.is_wide else self.REVIEW):
            self._budget = self.optimizer.choose(len(spans))
            self._num_requests, self._age = len(spans), 0
        self._age += 1
        if self._budget.max_nodes:
            pays = [self.optimizer.pays_to_read(span.request, len(spans)) for span in spans]
            if any(pays):
                self._num_plain = 0
                return [self._budget if is_worthwhile else OFF for is_worthwhile in pays]
        self._num_plain += 1
        if self._num_plain % self.RETRY == 0 and self.optimizer.could_pay(len(spans)):
            probed = min(spans, key=lambda span: num_to_read(span.request))
            return [TreeBudget.expansion((1, 1)) if span is probed else OFF for span in spans]
        return [OFF] * len(spans)

    def observe(self, step: StepRecord, outcomes: Sequence[tuple[TokenTree, Acceptance]]) -> None:
        reads_prompt = step.num_rows != len(outcomes) + step.num_guessed
        if not step.is_first_of_size:  # otherwise its time is mostly that of a capture
            learn = self.costs.observe_prompts if reads_prompt else self.costs.observe
            learn(step)
        for tree, acceptance in outcomes:
            if tree.num_guessed:
                self.acceptance.observe(tree, acceptance)

    def on_tokens(
        self, request: Request, tree: TokenTree, acceptance: Acceptance, logits: Tensor, num_generated: int
    ) -> None:
        pass

    def reason(self, request: Request) -> str | None:
        num_requests = max(self._num_requests, 1)
        if not self._budget.max_nodes:
            return f"auto: plain decoding, {self.optimizer.why_plain(num_requests)}"
        if request.drafter_knows or request.num_output == 1:
            return None
        return "auto: plain decoding, reading the prompt with the drafter takes longer than its draft tokens save"

    def summary(self) -> str:
        """Return one line on what the costs and the acceptance promise for a single request."""
        trial = TreeOptimizer(self.costs, self.acceptance)
        budget = trial.choose(1)
        if not budget.max_nodes:
            return f"auto: plain decoding, {trial.why_plain(1)}"
        tree = "up to " + counted(budget.max_nodes, "draft token")
        return f"auto: {tree} for a single request, {trial.why_tree()}"

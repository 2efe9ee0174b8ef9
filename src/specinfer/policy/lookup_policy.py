"""Budgets for lookups alone, where draft tokens of no model pay.

A lookup drafts without a pass of a model, so it may pay where a model's passes take longer than their tokens save: on
text that repeats itself, its prompt or an earlier answer. Looking up takes time too, which on other text is lost. So
lookups rest while they lose more than a small share of the time, and try again now and then and with a new request.
"""

from collections.abc import Collection, Sequence

from specinfer.core.request import Span
from specinfer.core.step_record import StepRecord
from specinfer.core.tree import OFF, TreeBudget
from specinfer.policy.cost_model import CostModel
from specinfer.verify import Acceptance

MAX_NODES = 16  # of each request
_MOST_LIKELY = 0.5  # no draft token has to be likelier than this
_MARGIN = 1.25  # factor by which a draft token must save more than its row takes, because confidences are rough
_RATE = 0.02  # of learning what a step gains: some fifty steps are remembered
_MOST_LOST = 0.01  # share of the time
_MOST_GAINED, _MOST_KEPT = 0.3, 0.01  # the same, of what is remembered, and of that for a new request
_MOST_IN_A_STEP = 0.1  # share of a step's time that counts as lost: reading a prompt takes longer, once
_REST = 50  # steps
_REVIEW = 8  # steps between calculations of the budget


class LookupPolicy:
    """A decision when lookups draft alone.

    Args:
        costs: Costs of steps.
        names: Names of the lookups, or none if they never draft alone.
    """

    def __init__(self, costs: CostModel, names: Collection[str] = ()) -> None:
        self._costs, self.names = costs, frozenset(names)
        self._gain = 0.0  # mean share of a step's time that lookups save
        self._rest = 0  # steps until they are tried again
        self._budget, self._num_requests, self._age = OFF, 0, 0  # the last budget, and the steps that it was used for

    @property
    def is_resting(self) -> bool:
        return not self.names or self._rest > 0

    def budget(self, spans: Sequence[Span]) -> TreeBudget:
        """Return the budget of each request: draft tokens that are expected to save more than their rows take."""
        if begins_text(spans):
            self._rest, self._gain = 0, min(max(self._gain, 0.0), _MOST_KEPT)  # a loss was that of another text
        if self.is_resting:
            return OFF
        if len(spans) != self._num_requests or self._age >= _REVIEW:
            self._num_requests, self._age = len(spans), 0
            least = min(_MARGIN * price_of_row(self._costs, len(spans)), _MOST_LIKELY)
            self._budget = TreeBudget(MAX_NODES, MAX_NODES, min_path_prob=least, drafters=self.names)
        self._age += 1
        return self._budget

    def observe(self, step: StepRecord, acceptances: Sequence[Acceptance]) -> None:
        """Learn from a step in which no model drafted."""
        if self.is_resting:
            self._rest -= 1
            return
        plain = float(self._costs.target(step.num_rows - step.num_guessed))
        saved = plain * sum(len(acceptance.path) for acceptance in acceptances) / max(len(acceptances), 1)
        spent = step.draft_time + float(self._costs.target(step.num_rows)) - plain
        gain = max((saved - spent) / plain, -_MOST_IN_A_STEP)
        self._gain = min(self._gain + _RATE * (gain - self._gain), _MOST_GAINED)
        if self._gain < -_MOST_LOST:
            self._gain, self._rest = 0.0, _REST


def price_of_row(costs: CostModel, num_requests: int) -> float:
    """Return what the row of a draft token takes, in tokens that plain decoding yields in this time."""
    alone, full = costs.target([num_requests, num_requests * (1 + MAX_NODES)]).tolist()
    return float((full / alone - 1.0) / MAX_NODES)


def begins_text(spans: Sequence[Span]) -> bool:
    """Return whether the one request of a step has just begun its text; in a batch, requests begin all the time."""
    return len(spans) == 1 and spans[0].request.num_output == 1

"""Budgets for lookups alone, where draft tokens of no model pay.

A lookup drafts without a pass of a model, so it may pay where a model's passes take longer than their tokens save: on
text that repeats itself, its prompt or an earlier answer. Looking up takes time too, which on other text is lost. So
lookups rest while they lose more than a small share of the time, and try again now and then and with a new request.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from specinfer.core.request import Span
from specinfer.core.step_record import StepRecord
from specinfer.core.tree import OFF, TreeBudget
from specinfer.policy.cost_model import CostModel
from specinfer.policy.rank_choice import TreeSizes
from specinfer.verify import Acceptance

MAX_NODES = 16  # of each request, unless passes are slow and large ones take hardly longer
_MARGIN = 1.3  # factor by which draft tokens must save more than their rows take, because probabilities are rough
_MOST_LIKELY = 0.5  # on a device no draft token has to be likelier than this
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
            self._budget = replace(lookup_budget(self._costs, len(spans)), drafters=self.names)
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


def lookup_budget(costs: CostModel, num_requests: int) -> TreeBudget:
    """Return the budget of draft tokens that take no passes of a model: those that save more than their rows take.

    Steps on a device judge each draft token alone, by the mean price of a row.
    """
    sizes = TreeSizes.for_costs(costs)
    most = sizes.max_nodes if sizes.is_wide else MAX_NODES
    seconds = costs.target(num_requests + np.arange(num_requests * most + 1))
    prices = _MARGIN * num_requests * (seconds[1:] / seconds[0] - 1.0)
    if costs.max_rows is not None:
        return TreeBudget(most, most, min_path_prob=min(float(prices[-1]) / len(prices), _MOST_LIKELY))
    return TreeBudget(most, most, row_prices=tuple(prices.tolist()))


def begins_text(spans: Sequence[Span]) -> bool:
    """Return whether the one request of a step has just begun its text; in a batch, requests begin all the time."""
    return len(spans) == 1 and spans[0].request.num_output == 1

"""DeviceBudgets: the tree budget of each request in the next step on a device."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from specinfer.core.config import AUTO
from specinfer.core.draws import Floats
from specinfer.core.request import Request, Span
from specinfer.core.rules import TRAVERSAL
from specinfer.core.tree import OFF, TreeBudget
from specinfer.drafters.growth.calibration import Calibration, source, source_of
from specinfer.engine.device.depth import LevelProbs
from specinfer.engine.device.launch import DeviceRequest
from specinfer.engine.device.sizes import holds

Budgets = Callable[[Sequence[Span]], Sequence[TreeBudget]]


class DeviceBudgets:
    """Budgets from the policy, asked once for each step, without what cannot be drafted or is not worthwhile.

    Args:
        drafters: Names of the drafters; none without speculation.
        calibration: Acceptance probabilities of their draft tokens.
        lookups: Names of the drafters that are no models, which may be asked alone.
        rule: Verification rule of requests that have none of their own.
    """

    def __init__(
        self, drafters: Sequence[str], calibration: Calibration, lookups: Sequence[str] = (), rule: str = "coupled"
    ) -> None:
        self._drafters, self._calibration, self._lookups = drafters, calibration, lookups
        # Under "auto" a rule was chosen for each sampled request: one whose tokens are chosen, or are drawn.
        self._rules = ("coupled", TRAVERSAL) if rule == AUTO else (None, None)
        self._level_probs = LevelProbs()
        self._asked: dict[Request, TreeBudget] | None = None  # the policy's budgets for the coming step
        self.uncut: list[TreeBudget] = []  # the last budgets, with the levels that do not pay for a model

    def of(self, device_requests: Sequence[DeviceRequest], budgets: Budgets) -> list[TreeBudget]:
        """Return the budget of each request. The device applies the limit of remaining tokens, so that shapes stay few.

        Args:
            device_requests: The requests of the step.
            budgets: Function of the policy. It is not called again for a step that has to wait, because the policy
                would lose its previous decision.
        """
        self.uncut = []
        if not self._drafters and not self._lookups:
            return [OFF] * len(device_requests)
        if self._asked is None:
            spans = [one.span() for one in device_requests]
            self._asked = dict(zip([span.request for span in spans], budgets(spans), strict=True))
        found = []
        for one in device_requests:
            request, budget = one.request, self._asked.get(one.request, OFF)
            is_asked = any(budget.asks(name) for name in (*self._lookups, *self._models_of(one)))
            may_guess = request.drafting.is_allowed and request.max_new_tokens > 1 and is_asked
            found.append(budget if may_guess and holds(budget) else OFF)
        self.uncut = found
        if not any(budget.min_gain for budget in found) or not self.asks_model(device_requests, found):
            return found
        sources = {source(name, one.request) for one in device_requests for name in self._drafters}
        return self._level_probs.cut(found, max(float(self._calibration.by_rank(each)[0]) for each in sources))

    def _models_of(self, one: DeviceRequest) -> list[str]:
        return [name for name in self._drafters if name not in one.lost_by]

    def asks_model(self, device_requests: Sequence[DeviceRequest], budgets: Sequence[TreeBudget]) -> bool:
        """Return whether a model drafts for one of the requests; otherwise lookups draft alone."""
        return any(
            budget.max_nodes and any(map(budget.asks, self._models_of(one)))
            for one, budget in zip(device_requests, budgets, strict=True)
        )

    def next(self) -> None:
        """Let the policy be asked again, after the step was launched or given up."""
        self._asked = None

    def observe(self, path_prob: npt.NDArray[np.float32]) -> None:
        """Learn from a step; `path_prob` [requests, levels] of the requests that were drafted for."""
        self._level_probs.observe(path_prob)

    def chances(self) -> list[list[tuple[Floats, Floats]]]:
        """Return each drafter's acceptance probabilities for the tables of a `ChanceTable`, as `Calibration.lines`."""
        kinds = ((True, None), *((False, rule) for rule in self._rules))
        return [
            [self._calibration.lines(source_of(name, is_greedy=is_greedy, rule=rule)) for is_greedy, rule in kinds]
            for name in self._drafters
        ]

"""DeviceBudgets: the tree budget of each request in the next step on a device.

A device computes all levels of a shape, so the number of worthwhile levels is chosen before.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from specinfer.core.draws import Floats
from specinfer.core.request import Request, Span
from specinfer.core.rules import AUTO, TRAVERSAL
from specinfer.core.tree import OFF, TreeBudget
from specinfer.drafters.growth.calibration import Calibration, source, source_of
from specinfer.engine.device.draft_shape import LEVELS, holds
from specinfer.engine.device.launch import DeviceRequest

_MEMORY = 0.9  # decay per step: about ten steps are remembered
_LONG_MEMORY = 0.99  # the same for levels that are not computed, which could stay left out for ever


class LevelProbs:
    """Recent yield of each level: the summed acceptance probabilities of its nodes that may have children.

    The level loop of host steps knows this value for each level before it goes on to the next (`tree_batch`), and stops
    where one more level would yield less than the policy's `min_gain`.
    """

    def __init__(self) -> None:
        self._path_prob = np.zeros(LEVELS[-1])  # [levels] mean of a request
        self._num_known = 0

    def observe(self, path_prob: npt.NDArray[np.float32]) -> None:
        """Learn from a step; `path_prob` [requests, levels] of the requests that were drafted for."""
        levels = path_prob.shape[1]
        if not len(path_prob):
            return
        new = min(self._num_known, levels)
        mean = path_prob.mean(axis=0)
        self._path_prob[:new] = _MEMORY * self._path_prob[:new] + (1 - _MEMORY) * mean[:new]
        self._path_prob[new:levels] = mean[new:]
        for level in range(levels, self._num_known):
            expected = self._extrapolated(level, levels - 1)
            self._path_prob[level] = _LONG_MEMORY * self._path_prob[level] + (1 - _LONG_MEMORY) * expected
        self._num_known = max(self._num_known, levels)

    def cut(self, budgets: Sequence[TreeBudget], chance: float) -> list[TreeBudget]:
        """Return the budgets without levels that are not worthwhile.

        Fixed expansions are not changed, and nothing is while there are no observations.

        Args:
            budgets: The policy's budgets.
            chance: Probability that the best draft token at a node is right.
        """
        wanted = [budget for budget in budgets if budget.min_gain > 0]
        if not wanted or not self._num_known:
            return list(budgets)
        min_gain = min(budget.min_gain for budget in wanted)
        depth = 1
        while depth < LEVELS[-1] and len(wanted) * chance * self._expected(depth) >= min_gain:
            depth += 1
        return [
            replace(budget, max_depth=min(budget.max_depth, depth)) if budget.min_gain > 0 else budget
            for budget in budgets
        ]

    def _expected(self, level: int) -> float:
        """Return the yield of a level; one that was never computed is extrapolated."""
        last = self._num_known - 1
        return float(self._path_prob[level]) if level <= last else self._extrapolated(level, last)

    def _extrapolated(self, level: int, last: int) -> float:
        """Return the yield of a level as it follows from the two up to `last`."""
        before = self._path_prob[last - 1] if last else 0.0
        falls = float(self._path_prob[last] / before) if before > 0 else 1.0
        return float(self._path_prob[last]) * min(falls, 1.0) ** (level - last)


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
            spans = [served.span() for served in device_requests]
            self._asked = dict(zip([span.request for span in spans], budgets(spans), strict=True))
        allowed = []
        for served in device_requests:
            request, budget = served.request, self._asked.get(served.request, OFF)
            is_asked = any(budget.asks(name) for name in (*self._lookups, *self._models_of(served)))
            is_asked = is_asked or bool(request.prediction_ids)  # which no budget leaves out
            may_guess = request.drafting.is_allowed and request.max_new_tokens > 1 and is_asked
            allowed.append(budget if may_guess and holds(budget) else OFF)
        self.uncut = allowed
        if not any(budget.min_gain for budget in allowed) or not self.asks_model(device_requests, allowed):
            return allowed
        sources = {source(name, served.request) for served in device_requests for name in self._drafters}
        return self._level_probs.cut(allowed, max(float(self._calibration.by_rank(each)[0]) for each in sources))

    def _models_of(self, served: DeviceRequest) -> list[str]:
        return [name for name in self._drafters if name not in served.lost_by]

    def asks_model(self, device_requests: Sequence[DeviceRequest], budgets: Sequence[TreeBudget]) -> bool:
        """Return whether a model drafts for one of the requests; otherwise lookups draft alone."""
        return any(
            budget.max_nodes and any(map(budget.asks, self._models_of(served)))
            for served, budget in zip(device_requests, budgets, strict=True)
        )

    def next(self) -> None:
        """Let the policy be asked again, after the step was launched or given up."""
        self._asked = None

    def observe(self, path_prob: npt.NDArray[np.float32]) -> None:
        """Learn from a step; `path_prob` [requests, levels] of the requests that were drafted for."""
        self._level_probs.observe(path_prob)

    def chances(self) -> list[list[tuple[Floats, Floats]]]:
        """Return each drafter's acceptance probabilities, as `chance_lines`."""
        return [chance_lines(self._calibration, name, self._rules) for name in self._drafters]


def chance_lines(
    calibration: Calibration, drafter: str, rules: tuple[str | None, str | None]
) -> list[tuple[Floats, Floats]]:
    """Return a drafter's acceptance probabilities for the tables of a `ChanceTable`, as `Calibration.lines`.

    Args:
        rules: Rules of sampled requests whose tokens are chosen, and of those whose tokens are drawn.
    """
    kinds = ((True, None), *((False, rule) for rule in rules))
    return [calibration.lines(source_of(drafter, is_greedy=is_greedy, rule=rule)) for is_greedy, rule in kinds]

"""DeviceBudgets: how far the next step on a device may guess for each of its requests."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from specinfer.drafters.calibration import Calibration, Floats, source
from specinfer.engine.device.depth import LevelProbs
from specinfer.engine.device.launch import DeviceRequest
from specinfer.engine.device.sizes import holds
from specinfer.request import Request, Span
from specinfer.tree import OFF, TreeBudget

Budgets = Callable[[Sequence[Span]], Sequence[TreeBudget]]


class DeviceBudgets:
    """Asks the policy once for each step, and leaves out what cannot be guessed or does not pay.

    Args:
        drafter: Its name; None: nobody guesses.
        calibration: What its guesses are worth.
    """

    def __init__(self, drafter: str | None, calibration: Calibration) -> None:
        self._drafter, self._calibration = drafter, calibration
        self._level_probs = LevelProbs()
        self._asked: dict[Request, TreeBudget] | None = None  # what the policy said of the step that is to come

    def of(self, device_requests: Sequence[DeviceRequest], budgets: Budgets) -> list[TreeBudget]:
        """For each of these; what it may still say cuts that on the device, so that shapes stay few.

        Args:
            budgets: The policy's; a step that has to wait does not ask again, or what was wanted would be forgotten.
        """
        if self._drafter is None:
            return [OFF] * len(device_requests)
        if self._asked is None:
            spans = [one.span() for one in device_requests]
            self._asked = dict(zip([span.request for span in spans], budgets(spans), strict=True))
        found = []
        for one in device_requests:
            request, budget = one.request, self._asked.get(one.request, OFF)
            may_guess = request.may_guess and request.max_new_tokens > 1 and one.can_be_drafted
            found.append(budget if may_guess and budget.asks(self._drafter) and holds(budget) else OFF)
        if not any(budget.min_gain for budget in found):
            return found
        sources = {source(self._drafter, one.request) for one in device_requests}
        return self._level_probs.cut(found, max(float(self._calibration.by_rank(each)[0]) for each in sources))

    def next(self) -> None:
        """The step was launched, or will not be: the policy is asked again."""
        self._asked = None

    def observe(self, path_prob: npt.NDArray[np.float32]) -> None:
        """`path_prob` [requests, levels] of a step, of those that guesses were made for."""
        self._level_probs.observe(path_prob)

    def chances(self) -> list[tuple[Floats, Floats]]:
        """What guesses are worth: lines, as `Calibration.lines`, of greedy requests and of sampled ones."""
        name = self._drafter or ""
        return [self._calibration.lines(each) for each in (name, f"{name} sampled")]

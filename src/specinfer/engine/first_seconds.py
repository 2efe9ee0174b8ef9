"""FirstSeconds: the time that each tenant has used for its first tokens beside others, which comes back with time.

Such a step has no draft tokens, so all of it counts, however short the prompt is. So does what drafters read for them.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence

from specinfer.core.request import Request
from specinfer.engine.step_seconds import StepSeconds
from specinfer.engine.waiting import WaitingQueue

_MOST, _PASSES = 0.5, 8  # seconds for the first tokens of a tenant, or passes over one row if these are longer
_SHARE = 0.25  # of the time, divided among all tenants, that comes back


class FirstSeconds:
    """The seconds that each tenant has used.

    Args:
        waiting: Knows the tenants that are present.
        costs: Costs of steps.
    """

    def __init__(self, waiting: WaitingQueue, costs: StepSeconds) -> None:
        self._waiting, self._costs = waiting, costs
        self._used = defaultdict[str, float](float)

    def left(self, tenant: str) -> float:
        """Return the seconds that a tenant may still use."""
        return max(_MOST, _PASSES * self._costs.of_pass(1)) - self._used.get(tenant, 0.0)

    def use(self, tenant: str, seconds: float) -> None:
        """Count seconds of a step for a tenant."""
        self._used[tenant] += seconds

    def take_reading(self, request: Request, num_to_read: Callable[[Request], int]) -> bool:
        """Return whether drafters may read the tokens of a request beside other tenants, and count the seconds.

        They are given back if no model reads, because lookups find enough.
        """
        seconds = self._costs.of_reading(num_to_read(request))
        if seconds > self.left(request.tenant):
            return False
        self._used[request.tenant] += seconds
        request.drafting.reserved_seconds = seconds
        return True

    def give_back(self, requests: Sequence[Request], seconds: float) -> None:
        """Give back what was not read for the requests of a step, and what comes back in its seconds."""
        for request in requests:
            self._used[request.tenant] -= request.drafting.reserved_seconds
            request.drafting.reserved_seconds = 0.0
        back = seconds * _SHARE / max(self._waiting.num_tenants, 1)
        self._used = defaultdict(float, {tenant: used - back for tenant, used in self._used.items() if used > back})

"""The waiting queue: fair between tenants, then by priority within a tenant, then in order of arrival.

Fairness is by service: each tenant has a counter of the tokens computed for it, and the tenant with the least is next.
A tenant that returns after a pause starts level with the least served one present, so that a pause
earns no credit. A single tenant is served first come, first served.

Source: the virtual token counter, "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024).
"""

from collections import deque
from collections.abc import Iterator

from specinfer.core.request import Request


class WaitingQueue:
    """Requests that have not been admitted, or were preempted."""

    def __init__(self) -> None:
        self._put_back: deque[Request] = deque()  # preempted requests, which come first
        self._queues: dict[tuple[int, str], deque[Request]] = {}  # by priority and tenant
        self._served: dict[str, float] = {}  # tokens computed, by tenant
        self._num_present: dict[str, int] = {}  # requests waiting or running, by tenant

    def __len__(self) -> int:
        return len(self._put_back) + sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests in the order in which they are next, if nothing changes."""
        yield from self._put_back
        for key in sorted(self._queues, key=self._rank):
            yield from self._queues[key]

    def add(self, request: Request) -> None:
        tenant = request.tenant
        if tenant not in self._num_present:
            self._served[tenant] = min(self._served.values(), default=0.0)
        self._num_present[tenant] = self._num_present.get(tenant, 0) + 1
        self._queues.setdefault((request.priority, tenant), deque()).append(request)

    def put_back(self, request: Request) -> None:
        """Queue a preempted request at the head."""
        self._put_back.appendleft(request)

    def take(self, request: Request) -> bool:
        """Remove a request and return True, or return False if it is not waiting."""
        if request in self._put_back:
            self._put_back.remove(request)
            return True
        key = (request.priority, request.tenant)
        queue = self._queues.get(key, ())
        if request not in queue:
            return False
        assert isinstance(queue, deque)
        queue.remove(request)
        if not queue:
            del self._queues[key]
        return True

    def charge(self, request: Request, num_tokens: int) -> None:
        """Count tokens computed for a request's tenant."""
        self._served[request.tenant] += num_tokens

    def leave(self, request: Request) -> None:
        """Remove an ended request, in any state, from its tenant's count."""
        tenant = request.tenant
        self._num_present[tenant] -= 1
        if not self._num_present[tenant]:
            del self._num_present[tenant], self._served[tenant]

    def _rank(self, key: tuple[int, str]) -> tuple[float, int, float]:
        priority, tenant = key
        return self._served[tenant], priority, self._queues[key][0].arrival_time

"""The waiting queue: fair between tenants, then by priority within a tenant, then in order of arrival.

The tenant with the fewest running requests is next. Between equals, fairness is by service: each tenant has a counter
of the tokens computed for it, and the tenant with the least is next. A tenant that returns after a pause starts level
with the least served one present, so that a pause earns no credit. A single tenant is served first come, first served.

Source: the virtual token counter, "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024).
"""

import heapq
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from itertools import chain

from specinfer.core.request import Request

_PUT_BACK = float("-inf")  # the priority of preempted requests: they come before all others of their tenant


class WaitingQueue:
    """Requests that have not been admitted, or were preempted.

    Attributes:
        max_running: Maximum number of running requests of a tenant, for tenants that have one.
    """

    def __init__(self) -> None:
        self.max_running: Mapping[str, int] = {}
        self._queues: dict[tuple[float, str], deque[Request]] = {}  # by priority and tenant
        self._served: dict[str, float] = {}  # tokens computed, by tenant
        self._num_present: Counter[str] = Counter()  # requests waiting or running, by tenant
        self._num_waiting: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._num_waiting.total()

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests in the order in which they are next, if nothing else changes."""
        queues: dict[str, list[deque[Request]]] = {}
        for key in sorted(self._queues):
            queues.setdefault(key[1], []).append(self._queues[key])
        turns = []
        for tenant, own in queues.items():
            rest = chain.from_iterable(own)
            turns.append((*self._rank(first := next(rest), self.num_running(tenant)), first, rest))
        heapq.heapify(turns)
        while turns:
            _, num_running, *_, request, rest = turns[0]
            yield request
            following = next(rest, None)
            if following is None:
                heapq.heappop(turns)
            else:
                heapq.heapreplace(turns, (*self._rank(following, num_running + 1), following, rest))

    def num_running(self, tenant: str) -> int:
        return self._num_present[tenant] - self._num_waiting[tenant]

    def is_full(self, tenant: str, num_running: int | None = None) -> bool:
        """Return whether a tenant runs as many requests as it may."""
        num_running = self.num_running(tenant) if num_running is None else num_running
        return num_running >= self.max_running.get(tenant, num_running + 1)

    def add(self, request: Request) -> None:
        tenant = request.tenant
        if tenant not in self._served:
            self._served[tenant] = min(self._served.values(), default=0.0)
        self._num_present[tenant] += 1
        self._num_waiting[tenant] += 1
        self._queues.setdefault((request.priority, tenant), deque()).append(request)

    def put_back(self, request: Request) -> None:
        """Queue a preempted request before all others of its tenant."""
        self._num_waiting[request.tenant] += 1
        self._queues.setdefault((_PUT_BACK, request.tenant), deque()).appendleft(request)

    def take(self, request: Request) -> bool:
        """Remove a request and return True, or return False if it is not waiting."""
        for key in ((_PUT_BACK, request.tenant), (request.priority, request.tenant)):
            queue = self._queues.get(key)
            if queue is not None and request in queue:
                queue.remove(request)
                self._num_waiting[request.tenant] -= 1
                if not queue:
                    del self._queues[key]
                return True
        return False

    def charge(self, request: Request, num_tokens: int) -> None:
        """Count tokens computed for a request's tenant."""
        self._served[request.tenant] += num_tokens

    def leave(self, request: Request) -> None:
        """Remove an ended request, in any state, from its tenant's count."""
        tenant = request.tenant
        self._num_present[tenant] -= 1
        if not self._num_present[tenant]:
            del self._num_present[tenant], self._num_waiting[tenant], self._served[tenant]

    def _rank(self, request: Request, num_running: int) -> tuple[bool, int, float, int, float, str]:
        """Return the rank of a tenant's next request, if the tenant has this many running; the lowest is next."""
        tenant = request.tenant
        is_full = self.is_full(tenant, num_running)
        return is_full, num_running, self._served[tenant], request.priority, request.arrival_time, tenant

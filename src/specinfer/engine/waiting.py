"""The waiting queue: fair between tenants, then by priority within a tenant, then by deadline, then by arrival.

The tenant with the fewest running requests is next. Between equals, fairness is by service: each tenant has a counter
of the engine's seconds that it took, and the tenant with the least is next. A tenant that returns after a pause starts
level with the least served one present, so that a pause earns no credit. A single tenant is served first come, first
served.

A request whose first token can still be in time for its SLO comes before others, the earliest deadline first. One that
is late, or has no deadline, waits with the others. Every fourth place is that of the oldest request, so that none waits
forever.

Source: the virtual token counter, "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024).
"""

import heapq
import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, count

from specinfer.core.clock import epoch_seconds
from specinfer.core.request import Request

_EVERY = 4  # requests, of which one is the oldest even if others have a deadline
_PUT_BACK = float("-inf")  # the priority of preempted requests: they come before all others of their tenant


class WaitingQueue:
    """Requests that have not been admitted, or were preempted.

    Attributes:
        max_running: Maximum number of running requests of a tenant, for tenants that have one.
    """

    def __init__(self) -> None:
        self.max_running: Mapping[str, int] = {}
        self._queues: dict[tuple[float, str], deque[Request]] = {}  # by priority and tenant
        self._served: dict[str, float] = {}  # seconds, by tenant
        self._num_present: Counter[str] = Counter()  # requests waiting or running, by tenant
        self._num_waiting: Counter[str] = Counter()
        self._num_taken = 0
        self.clock = epoch_seconds

    def __len__(self) -> int:
        return self._num_waiting.total()

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests in the order in which they are next, if nothing else changes."""
        queues: dict[str, list[Iterable[Request]]] = {}
        for key in sorted(self._queues):
            queues.setdefault(key[1], []).append(self._by_deadline(self._queues[key]))
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
                self._num_taken += 1
                if not queue:
                    del self._queues[key]
                return True
        return False

    @property
    def num_tenants(self) -> int:
        """Tenants with requests that wait or run."""
        return len(self._num_present)

    def charge(self, tenant: str, seconds: float) -> None:
        """Count seconds of a step for a tenant, unless it has left."""
        if tenant in self._served:
            self._served[tenant] += seconds

    def leave(self, request: Request) -> None:
        """Remove an ended request, in any state, from its tenant's count."""
        tenant = request.tenant
        self._num_present[tenant] -= 1
        if not self._num_present[tenant]:
            del self._num_present[tenant], self._num_waiting[tenant], self._served[tenant]

    def _by_deadline(self, queue: deque[Request]) -> Iterable[Request]:
        """Return requests of equal priority in the order in which they are next."""
        now = self.clock()
        urgent = sorted((request for request in queue if now < request.due < math.inf), key=lambda request: request.due)
        return _interleaved(urgent, queue, self._num_taken) if urgent else queue

    def _rank(self, request: Request, num_running: int) -> tuple[bool, int, float, int, float, str]:
        """Return the rank of a tenant's next request, if the tenant has this many running; the lowest is next."""
        tenant = request.tenant
        is_full = self.is_full(tenant, num_running)
        return is_full, num_running, self._served[tenant], request.priority, request.times.arrival, tenant


def _interleaved(urgent: Iterable[Request], queue: Iterable[Request], num_taken: int) -> Iterator[Request]:
    """Yield the urgent requests and then the others of a queue; every fourth one is the oldest that is left."""
    taken: set[Request] = set()
    sources = iter(urgent), iter(queue)
    for place in count(num_taken + 1):
        order = reversed(sources) if place % _EVERY == 0 else sources
        request = next((candidate for source in order for candidate in source if candidate not in taken), None)
        if request is None:
            return
        taken.add(request)
        yield request

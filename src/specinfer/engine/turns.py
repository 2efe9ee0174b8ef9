"""Turns of running requests: where several passes are in flight at once, and where grammars take the engine's time."""

from collections import defaultdict
from collections.abc import Sequence

from specinfer.core.grammar.limits import MaskCredit
from specinfer.core.request import Request


class PassTurns:
    """Requests in passes in flight; the others take turns.

    Attributes:
        in_flight: Requests in a pass in flight; some may have ended.
    """

    def __init__(self) -> None:
        self.in_flight: set[Request] = set()
        self._num_begun = 0
        self._last: dict[str, int] = {}  # for running requests, the number of their last pass

    def idle(self, running: Sequence[Request]) -> list[Request]:
        """Return the running requests that are in no pass."""
        return [request for request in running if request not in self.in_flight]

    def group(self, running: Sequence[Request], num_groups: int) -> list[Request]:
        """Return the requests of the next pass: an even part of the running ones, longest without a pass first."""
        idle, most = self.idle(running), -(-len(running) // num_groups)
        if len(idle) <= most:
            return idle
        chosen = set(self.in_order(idle)[:most])
        return [request for request in idle if request in chosen]

    def in_order(self, requests: Sequence[Request]) -> list[Request]:
        """Return requests in the order of their turns: the longest without a pass first."""
        return sorted(requests, key=lambda request: self._last.get(request.request_id, 0))

    def begin(self, requests: Sequence[Request]) -> None:
        """Note the requests of a pass that begins."""
        self._num_begun += 1
        for request in requests:
            self.in_flight.add(request)
            self._last[request.request_id] = self._num_begun

    def end(self, requests: Sequence[Request]) -> list[Request]:
        """Note that the pass of these requests has ended, and return those that were in flight."""
        ended = [request for request in requests if request in self.in_flight]
        self.in_flight.difference_update(ended)
        return ended

    def forget(self, request: Request) -> None:
        """Forget the turn of a request that does not run any more."""
        self._last.pop(request.request_id, None)


_MAX_TENANTS = 1024  # whose credit is kept after their last request


class GrammarTurns:
    """The credit of each tenant for masks of grammars, and the tenants that have used theirs up.

    Attributes:
        is_resting: True if the last choice left out all requests.
    """

    def __init__(self) -> None:
        self._credits: dict[str, MaskCredit] = {}
        self.is_resting = False

    def add(self, request: Request) -> None:
        """Let the grammar of a queued request spend its tenant's credit, if its time is limited."""
        if request.grammar is None or not request.grammar.is_limited:
            return
        if len(self._credits) >= _MAX_TENANTS:
            self._credits = {tenant: credit for tenant, credit in self._credits.items() if not credit.is_full}
        request.grammar.credit = self._credits.setdefault(request.tenant, MaskCredit())

    def choose(self, requests: Sequence[Request]) -> list[Request]:
        """Return the requests that run now: of a tenant those whose masks its credit will pay."""
        planned = defaultdict[str, float](float)
        chosen = []
        for request in requests:
            grammar = request.grammar
            if grammar is not None and grammar.credit is not None:
                if grammar.credit.left <= planned[request.tenant]:
                    continue
                planned[request.tenant] += grammar.last_seconds
            chosen.append(request)
        self.is_resting = bool(requests) and not chosen
        return chosen

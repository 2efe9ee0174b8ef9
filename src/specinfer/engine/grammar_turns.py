"""Turns of requests whose grammars take time of the engine's thread: they rest while their tenant has used its part."""

from collections import defaultdict
from collections.abc import Sequence

from specinfer.core.grammar.limits import MaskCredit
from specinfer.core.request import Request

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
            self._credits = {tenant: one for tenant, one in self._credits.items() if not one.is_full}
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

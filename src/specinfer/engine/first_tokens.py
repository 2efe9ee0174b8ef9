"""First tokens of some tenants among outputs of others: passes that hurry for them."""

from specinfer.core.request import Request
from specinfer.policy.slo_planner import SLOPlanner

UNHURRIED = 4  # one pass in so many, at most, hurries
_ALONE = 0.85  # share of the time of a pass in which first tokens must be done to be computed alone


class FirstTokens:
    """Chooses the passes that hurry for first tokens, each tenant in its turn.

    Draft tokens would delay a first token, and so do the tokens of others where they make a pass much longer. The
    others lose little, because few passes hurry.

    Attributes:
        is_hurried: Whether the pass chosen last has no draft tokens.
    """

    def __init__(self) -> None:
        self.is_hurried = False
        self._num_passes = 0
        self._turns: dict[str, int] = {}  # for tenants, the number of the last pass that hurried for them

    def choose(self, group: list[Request], planner: SLOPlanner | None) -> list[Request]:
        """Return the requests of the next pass: those of a group that wait for their first token, or all.

        Args:
            group: Running requests.
            planner: Knows what passes cost, or None if nothing does; then no request waits for another.
        """
        self._num_passes += 1
        firsts = [request for request in group if not request.num_output]
        if firsts:
            tenants = {request.tenant for request in group}
            start = self._num_passes - UNHURRIED * len(tenants)
            self._turns = {tenant: turn for tenant, turn in self._turns.items() if turn > start}
            firsts = [request for request in firsts if request.tenant not in self._turns]
        self.is_hurried = bool(firsts) and len(tenants) > 1
        if not self.is_hurried:
            return group
        self._turns |= {request.tenant: self._num_passes for request in firsts}
        return group if planner is None else _alone(firsts, group, planner) or group


def _alone(firsts: list[Request], group: list[Request], planner: SLOPlanner) -> list[Request]:
    """Return those of the first requests, the shortest first, whose pass is much shorter than one of the group."""
    most = _ALONE * planner.pass_seconds(sum(request.num_unread for request in group))
    chosen: list[Request] = []
    num_tokens = 0
    for request in sorted(firsts, key=lambda request: request.num_unread):
        num_tokens += request.num_unread
        if planner.pass_seconds(num_tokens) > most:
            break
        chosen.append(request)
    return chosen

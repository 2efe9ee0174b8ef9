"""First tokens of some tenants among outputs of others: passes that give them priority."""

from specinfer.core.request import Request
from specinfer.policy.slo_planner import SLOPlanner

PASSES_PER_TURN = 4  # at most one pass in this many is for first tokens
_ALONE = 0.85  # share of the time of a pass in which first tokens must be done to be computed alone


class FirstTokens:
    """The choice of passes that give priority to first tokens, each tenant in its turn.

    Draft tokens would delay a first token, and so do the tokens of others where they make a pass much longer. The
    others lose little, because few passes do so.

    Attributes:
        is_prioritized: Whether the pass chosen last has no draft tokens.
    """

    def __init__(self) -> None:
        self.is_prioritized = False
        self._num_passes = 0
        self._turns: dict[str, int] = {}  # for tenants, the number of the last pass that gave them priority

    def choose(self, group: list[Request], num_tokens: int, planner: SLOPlanner | None) -> list[Request]:
        """Return the requests of the next pass: those of a group that wait for their first token, or all.

        Args:
            group: Running requests.
            num_tokens: Tokens of a pass of the whole group.
            planner: Knows what passes cost, or None if nothing does; then no request waits for another.
        """
        self._num_passes += 1
        firsts = self._in_turn(group)
        self.is_prioritized = bool(firsts)
        if not self.is_prioritized:
            return group
        self._note_turns(firsts)
        return group if planner is None else _alone(firsts, num_tokens, planner) or group

    def _in_turn(self, group: list[Request]) -> list[Request]:
        """Return those that wait for their first token and whose tenants had no such pass lately."""
        firsts = [request for request in group if not request.num_output]
        tenants = {request.tenant for request in group} if firsts else set()
        if len(tenants) < 2:
            return []
        start = self._num_passes - PASSES_PER_TURN * len(tenants)
        self._turns = {tenant: turn for tenant, turn in self._turns.items() if turn > start}
        return [request for request in firsts if request.tenant not in self._turns]

    def _note_turns(self, firsts: list[Request]) -> None:
        self._turns |= {request.tenant: self._num_passes for request in firsts}


def _alone(firsts: list[Request], num_tokens: int, planner: SLOPlanner) -> list[Request]:
    """Return those of the first requests, the shortest first, whose pass is much shorter than one of these tokens."""
    most = _ALONE * planner.pass_seconds(num_tokens)
    chosen: list[Request] = []
    num_chosen = 0
    for request in sorted(firsts, key=lambda request: request.num_unread):
        num_chosen += request.num_unread
        if planner.pass_seconds(num_chosen) > most:
            break
        chosen.append(request)
    return chosen

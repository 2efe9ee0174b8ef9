"""FairSteps: how long a step may take, and what of it each tenant may use. All shares are of the engine's seconds.

Steps of a tenant alone may take half a second, or 16 plain passes, so that another one that comes does not wait for
longer. Beside others each tenant has an even part of every step, and may use what others leave. A part is as long as
the lightest decoding tenant needs, so with `n` tenants a token takes at most `n` times as long as alone. What a step
has room for is counted in rows of its pass:

    known tokens | draft tokens, with the time of drafting them | log-probabilities and masks, by their seconds

Outputs of a tenant that do not fit take turns, prompts are read in smaller chunks, and trees are cut.

Example: a pass takes 10 ms, and 2 ms more for each further row. Tenant A decodes one output with 4 draft tokens, 18 ms.
Tenant B has 16 outputs with 64 draft tokens each. A step has 36 ms, 14 rows. A needs 5, so B gets 9: nine of its
outputs, without draft tokens.

First tokens are computed before others take their parts, as long as a tenant has not used much time for its own.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from specinfer.core.limits import SLO
from specinfer.core.request import Request, ScoringTime, Span
from specinfer.core.step_record import StepRecord
from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.engine.first_seconds import FirstSeconds
from specinfer.engine.parts import by_tenant, even_parts, in_turn
from specinfer.engine.prompts import token_shares
from specinfer.engine.step_room import StepRoom
from specinfer.engine.step_seconds import StepSeconds
from specinfer.engine.tree_cuts import cut_evenly, wanted_nodes
from specinfer.engine.turns import PassTurns
from specinfer.engine.waiting import WaitingQueue
from specinfer.policy.slo_planner import SLOPlanner

ALONE, _PASSES_ALONE = 0.5, 16  # seconds of a step of one tenant, or passes over one row if these are longer
_PART, _PASSES_EACH = 0.05, 2  # the same for each of several tenants


@dataclass(frozen=True, slots=True)
class StepShares:
    """The known tokens that each request of a group computes.

    Attributes:
        counts: Their numbers.
        firsts: Tenants whose first tokens come first.
    """

    counts: list[int]
    firsts: frozenset[str] = frozenset()

    @property
    def is_prioritized(self) -> bool:
        """True if first tokens come first."""
        return bool(self.firsts)


class FairSteps:
    """The room of steps, divided among tenants.

    Args:
        waiting: Knows the tenants that are present, and counts the seconds that each was served.
        turns: The order in which requests had their last passes.

    Attributes:
        seconds: What steps cost.
    """

    def __init__(self, waiting: WaitingQueue, turns: PassTurns) -> None:
        self.seconds = StepSeconds()
        self._waiting, self._turns = waiting, turns
        self._firsts = FirstSeconds(waiting, self.seconds)

    # ------------------------------------------------------------------------------------ the step

    def _room(self, running: Sequence[Request], least: float = 1.0) -> StepRoom | None:
        """Return the room of a step, or None if nothing is known yet.

        Args:
            running: All requests that run.
            least: Rows that a tenant alone has as long as no pass was seen to take too long.
        """
        if not self.seconds.is_known:
            return None
        length = self._length(running)
        num_rows = max(self.seconds.rows_within(length), 1.0)
        if self._waiting.num_tenants < 2 and length > self.seconds.longest:
            num_rows = max(num_rows, least)
        return StepRoom(num_rows, length / num_rows, self.seconds, self._most(running, num_rows))

    def _length(self, running: Sequence[Request]) -> float:
        """Return the seconds that a step may take.

        A tenant whose targets ask for shorter steps gives of its own part, all but a plain pass.
        """
        plain, num_tenants = self.seconds.of_pass(1), self._waiting.num_tenants
        alone = max(ALONE, _PASSES_ALONE * plain)
        if num_tenants < 2:
            return alone
        part = self._part(running)
        usual = num_tenants * part
        targets = [_target(request) or usual for request in running]
        wanted = min(targets if not self._waiting else [usual, *targets])
        given = len(_hasty(running, usual)) * (part - plain)
        return max(min(wanted, alone), usual - given)

    def _part(self, running: Sequence[Request]) -> float:
        """Return the seconds of a step that each of several tenants has: what the lightest decoding one needs."""
        plain = self.seconds.of_pass(1)
        decoding = by_tenant([request for request in running if request.num_output])
        lightest = min((self._seconds_alone(requests) for requests in decoding.values()), default=math.inf)
        return min(max(lightest, plain), max(_PART, _PASSES_EACH * plain))

    def _most(self, running: Sequence[Request], num_rows: float) -> dict[str, float]:
        """Return the rows at most of tenants whose targets make a step of so many rows shorter than it would be."""
        num_tenants = self._waiting.num_tenants
        if num_tenants < 2 or not any(map(_target, running)):
            return {}
        usual = num_tenants * self._part(running)
        hasty, lost = _hasty(running, usual), self.seconds.rows_within(usual) - num_rows
        if lost <= 0:
            return {}
        # Rows of a longer pass may cost much less, so that more are lost than these tenants have.
        return dict.fromkeys(hasty, max((num_rows + lost) / num_tenants - lost / max(len(hasty), 1), 1.0))

    def _seconds_alone(self, requests: Sequence[Request]) -> float:
        """Return the seconds of a step of these decoding requests alone."""
        num_nodes = sum(request.drafting.num_wanted for request in requests)
        on_host = sum(map(self.seconds.on_host, requests))
        return self.seconds.of_pass(len(requests) + num_nodes) + num_nodes * self.seconds.of_node + on_host

    # --------------------------------------------------------------------------------- known tokens

    def shares(
        self,
        group: Sequence[Request],
        running: Sequence[Request],
        max_tokens: int,
        max_prompt_logprobs: int,
        planner: SLOPlanner | None,
    ) -> StepShares:
        """Return the number of known tokens that each request of a group computes in a step, 0 if it has no turn.

        Args:
            group: Requests, the oldest first.
            running: All requests that run.
            max_tokens: Budget of the step; each request that runs has one token even if that is more.
            max_prompt_logprobs: Tokens of prompts whose log-probabilities are returned.
            planner: Limits what is read beside outputs of the same tenant, or None.
        """
        tenants, room = by_tenant(group), self._room(running, len(group) + max_tokens)
        if room is None:
            return StepShares(token_shares(group, max_tokens, max_prompt_logprobs, planner))
        if len(tenants) < 2:
            counts = self._shares_of(group, room, room.num_rows, max_tokens, max_prompt_logprobs, planner)
            return StepShares([counts.get(request, 0) for request in group])
        demands = {
            tenant: room.rows_of_tenant(tenant, self._demand(requests, room)) for tenant, requests in tenants.items()
        }
        firsts = self._first_demands(tenants, room)
        others = sum(min(map(room.rows_of, tenants[tenant])) for tenant in tenants if tenant not in firsts)
        granted = in_turn(firsts, room.num_rows - others)
        rest = {tenant: demand - granted.get(tenant, 0.0) for tenant, demand in demands.items()}
        parts = even_parts(rest, room.num_rows - sum(granted.values()))
        to_compute = {tenant: float(sum(request.num_unread for request in tenants[tenant])) for tenant in tenants}
        most, counts = even_parts(to_compute, max_tokens), dict[Request, int]()
        for tenant, requests in tenants.items():
            part = parts[tenant] + granted.get(tenant, 0.0)
            counts |= self._shares_of(requests, room, part, int(most[tenant]), max_prompt_logprobs // len(tenants))
        return StepShares([counts.get(request, 0) for request in group], frozenset(firsts))

    def _demand(self, requests: Sequence[Request], room: StepRoom) -> float:
        """Return the rows that these requests could use in a step."""
        return sum(
            request.num_unread * room.rows_of(request)
            + (request.drafting.num_wanted * room.rows_of_node if request.num_output else 0)
            for request in requests
        )

    def _first_demands(self, tenants: Mapping[str, Sequence[Request]], room: StepRoom) -> dict[str, float]:
        """Return the rows that first tokens need, of tenants whose time for them pays for these in this step."""
        demands = dict[str, float]()
        for tenant, requests in tenants.items():
            demand = self._demand([request for request in requests if not request.num_output], room)
            if demand and min(demand, room.num_rows) * room.row_seconds <= self._firsts.left(tenant):
                demands[tenant] = demand
        return demands

    def _shares_of(
        self,
        requests: Sequence[Request],
        room: StepRoom,
        num_rows: float,
        max_tokens: int,
        max_prompt_logprobs: int,
        planner: SLOPlanner | None = None,
    ) -> dict[Request, int]:
        """Return the known tokens of one tenant's requests in so many rows; those that do not fit take turns."""
        is_alone, left, taken = self._waiting.num_tenants < 2, num_rows, list(requests)
        costs = {
            request: room.rows_of(request) + (request.drafting.num_wanted * room.rows_of_node if is_alone else 0.0)
            for request in requests
        }
        if sum(costs.values()) > num_rows:
            fitting = set[Request]()
            for request in self._turns.in_order(requests):
                left -= costs[request]
                if fitting and left < 0:
                    break
                fitting.add(request)
            taken = [request for request in requests if request in fitting]
        left = max(num_rows - sum(costs[request] for request in taken), 0.0)
        scoring = [room.rows_of(request) for request in taken if request.lacks_prompt_logprobs]
        if scoring:
            max_prompt_logprobs = min(max_prompt_logprobs, int(left / max(scoring)))
        most = min(max_tokens, len(taken) + int(left))
        return dict(zip(taken, token_shares(taken, most, max_prompt_logprobs, planner), strict=True))

    # --------------------------------------------------------------------------------- draft tokens

    def cut(
        self,
        spans: Sequence[Span],
        budgets: Sequence[TreeBudget],
        reading: Sequence[Span],
        running: Sequence[Request],
        num_to_read: Callable[[Request], int],
    ) -> list[TreeBudget]:
        """Return the budgets of trees, cut to the room of the step.

        A tenant alone keeps the shapes of its trees; its outputs take turns (`shares`). Beside others trees are cut.

        Args:
            spans: Spans that emit tokens.
            budgets: Their budgets.
            reading: The other spans of the step.
            running: All requests that run.
            num_to_read: Returns the tokens that drafters read before they draft for a request.
        """
        asked = {span.request: budget for span, budget in zip(spans, budgets, strict=True)}
        for request, budget in asked.items():
            request.drafting.num_wanted = wanted_nodes(request, budget)
        room, known = self._room(running), defaultdict[str, float](float)
        if room is None or self._waiting.num_tenants < 2:
            return list(budgets)
        for span in (*spans, *reading):
            known[span.request.tenant] += (span.end - span.start) * room.rows_of(span.request)
        may_read = partial(self._firsts.take_reading, num_to_read=num_to_read)
        allowed = cut_evenly(asked, known, room, may_read)
        return [allowed[span.request] for span in spans]

    # -------------------------------------------------------------------------------------- seconds

    def charge(self, step: StepRecord, parts: Sequence[tuple[Span, TokenTree | None]]) -> None:
        """Charge the seconds of a step to tenants, by what each request of it has cost.

        Args:
            step: The step.
            parts: Its spans, with their trees.
        """
        scoring = [span.request.scoring for span, _ in parts]
        total = ScoringTime(sum(each.seconds for each in scoring), sum(each.count for each in scoring))
        self.seconds.observe(step, total)
        self._firsts.give_back([span.request for span, _ in parts], step.time)
        passing, is_shared = step.target_time + step.rest_time - total.seconds, self._waiting.num_tenants > 1
        firsts = defaultdict[str, float](float)
        for span, tree in parts:
            request, num_guessed = span.request, 0 if tree is None else tree.num_guessed
            drafted = num_guessed / step.num_guessed if step.num_guessed else 1 / len(parts)
            seconds = passing * (span.end - span.start + num_guessed) / step.num_rows + step.draft_time * drafted
            seconds += request.scoring.seconds
            request.scoring = ScoringTime()
            request.drafting.num_nodes = max(num_guessed, request.drafting.num_nodes // 2)
            self._waiting.charge(request.tenant, seconds)
            if is_shared and span.start < len(request.prompt_ids):
                firsts[request.tenant] += seconds
        for tenant, seconds in firsts.items():
            is_prioritized = any(span.request.tenant == tenant and span.request.is_prioritized for span, _ in parts)
            self._firsts.use(tenant, step.time if is_prioritized else seconds)


def _hasty(running: Sequence[Request], seconds: float) -> set[str]:
    """Return the tenants with a target that is shorter than this."""
    return {request.tenant for request in running if (_target(request) or seconds) < seconds}


def _target(request: Request) -> float | None:
    """Return the seconds that each token of a request may take, or None if it has no target."""
    slo = request.params.slo
    return slo.tpot / 1000 if isinstance(slo, SLO) and slo.tpot is not None else None

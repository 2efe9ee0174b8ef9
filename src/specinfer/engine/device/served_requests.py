"""The requests that are served on a device, by row: which join, and which return to host steps.

For the scheduler a request is in a pass in flight from joining to leaving, so its slots are not taken. One that has
left is released when the last step in flight with it has been read.

Tokens may be drawn for those under the multi-step or the traversal rule. A fixed expansion is drawn whole, as host
steps draw it, or not at all. Best-first trees are cut to what a step holds, before anything is drawn.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence

from specinfer.core.request import Request
from specinfer.core.tree import TreeBudget
from specinfer.engine.device.conditions import why_on_host
from specinfer.engine.device.draft_shape import LEVELS, RECOMPUTED, DraftShape, holds_expansion
from specinfer.engine.device.launch import Answer, DeviceRequest, Launch
from specinfer.engine.device.processing import Processing
from specinfer.engine.device.rows import DeviceRows
from specinfer.engine.scheduler import Scheduler
from specinfer.model.graphs.sizes import REQUESTS
from specinfer.model.kv_cache import KVCache
from specinfer.model.recurrent.states import RecurrentStates
from specinfer.verify import random_rule


class DrawnRequests:
    """The requests of an executor that are under a rule with random numbers.

    Args:
        rule: The rule, or None if no such requests are served.
        usual: Verification rule of requests that have none of their own.
    """

    def __init__(self, rule: str | None, usual: str) -> None:
        self.rule, self._usual = rule, usual
        self._too_wide: dict[Request, int] = {}  # numbers of rows with which their expansions do not fit into a step

    def has(self, request: Request) -> bool:
        """Return whether a request is under the rule, where that differs from plain decoding."""
        return random_rule(request, self._usual) is not None

    def why_not_drawn(self, request: Request, num_served: int) -> str | None:
        """Return why the tree of a request is not drawn on the device next to others, or None, as far as is known."""
        if not self.has(request):
            return None
        if self.rule is None:
            return "tokens are drawn by a rule with random numbers, under which these drafters take host steps"
        if num_served + 1 > self._too_wide.get(request, 2 * REQUESTS[-1]) // 2:
            return "fixed expansions of so many requests do not fit into a step"
        if self.are_masked(request, LEVELS[-1]):
            return "a grammar, bad words or the end of a thought, under a rule with random numbers"
        return None

    def are_masked(self, request: Request, depth: int) -> bool:
        """Return whether draws of this request, at up to this depth, are masked by host steps.

        They are masked at every level there, so other tokens would be drawn here.
        """
        return self.has(request) and request.restricts_tokens(depth)

    def undrawable(
        self,
        device_requests: Sequence[DeviceRequest],
        budgets: Iterable[TreeBudget],
        shape: DraftShape,
        num_rows: int,
        most_nodes: int,
    ) -> list[DeviceRequest]:
        """Return the requests whose fixed expansions this shape does not hold whole.

        Args:
            most_nodes: Draft tokens of a request that a step with this number of rows may have.
        """
        undrawable = [
            (served, budget)
            for served, budget in zip(device_requests, budgets, strict=True)
            if self.has(served.request) and not holds_expansion(shape, budget)
        ]
        self._too_wide = {request: rows for request, rows in self._too_wide.items() if not request.is_finished}
        self._too_wide |= {served.request: num_rows for served, budget in undrawable if budget.max_nodes > most_nodes}
        return [served for served, _ in undrawable]

    def note(self, request: Request, answer: Answer, drafters: Sequence[str | None]) -> None:
        """Let a request continue with random numbers that were not used.

        Args:
            drafters: Names of those that drew its tree, with None for others.
        """
        if self.has(request):
            assert answer.uniforms is not None
            request.uniforms.state = answer.uniforms
            for name in drafters:
                if name is not None:
                    request.drafting.begin_draws(name)


logger = logging.getLogger(__name__)


class ServedRequests:
    """The requests of a `DeviceExecutor`, in the order of their rows.

    Args:
        cache: KV cache of the target.
        states: States of its recurrent layers.
        rows: Rows on the device.
        drawn: Which requests are under a rule with random numbers.
        max_requests: Maximum number of requests at a time.
        may_follow: Whether lookups propose tokens, which may follow those that a drafter has not read.
        may_sample: Whether sampled requests are served.
    """

    def __init__(
        self,
        cache: KVCache,
        states: RecurrentStates,
        scheduler: Scheduler,
        rows: DeviceRows,
        drawn: DrawnRequests,
        max_requests: int,
        *,
        may_follow: bool,
        may_sample: bool,
    ) -> None:
        self._cache, self._states, self._scheduler, self._rows, self._drawn = cache, states, scheduler, rows, drawn
        self._max_requests, self._may_follow, self._may_sample = max_requests, may_follow, may_sample
        self._by_row: list[DeviceRequest] = []
        self._reasons = set[str]()  # that were logged
        self._barred: dict[Request, int] = {}  # need a host step first; output tokens when they left

    def __iter__(self) -> Iterator[DeviceRequest]:
        return iter(self._by_row)

    def __len__(self) -> int:
        return len(self._by_row)

    def join(self) -> None:
        """Add the requests that may be served here; none of them is in a pass."""
        others, decoding = self._rows_of_others(), self._scheduler.decoding()
        paid = self._paid(decoding)
        for request in decoding:
            if len(self._by_row) >= self._max_requests:
                return
            if request not in paid or not self._may_join(request):
                continue
            slots = self._cache.slots(request.request_id)
            rest = [row for other, row in others.items() if other is not request]
            if (loan := self._states.lend(request, slots, RECOMPUTED[-1], rest)) is None:
                continue
            others.pop(request, None)
            self._barred.pop(request, None)
            served = DeviceRequest(request, loan, num_recomputed=len(slots) - loan.num_known)
            self._by_row.append(served)  # first, so that a failure from here on releases it
            self._scheduler.mark_in_flight([served.span()])
            self._rows.write(len(self._by_row) - 1, request, slots, loan=loan, is_drawn=self._drawn.has(request))

    def _rows_of_others(self) -> dict[Request, int]:
        """Return the rows of the states of running requests that are not served here; -1 for none."""
        if not self._states.pools:
            return {}
        members = {served.request for served in self._by_row}
        running = [request for request in self._scheduler.running if request not in members]
        return {request: self._states.latest(self._cache.slots(request.request_id))[1] for request in running}

    def _paid(self, others: Sequence[Request] = ()) -> set[Request]:
        """Return those of the requests here, and then of others, whose masks of grammars their tenants' credit pays."""
        return set(self._scheduler.grammar_turns.choose([*(served.request for served in self._by_row), *others]))

    def _may_join(self, request: Request) -> bool:
        if self._barred.get(request) == request.num_output:
            return False
        why = why_on_host(request, may_follow=self._may_follow, may_sample=self._may_sample)
        why = why or self._drawn.why_not_drawn(request, len(self._by_row))
        if why is None and request.adapter is not None and not self._rows.takes_adapters:
            why = "an adapter, for which passes are not captured"
        if why is None and Processing.from_request(request) >= Processing.ADJUSTMENT and not self._rows.can_adjust():
            why = "penalties, for which no memory is left"
        if why is not None:
            self.note_on_host(why)
        return why is None

    def note_on_host(self, why: str) -> None:
        """Log each reason why requests take host steps once: on a GPU these are slower, and delay all others."""
        if why not in self._reasons:
            self._reasons.add(why)
            logger.info("some requests take host steps, and no steps on the device: %s", why)

    def reserve(self, launch: Launch) -> None:
        """Reserve slots of the target, and rows for states, for the requests of a step that is launched next."""
        for served in launch.device_requests:
            served.num_in_flight += 1
            launch.slots.append(self._cache.reserve(served.request.request_id, launch.size.shape.num_slots))
            launch.state_rows.append(served.next_state_row())
            self._states.drop(launch.slots[-1])
            self._states.forget(launch.state_rows[-1])
            served.num_recomputed = launch.size.max_depth  # the longest path

    def note_state(self, launch: Launch, row: int) -> None:
        """Note that a step which was read, and is kept, has written a state after its root."""
        self._states.note(launch.state_rows[row], int(launch.slots[row][0]))

    def send_away(self, served: DeviceRequest) -> None:
        """Let a request take a host step before it joins again; results of its steps in flight are dropped."""
        served.has_left = True
        self._barred[served.request] = served.request.num_output

    def dismiss(self) -> None:
        """Reuse the rows of requests that have ended or left, and of those that rest, with their grammars."""
        paid = self._paid()
        for served in self._by_row:
            served.has_left |= served.request.is_finished or not (served.num_in_flight or served.request in paid)
        for served in [served for served in self._by_row if served.has_left]:
            row, last = self._by_row.index(served), len(self._by_row) - 1
            if row != last:
                self._rows.move(last, row)
                self._by_row[row] = self._by_row[last]
            self._by_row.pop()
            self.release(served)
        for request in [request for request in self._barred if request.is_finished]:
            del self._barred[request]

    def release(self, served: DeviceRequest) -> None:
        """Return a request to the scheduler if it has left, and none of its steps is in flight."""
        if served.has_left and not served.num_in_flight:
            self._scheduler.release([served.span()])
            self._states.take_back(served.request)

    def clear(self) -> None:
        """Forget all rows, without a look at what is in flight."""
        self._by_row.clear()

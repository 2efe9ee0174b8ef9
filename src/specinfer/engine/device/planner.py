"""StepPlanner: plans the next step of the requests on a device, where the steps in flight allow one."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from specinfer.core.tree import TreeBudget
from specinfer.engine.device.budgets import DeviceBudgets
from specinfer.engine.device.draft_shape import PLAIN, DraftShape, shape_of
from specinfer.engine.device.drafts import DeviceDrafts
from specinfer.engine.device.guesses import DeviceGuesses
from specinfer.engine.device.launch import DeviceRequest, Guess, Launch
from specinfer.engine.device.launch_size import LaunchSize
from specinfer.engine.device.logprobs import Asked
from specinfer.engine.device.processing import Processing
from specinfer.engine.device.rows import DeviceRows
from specinfer.engine.device.served_requests import DrawnRequests, ServedRequests
from specinfer.engine.scheduler import Scheduler
from specinfer.engine.timer import StageClock
from specinfer.model.graphs.sizes import REQUESTS, at_least
from specinfer.model.runner import ModelRunner
from specinfer.policy.base import SpeculationPolicy


class StepPlanner:
    """A planner of steps: it sets their requests, budgets and sizes, and reserves only the slots of drafters.

    Arguments are the parts of a `DeviceExecutor`.
    """

    def __init__(
        self,
        target: ModelRunner,
        scheduler: Scheduler,
        rows: DeviceRows,
        served: ServedRequests,
        drawn: DrawnRequests,
        drafts: DeviceDrafts,
        guesses: DeviceGuesses,
        budgets: DeviceBudgets,
    ) -> None:
        self._target, self._scheduler, self._rows, self._served, self._drawn = target, scheduler, rows, served, drawn
        self._drafts, self._guesses, self._budgets = drafts, guesses, budgets

    def plan(self, policy: SpeculationPolicy, clock: StageClock, in_flight: Collection[Launch]) -> Launch | None:
        """Return the next step, or None if it has no request, or steps in flight must be read first."""
        device_requests = self._present(in_flight)
        if not device_requests:
            return None
        num_slots = self._num_draft_slots()
        if num_slots < 0:  # not one slot for each: the scheduler preempts a request
            self.leave(in_flight)
            return None
        budgets = self._budgets.of(device_requests, lambda spans: self._scheduler.cut(spans, policy.budgets(spans)))
        reach = max((budget.max_depth for budget in self._budgets.uncut), default=0)
        reach += sum(1 + launch.size.max_depth for launch in in_flight)  # tokens that the host does not know
        has_masks = any(served.request.restricts_tokens(reach) for served in device_requests)
        if has_masks and in_flight:
            return None  # masks need to know all tokens
        num_rows = at_least(REQUESTS, len(device_requests)) or REQUESTS[-1]
        most = self._rows.max_rows // num_rows
        leaving = [served for served in device_requests if self._drawn.are_masked(served.request, reach)]
        if not leaving:
            proposal = self._propose(device_requests, budgets, num_slots, most, waits=bool(in_flight))
            if proposal is None:
                return None  # lookups need to know all tokens
            shape, guesses = proposal
            leaving = self._drawn.undrawable(device_requests, budgets, shape, num_rows, most - 1)
        if leaving:
            for served in leaving:
                self._served.send_away(served)
            return self.plan(policy, clock, in_flight)
        if in_flight and shape.num_models > 1:
            return None  # one model may have to read what another drafted
        if shape.num_nodes and not self._drafts.make_ready(device_requests, budgets):
            return None  # the drafter has to read tokens that the host does not have yet
        self._budgets.next()
        size = self._size_of(device_requests, num_rows, shape, has_masks=has_masks)
        launch = self._fitting(size, num_slots, device_requests, budgets, clock, guesses)
        if launch is None:
            self.leave(in_flight)
        return launch

    def _present(self, in_flight: Collection[Launch]) -> list[DeviceRequest]:
        """Return the requests of the next step, by row; none if none goes on, or host steps have to come first."""
        self._served.dismiss()
        if self._scheduler.is_starved:
            self.leave(in_flight)
            return []
        self._served.join()
        device_requests = list(self._served)
        goes_on = any(served.request.max_new_tokens > served.num_in_flight for served in device_requests)
        return device_requests if goes_on else []

    def _num_draft_slots(self) -> int:
        """Return the draft tokens allowed for each request in the next step, or -1 if the last tokens have no slots."""
        spans = [served.span() for served in self._served]
        available = self._target.cache.num_available
        if available < len(spans):
            return -1
        return min(self._scheduler.num_draft_slots(spans), available - len(spans)) // len(spans)

    def _propose(
        self,
        device_requests: Sequence[DeviceRequest],
        budgets: Sequence[TreeBudget],
        num_slots: int,
        most: int,
        *,
        waits: bool,
    ) -> tuple[DraftShape, list[Guess]] | None:
        """Return the shape of the trees of a step, and their nodes if lookups alone propose them.

        Args:
            num_slots: Draft tokens of a request that there are slots for.
            most: Rows of a request.
            waits: Whether steps are in flight.

        Returns:
            Both, or None if lookups have to wait for the steps in flight.
        """
        uncut, has_lookups, most_nodes = self._budgets.uncut, self._guesses.has_lookups, min(num_slots, most - 1)
        looks_up = has_lookups and most > 1 and any(budget.max_nodes for budget in uncut)
        if looks_up and waits:
            return None
        if looks_up and not self._budgets.asks_model(device_requests, budgets):
            return self._guesses.alone(device_requests, uncut, most_nodes)
        guess_depth = max(budget.max_depth for budget in uncut) if has_lookups else 0
        return shape_of(budgets, most_nodes, most, guess_depth, self._drafts.kinds, 1 + num_slots), []

    def _size_of(
        self, device_requests: Sequence[DeviceRequest], num_rows: int, shape: DraftShape, *, has_masks: bool
    ) -> LaunchSize:
        """Return the smallest size of a step of these requests."""
        requests = [served.request for served in device_requests]
        return LaunchSize(
            num_rows,
            shape,
            processing=max(map(Processing.from_request, requests)),
            asked=Asked.from_params([request.params for request in requests], self._target.loaded.vocab_size),
            rule=self._drawn.rule if any(map(self._drawn.has, requests)) else None,
            adapts=any(request.adapter is not None for request in requests),
            num_recomputed=self._rows.num_recomputed(max(served.num_recomputed for served in device_requests)),
            is_masked=has_masks,
            is_traced=any(request.trace is not None for request in requests),
        )

    def _fitting(
        self,
        wanted: LaunchSize,
        num_slots: int,
        device_requests: list[DeviceRequest],
        budgets: list[TreeBudget],
        clock: StageClock,
        guesses: list[Guess],
    ) -> Launch | None:
        """Return the step in a size with slots and memory, or None if there is no such size."""
        num_read = self._drafts.count_read(device_requests, budgets)
        may_cut = not any(budget.widths for budget in budgets)
        for least in (wanted, replace(wanted, shape=PLAIN)):  # plainly, where drafters have too few slots
            size = self._rows.size_for(least, num_slots, may_cut=may_cut)
            if size is None:  # there is no memory to capture one
                return None
            assert size.shape.num_slots <= 1 + num_slots
            launch = Launch(device_requests, budgets, size, num_read, clock, guesses=guesses)
            if self._drafts.reserve(launch):
                if size.shape.num_models and self._guesses.has_lookups:
                    launch.guesses = self._guesses.of(device_requests, self._budgets.uncut, size.shape)
                return launch
        return None

    def leave(self, in_flight: Collection[Launch]) -> None:
        """Return all requests to host steps, once all steps in flight have been read."""
        if not in_flight:
            self._budgets.next()
            for served in self._served:
                self._served.send_away(served)
            self._served.dismiss()

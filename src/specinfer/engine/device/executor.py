"""DeviceExecutor: serves requests whose steps need no logits on the host, one step beginning before the last is read.

A request joins when it has emitted its first token. From then on its slots, last token, parameters and drafts are in a
row on the device (`state`), and one step of all of them is two programs (`programs`), launched one after the other, or
three if the host masks tokens (`masks`). The result of a step is read after the next one has been launched, so that the
device works while the host delivers tokens; but not where the host has to know all tokens first, as for masks and
lookups. Results for a request that has ended meanwhile are dropped.

    slots reserved for a request    [of the step launched first | of the one after it]

Each step has slots for a whole tree, and frees those that it does not keep when it has been read.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from specinfer.core.progress import ProgressCallback
from specinfer.core.request import Request
from specinfer.core.tree import TreeBudget
from specinfer.drafters import Drafter, MergedDrafter
from specinfer.drafters.growth.calibration import Calibration
from specinfer.drafters.small_model import SmallModelDrafter
from specinfer.engine.device.budgets import DeviceBudgets
from specinfer.engine.device.draft_shape import DraftShape, shape_of
from specinfer.engine.device.drafts import DeviceDrafts
from specinfer.engine.device.guesses import DeviceGuesses
from specinfer.engine.device.launch import DeviceRequest, Guess, Launch
from specinfer.engine.device.launch_size import LaunchSize
from specinfer.engine.device.logprobs import Asked
from specinfer.engine.device.processing import READS_LOGITS, Processing, drawn_rule, why_not, why_not_sampled
from specinfer.engine.device.rows import DeviceRows
from specinfer.engine.device.served_requests import DrawnRequests, ServedRequests
from specinfer.engine.executor import Outcome, StepResult
from specinfer.engine.learners import Learners
from specinfer.engine.scheduler import Scheduler
from specinfer.engine.timer import DeviceTimer, StageClock
from specinfer.model.graphs.sizes import REQUESTS, at_least
from specinfer.model.runner import ModelRunner, TargetRunner
from specinfer.policy.base import SpeculationPolicy

MAX_IN_FLIGHT = 2  # steps: one computes while the host reads the previous one
_ACCEPTANCE_EVERY = 16  # steps between updates of the acceptance probabilities


class DeviceExecutor:
    """An executor that launches steps of its requests on a device, and reads their results.

    Args:
        drafters: The drafters that are models; none to draft with lookups alone, or to decode plainly.
        merged: All drafters, with lookups, or None.
        max_requests: Maximum number of requests at a time.
        max_context: Longest request, in tokens.
        may_sample: Whether sampled requests are served.
        rule: Verification rule of requests that have none of their own.

    Attributes:
        num_launched: Steps since the start.
    """

    def __init__(
        self,
        target: ModelRunner,
        drafters: Sequence[SmallModelDrafter],
        merged: MergedDrafter | None,
        scheduler: Scheduler,
        max_requests: int,
        max_context: int,
        *,
        may_sample: bool = True,
        rule: str = "coupled",
    ) -> None:
        self._target, self._scheduler, self._may_sample = target, scheduler, may_sample
        num_rows = at_least(REQUESTS, max_requests) or REQUESTS[-1]
        self._device = DeviceRows(target, drafters, num_rows, max_context)
        self._launches: deque[Launch] = deque()  # oldest first
        self._drawn = DrawnRequests(drawn_rule(merged, rule), rule)
        self._drafts = DeviceDrafts(drafters, self._device)
        calibration = Calibration() if merged is None else merged.calibration
        self._guesses = DeviceGuesses(merged)
        self._budgets = DeviceBudgets(self._drafts.names, calibration, self._guesses.names, rule)
        self._served = ServedRequests(
            target.cache, target.tensors.states, scheduler, self._device, self._drawn, min(max_requests, num_rows),
            may_follow=self._guesses.has_lookups, may_sample=may_sample,
        )  # fmt: skip
        self._error: Exception | None = None  # of a step that could not begin
        self.num_launched = 0

    @classmethod
    def from_drafter(
        cls, target: TargetRunner, drafter: Drafter | None, scheduler: Scheduler, verification: str = "coupled"
    ) -> "DeviceExecutor | None":
        """Make an executor, or return None where `processing.why_not` has a reason.

        Args:
            target: The runner of the target.
            drafter: The drafters, or None without speculation: small models, heads, and lookups.
            scheduler: The scheduler of the requests.
            verification: Verification rule. Sampled requests are served where `why_not_sampled` has no reason.
        """
        if why_not(target, drafter) is not None:
            return None
        assert isinstance(target, ModelRunner)
        models = list[SmallModelDrafter]()
        if drafter is not None:
            assert isinstance(drafter, MergedDrafter)
            models = drafter.models
        max_context = min(target.loaded.max_position, target.cache.num_slots)
        may_sample = why_not_sampled(drafter, verification) is None
        most = scheduler.max_num_seqs
        rule = "coupled" if drafter is None else verification  # without drafters every rule is plain decoding
        return cls(target, models, drafter, scheduler, most, max_context, may_sample=may_sample, rule=rule)

    @property
    def num_in_flight(self) -> int:
        """Number of steps that were launched and not yet read, or 1 if one could not begin."""
        return max(len(self._launches), int(self._error is not None))

    @property
    def requests(self) -> list[Request]:
        """Requests that are served here now, or were and still have steps in flight."""
        in_flight = [served.request for launch in self._launches for served in launch.device_requests]
        return list(dict.fromkeys([*in_flight, *(served.request for served in self._served if not served.has_left)]))

    def prepare(self, budgets: Sequence[TreeBudget], progress: ProgressCallback | None = None) -> None:
        """Capture plain steps and those with trees of these budgets, with the processing that the model's own sampling
        parameters need; others are captured when they are worth it.
        """
        assert not self.requests, "programs change the state of rows when their kernels are compiled"
        defaults, rule = dict(self._target.loaded.sampling_defaults), self._drawn.rule
        if not self._may_sample:
            defaults["temperature"], rule = 0.0, None
        self._device.prepare(budgets, defaults, rule, progress, has_lookups=self._guesses.has_lookups)

    # ---------------------------------------------------------------------------------------- launch

    def plan(self, learners: Learners, timer: DeviceTimer | None) -> Launch | None:
        if self._error is not None or len(self._launches) >= MAX_IN_FLIGHT:
            return None
        try:
            if not learners.reads_logits:
                return self._plan(learners.policy, StageClock(timer))
            self._served.note_on_host(READS_LOGITS)
            self.leave()
        except Exception as error:
            self._error = error
        return None

    def _plan(self, policy: SpeculationPolicy, clock: StageClock) -> Launch | None:
        """Return the next step, or None if it has no request, or what is in flight must be read first."""
        self._served.dismiss()
        if self._scheduler.is_starved:
            self.leave()
            return None
        self._served.join()
        device_requests = list(self._served)
        going = [served for served in device_requests if served.request.max_new_tokens > served.num_in_flight]
        num_slots = self._num_draft_slots()
        if not going or num_slots < 0:
            if going:  # not one slot for each: the scheduler preempts a request
                self.leave()
            return None
        budgets = self._budgets.of(device_requests, policy.budgets)
        reach = max((budget.max_depth for budget in self._budgets.uncut), default=0)
        reach += sum(1 + launch.size.max_depth for launch in self._launches)  # tokens that the host does not know
        has_masks = any(served.request.restricts_tokens(reach) for served in device_requests)
        if has_masks and self._launches:
            return None  # masks need to know all tokens
        num_rows = at_least(REQUESTS, len(device_requests)) or REQUESTS[-1]
        most = self._device.max_rows // num_rows
        leaving = [served for served in device_requests if self._drawn.are_masked(served.request, reach)]
        if not leaving:
            proposal = self._propose(device_requests, budgets, num_slots, most)
            if proposal is None:
                return None  # lookups need to know all tokens
            shape, guesses = proposal
            leaving = self._drawn.undrawable(device_requests, budgets, shape, num_rows, most - 1)
        if leaving:
            for served in leaving:
                self._served.send_away(served)
            return self._plan(policy, clock)
        if shape is not None and self._launches and shape.num_models > 1:
            return None  # one model may have to read what another drafted
        if shape is not None and not self._drafts.make_ready(device_requests, budgets):
            return None  # the drafter has to read tokens that the host does not have yet
        self._budgets.next()
        num_read = self._drafts.count_read(device_requests, budgets)
        wanted = self._size_of(device_requests, num_rows, shape, has_masks=has_masks)
        may_cut = not any(budget.widths for budget in budgets)
        for least in (wanted, replace(wanted, shape=None)):  # plainly, where drafters have too few slots
            size = self._device.size_for(least, num_slots, may_cut=may_cut)
            if size is None:  # there is no memory to capture one
                break
            assert size.num_slots <= 1 + num_slots
            launch = Launch(device_requests, budgets, size, num_read, clock, guesses=guesses)
            if self._drafts.reserve(launch):
                if size.shape is not None and size.num_models and self._guesses.has_lookups:
                    launch.guesses = self._guesses.of(device_requests, self._budgets.uncut, size.shape)
                return launch
        self.leave()
        return None

    def _propose(
        self, device_requests: Sequence[DeviceRequest], budgets: Sequence[TreeBudget], num_slots: int, most: int
    ) -> tuple[DraftShape | None, list[Guess]] | None:
        """Return the shape of the trees of a step, and their nodes if lookups alone propose them.

        Args:
            num_slots: Draft tokens of a request that there are slots for.
            most: Rows of a request.

        Returns:
            Both, or None if lookups have to wait for what is in flight.
        """
        uncut, has_lookups, most_nodes = self._budgets.uncut, self._guesses.has_lookups, min(num_slots, most - 1)
        looks_up = has_lookups and most > 1 and any(budget.max_nodes for budget in uncut)
        if looks_up and self._launches:
            return None
        if looks_up and not self._budgets.asks_model(device_requests, budgets):
            return self._guesses.alone(device_requests, uncut, most_nodes)
        guess_depth = max(budget.max_depth for budget in uncut) if has_lookups else 0
        return shape_of(budgets, most_nodes, most, guess_depth, self._drafts.kinds, 1 + num_slots), []

    def _size_of(
        self, device_requests: Sequence[DeviceRequest], num_rows: int, shape: DraftShape | None, *, has_masks: bool
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
            num_recomputed=self._device.num_recomputed(max(served.num_recomputed for served in device_requests)),
            is_masked=has_masks,
            is_traced=any(request.trace is not None for request in requests),
        )

    def draft(self, plan: Launch) -> None:
        try:
            self._reserve(plan)
        except Exception as error:
            self._error = error

    def score(self, plan: Launch) -> None:
        if self._error is None:
            try:
                self._device.launch(plan)
            except Exception as error:  # such as a program that cannot be captured
                self._error = error

    def _reserve(self, launch: Launch) -> None:
        """Reserve the slots of a step, whose programs draft, score and verify."""
        if not launch.size.num_models:
            for served in launch.device_requests:
                served.read_by.clear()  # from here on the drafters miss the emitted tokens
        if self.num_launched % _ACCEPTANCE_EVERY == 0:
            self._device.write_acceptance(self._budgets.chances())
        self.num_launched += 1
        self._launches.append(launch)
        self._scheduler.charge([served.request for served in launch.device_requests])
        self._served.reserve(launch)
        self._drafts.share_slots(launch)

    def _num_draft_slots(self) -> int:
        """Return the draft tokens allowed for each request in the next step, or -1 if the last tokens have no slots."""
        spans = [served.span() for served in self._served]
        available = self._target.cache.num_available
        if not spans or available < len(spans):
            return -1
        return min(self._scheduler.num_draft_slots(spans), available - len(spans)) // len(spans)

    # ------------------------------------------------------------------------------------------ read

    def verify(self) -> StepResult:
        clock = self._launches[0].clock if self._launches else StageClock()
        try:
            if self._error is not None:
                raise self._error
            return self._read(self._launches[0])
        except Exception as error:
            return StepResult((), clock, error=error)

    def _read(self, launch: Launch) -> StepResult:
        """Wait for a step, and free what is not kept of its slots."""
        results = launch.results
        draft_time, target_time = results.wait()
        self._device.sizes.observe(launch.size, draft_time + target_time)
        launch.clock.skip_to(self._device.sizes.captured_at)  # until then nothing was computed
        self._budgets.observe(results.path_prob(launch.best_first_rows))
        outcomes = []
        for row, served in enumerate(launch.device_requests):
            served.num_in_flight -= 1
            answer, is_served = results.of_row(row), not (served.has_left or served.request.is_finished)
            is_kept = is_served and answer.next_token >= 0
            self._drafts.settle(launch, row, answer, is_kept=is_kept)
            if is_kept:
                self._served.note_state(launch, row)
                drafted = self._drafts.names_of(launch, row) if launch.budgets[row].max_nodes else ()
                self._drawn.note(served.request, answer, drafted)
                assert answer.tokens[0] == served.request.token_ids[-1]
                guesses = launch.guesses[row].tree if launch.guesses else None
                tree = answer.tree(self._drafts.names_of(launch, row), guesses)
                outcomes.append(
                    Outcome(
                        served.span(), tree, answer.acceptance(),
                        logprobs=results.logprobs(row, answer.emitted, served.request.params),
                        probs=[] if served.request.trace is None else results.probs(row),
                        num_slots=launch.size.num_slots,
                    )
                )  # fmt: skip
            else:
                self._target.cache.commit(served.request.request_id, (), launch.size.num_slots)
            if is_served and not is_kept:
                self._served.send_away(served)  # a host step finds out what is wrong
            self._served.release(served)
        self._launches.popleft()  # last, so that a failure before drops the whole step
        return StepResult(
            [outcome.span for outcome in outcomes], launch.clock, outcomes, launch.num_read,
            sum(budget.max_nodes for budget in launch.budgets),
            num_model_levels=launch.size.max_depth if launch.size.num_models else 0,
            device_seconds={"draft": draft_time, "target": target_time},
        )  # fmt: skip

    # ----------------------------------------------------------------------------------------- leave

    def leave(self) -> None:
        """Return all requests to host steps, once what is in flight has been read."""
        if not self._launches:
            self._budgets.next()
            for served in self._served:
                self._served.send_away(served)
            self._served.dismiss()

    def abandon(self) -> None:
        """Drop what is in flight; all requests continue with host steps from the last result that was read."""
        try:
            if self._launches:
                self._device.wait()
        finally:
            everybody = {id(served): served for launch in self._launches for served in launch.device_requests}
            everybody |= {id(served): served for served in self._served}
            self._launches.clear()
            self._error = None
            self._served.clear()
            self._budgets.next()
            for served in everybody.values():
                served.num_in_flight = 0
                self._served.send_away(served)
                self._scheduler.keep(served.request, ())
                self._drafts.forget(served)
                self._served.release(served)

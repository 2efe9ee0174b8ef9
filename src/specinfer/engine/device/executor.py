"""DeviceExecutor: serves requests whose steps need no logits on the host, one step beginning before the last is read.

A request joins when it has emitted its first token. From then on its slots, last token, parameters and drafts are in a
row on the device (`state`), and one step of all of them is two programs (`step_programs`), launched one after the
other, or three if the host masks tokens (`masks`). The result of a step is read after the next one has been launched,
so that the device works while the host delivers tokens; but not where the host has to know all tokens first, as for
masks and lookups. Results for a request that has ended meanwhile are dropped.

    slots reserved for a request    [of the step launched first | of the one after it]

Each step has slots for a whole tree, and frees those that it does not keep when it has been read.
"""

from collections import deque
from collections.abc import Sequence

from specinfer.core.progress import ProgressCallback
from specinfer.core.request import Request
from specinfer.core.tree import TreeBudget
from specinfer.drafters import Drafter, MergedDrafter
from specinfer.drafters.growth.calibration import Calibration
from specinfer.drafters.small_model import SmallModelDrafter
from specinfer.engine.device.budgets import DeviceBudgets
from specinfer.engine.device.conditions import READS_LOGITS, drawn_rule, why_not, why_not_sampled
from specinfer.engine.device.drafts import DeviceDrafts
from specinfer.engine.device.guesses import DeviceGuesses
from specinfer.engine.device.launch import Launch
from specinfer.engine.device.planner import StepPlanner
from specinfer.engine.device.rows import DeviceRows
from specinfer.engine.device.served_requests import DrawnRequests, ServedRequests
from specinfer.engine.executor import Outcome, StepResult
from specinfer.engine.learners import Learners
from specinfer.engine.scheduler import Scheduler
from specinfer.engine.timer import DeviceTimer, StageClock
from specinfer.model.graphs.sizes import REQUESTS, at_least
from specinfer.model.runner import ModelRunner, TargetRunner

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
        self._planner = StepPlanner(
            target, scheduler, self._device, self._served, self._drawn, self._drafts, self._guesses, self._budgets
        )
        self._error: Exception | None = None  # of a step that could not begin
        self.num_launched = 0

    @classmethod
    def from_drafter(
        cls, target: TargetRunner, drafter: Drafter | None, scheduler: Scheduler, verification: str = "coupled"
    ) -> "DeviceExecutor | None":
        """Make an executor, or return None where `conditions.why_not` has a reason.

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
                return self._planner.plan(learners.policy, StageClock(timer), self._launches)
            self._served.note_on_host(READS_LOGITS)
            self.leave()
        except Exception as error:
            self._error = error
        return None

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
        if not launch.size.shape.num_models:
            for served in launch.device_requests:
                served.read_by.clear()  # from here on the drafters miss the emitted tokens
        if self.num_launched % _ACCEPTANCE_EVERY == 0:
            self._device.write_acceptance(self._budgets.chances())
        self.num_launched += 1
        self._launches.append(launch)
        self._served.reserve(launch)
        self._drafts.share_slots(launch)

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
                        num_slots=launch.size.shape.num_slots,
                    )
                )  # fmt: skip
            else:
                self._target.cache.commit(served.request.request_id, (), launch.size.shape.num_slots)
            if is_served and not is_kept:
                self._served.send_away(served)  # a host step finds out what is wrong
            self._served.release(served)
        self._launches.popleft()  # last, so that a failure before drops the whole step
        return StepResult(
            [outcome.span for outcome in outcomes], launch.clock, outcomes, launch.num_read,
            sum(budget.max_nodes for budget in launch.budgets),
            num_model_levels=launch.size.max_depth if launch.size.shape.num_models else 0,
            device_seconds={"draft": draft_time, "target": target_time},
        )  # fmt: skip

    # ----------------------------------------------------------------------------------------- leave

    def leave(self) -> None:
        """Return all requests to host steps, once what is in flight has been read."""
        self._planner.leave(self._launches)

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

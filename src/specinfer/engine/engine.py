"""Engine: processes requests step by step and emits their tokens."""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specinfer.core.errors import EngineDeadError, WeightsError, first_line
from specinfer.core.request import Fault, FinishReason, Request, Span
from specinfer.core.step_record import StepRecord
from specinfer.core.tree import TokenTree
from specinfer.drafters.base import Drafter
from specinfer.engine.device.executor import MAX_IN_FLIGHT, DeviceExecutor
from specinfer.engine.drafting import asks_model, fit, is_sound
from specinfer.engine.emission import NO_TOKEN_REASONS, emit, note_prompt, reads_prompt
from specinfer.engine.in_flight_step import InFlightStep
from specinfer.engine.metrics import EngineMetrics, Observer
from specinfer.engine.scheduler import Scheduler
from specinfer.engine.timer import DeviceTimer, StageClock
from specinfer.engine.trace import Tracer
from specinfer.model.batch import Piece
from specinfer.model.graphs.capture import CaptureError
from specinfer.model.runner import TargetRunner
from specinfer.policy.base import SpeculationPolicy
from specinfer.verify import NO_VALID_TOKEN, Acceptance, verify

logger = logging.getLogger(__name__)


class Engine:
    """A loop that serves any number of requests with one target, one drafter (or none) and one policy.

    Args:
        verification: Verification rule; `config.DRAFT_SAMPLINGS` lists the drawing methods that it supports.
        executor: Executor for requests that need nothing from the host in a step, or None to serve all by ordinary
            steps.
    """

    def __init__(
        self,
        target: TargetRunner,
        drafter: Drafter | None,
        policy: SpeculationPolicy,
        scheduler: Scheduler,
        verification: str = "coupled",
        executor: DeviceExecutor | None = None,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.policy = policy
        self.scheduler = scheduler
        # Without draft tokens every rule is plain decoding.
        self.verification = verification if drafter is not None else "coupled"
        self.metrics = EngineMetrics()
        self.observers: list[Observer] = [Tracer()]
        self.timer: DeviceTimer | None = None  # set while stages are measured on the device
        self._executor = executor
        self._in_flight_steps: deque[InFlightStep] = deque()  # passes in flight, oldest first
        self._last_pass_end = 0.0  # by `time.perf_counter`
        self._waited = 0.0  # seconds that passes had waited for weights by then
        self._num_failed_steps = self._num_failed_on_device = 0  # in a row

    @property
    def has_work(self) -> bool:
        in_flight = self._in_flight_steps or (self._executor is not None and self._executor.num_in_flight)
        return bool(self.scheduler.running or self.scheduler.waiting or in_flight)

    def add(self, request: Request) -> None:
        """Queue a request; it starts at the next step with room."""
        request.arrival_time = request.arrival_time or time.time()
        self.scheduler.add(request)

    def abort(self, request: Request, error: str | None = None, fault: Fault = Fault.BROKEN) -> None:
        """End a request at once, in any state; with an error unless the caller asked for the end.

        Slots that a pass in flight writes to are freed when the pass has ended, or at once if no request is running.
        """
        self._abort(request, error, fault)
        if not self.scheduler.running:
            self._abandon()

    def _abort(self, request: Request, error: str | None = None, fault: Fault = Fault.BROKEN) -> None:
        if not request.is_finished:
            request.error, request.fault = error, None if error is None else fault
            self._end(request, FinishReason.ABORT if error is None else FinishReason.ERROR)

    def step(self) -> list[Request]:
        """Begin target passes until each pipeline stage has one, and finish the oldest.

        Requests on the device executor have separate steps, which run before the others.

        Returns:
            The requests that emitted tokens or ended.

        Raises:
            EngineDeadError: A part of the target is lost.
            RuntimeError: Steps fail repeatedly for all requests, so no single request is the cause.
        """
        try:
            on_device = self._step_on_device()
            while len(self._in_flight_steps) < self.target.max_in_flight and self._begin():
                pass
            ended = on_device + (self._finish() if self._in_flight_steps else [])
            if self._executor is not None and not self.scheduler.running:
                self._executor.abandon()  # the steps in flight there serve no request any more
            return ended
        except BaseException:  # an interrupt too: no request may keep slots that were never written
            self._abandon()
            raise

    def _step_on_device(self) -> list[Request]:
        """Launch steps on the device until two are in flight, and collect the results of the oldest."""
        executor = self._executor
        if executor is None:
            return []
        try:
            if self._shows_logits():
                executor.leave()
            else:
                while executor.num_in_flight < MAX_IN_FLIGHT and executor.begin(self.policy.budgets, self.timer):
                    pass
            return self._finish_on_device(executor) if executor.num_in_flight else []
        except Exception as error:
            executor.abandon()
            self._num_failed_on_device += 1
            logger.exception("a step on the device failed; its requests go on with ordinary steps")
            if isinstance(error, CaptureError) or self._num_failed_on_device >= MAX_FAILED_STEPS:
                logger.warning("no more steps are taken on the device: %s", first_line(error))
                self._executor = None
            return []

    def _shows_logits(self) -> bool:
        """Return whether the policy or an observer reads logits, which steps on the device do not keep."""
        return self.policy.reads_logits or any(observer.reads_logits for observer in self.observers)

    def _finish_on_device(self, executor: DeviceExecutor) -> list[Request]:
        """Deliver the tokens of the oldest step on the device to its requests."""
        step, num_generated = executor.finish(), 0
        clock = step.clock
        clock.skip_to(max(self._last_pass_end, executor.captured_at))
        for span, tree, acceptance in zip(step.spans, step.trees, step.acceptances, strict=True):
            try:
                num_generated += self._take(span.request, tree, acceptance, NO_LOGITS)
                self._settle(span.request, tree, acceptance)
            except Exception as error:
                self._fail(span.request, error)
        clock.lap("rest")
        clock.assign("draft", step.draft_time)
        clock.assign("target", step.target_time)
        self._last_pass_end, self._num_failed_on_device = clock.last, 0
        if step.spans:  # otherwise all had ended, and there is nothing to learn
            record = StepRecord.of(
                step.spans, step.trees, num_generated, step.num_read, clock.seconds, step.num_budgeted,
                num_model_levels=step.num_levels,
            )  # fmt: skip
            clock.end(record)
            self._note(record, list(zip(step.trees, step.acceptances, strict=True)))
        return [span.request for span in step.spans]

    def _begin(self) -> bool:
        """Begin a target pass over a group of requests. Return False if no request is ready."""
        clock = StageClock(self.timer)
        spans = self._schedule()
        if not spans:
            return False
        clock.lap("rest")
        trees, num_read, num_budgeted = self._draft(spans)
        clock.lap("draft")
        in_flight_step = InFlightStep(spans, trees, num_read, num_budgeted, clock, self.target.loaded.seconds_waiting)
        self._in_flight_steps.append(in_flight_step)
        self.scheduler.mark_in_flight(spans)
        try:
            in_flight_step.target_pass = self.target.begin(self._pieces(spans, trees))
        except Exception as error:  # raised when this pass is finished
            in_flight_step.error = error
        return True

    def _finish(self) -> list[Request]:
        """Finish the oldest pass, and deliver its tokens to its requests."""
        in_flight_step = self._in_flight_steps[0]
        spans, trees, clock = in_flight_step.spans, in_flight_step.trees, in_flight_step.clock
        clock.skip_to(self._last_pass_end)
        try:
            logits = self._by_tree(spans, trees, in_flight_step.wait())
            clock.lap("target")
            waited = self.target.loaded.seconds_waiting - max(in_flight_step.waited, self._waited)
            self._last_pass_end, self._waited = clock.last, self.target.loaded.seconds_waiting
            self.scheduler.release(spans)
            decoding = in_flight_step.decoding()
            acceptances = self._verify(decoding, logits)
            clock.lap("verify")
            num_generated = self._commit(spans, trees, acceptances, logits)
        except Exception as error:
            self._give_up(in_flight_step)
            return self._recover(spans, error)
        self._in_flight_steps.popleft()
        self._num_failed_steps = 0
        clock.lap("rest")
        record = StepRecord.of(
            spans, trees, num_generated, in_flight_step.num_read, clock.seconds, in_flight_step.num_budgeted, waited
        )
        clock.end(record)
        self._note(record, [(tree, kept) for (_, tree), kept in zip(decoding, acceptances, strict=True)])
        return [span.request for span, _ in decoding]

    def _note(self, record: StepRecord, outcomes: Sequence[tuple[TokenTree, Acceptance]]) -> None:
        """Report a step to the metrics, the policy and the observers."""
        self.metrics.record(record)
        try:
            self.policy.observe(record, outcomes)
        except Exception:  # a step that the policy did not learn from costs at most time
            logger.exception("%s failed", type(self.policy).__name__)
        self._notify(lambda observer: observer.on_step(record))

    def _abandon(self) -> None:
        """Drop all passes in flight; what unfinished requests still need is computed again."""
        if self._executor is not None:
            self._executor.abandon()
        while self._in_flight_steps:
            self._give_up(self._in_flight_steps[0])

    def _give_up(self, in_flight_step: InFlightStep) -> None:
        """Drop a pass; its requests keep nothing that it computed."""
        self._in_flight_steps.remove(in_flight_step)
        self.scheduler.release(in_flight_step.spans)
        for span in in_flight_step.spans:
            self._keep(span.request, ())

    def _recover(self, spans: Sequence[Span], error: Exception) -> list[Request]:
        """Recover from a failed pass; passes begun after it are finished first."""
        if isinstance(error, EngineDeadError):
            raise error
        if isinstance(error, WeightsError):  # no request is the cause, and each would read the weights again
            for span in spans:
                self._fail(span.request, error)
            return [span.request for span in spans]
        ended = []
        while self._in_flight_steps:
            ended += self._finish()
        return ended + self._step_apart(spans, error)

    def _step_apart(self, spans: Sequence[Span], error: Exception) -> list[Request]:
        """Run each request of a failed pass alone and without draft tokens, so that only the faulty one ends.

        Raises:
            RuntimeError: All of them fail repeatedly, so no single request is the cause.
        """
        logger.error("a pass of %d requests failed; each is tried alone", len(spans), exc_info=error)
        num_failed = 0
        for span in spans:
            if span.request.is_finished or span.request.num_computed != span.start:
                continue  # it has received its tokens; the failure came later
            tree = span.tree()
            try:
                logits = self._by_tree([span], [tree], self.target.forward(self._pieces([span], [tree])))
                acceptances = self._verify([(span, tree)] if tree else [], logits)
                self._commit([span], [tree], acceptances, logits)
            except EngineDeadError:
                raise
            except Exception as alone:
                num_failed += 1
                self._keep(span.request, ())
                self._fail(span.request, alone)
        self._num_failed_steps = self._num_failed_steps + 1 if num_failed == len(spans) else 0
        if self._num_failed_steps >= MAX_FAILED_STEPS:
            raise RuntimeError(f"{MAX_FAILED_STEPS} steps in a row failed for every request") from error
        return [span.request for span in spans]

    def _fail(self, request: Request, error: Exception) -> None:
        """End a request because of an internal error; the others continue."""
        logger.error("request %s failed", request.request_id, exc_info=error)
        if not request.is_finished:
            why = str(error) if isinstance(error, WeightsError) else type(error).__name__
            self._abort(request, f"the engine failed on this request: {why}")

    def _schedule(self) -> list[Span]:
        schedule = self.scheduler.schedule(self.target.max_in_flight)
        self.metrics.num_preempted += len(schedule.preempted)
        for request in schedule.preempted:
            self._forget(request)
        now = time.time()
        for span in schedule.spans:
            span.request.scheduled_time = span.request.scheduled_time or now
        return schedule.spans

    def _draft(self, spans: Sequence[Span]) -> tuple[list[TokenTree | None], int, int]:
        """Draft a tree for each span.

        Returns:
            The trees (None for a prompt chunk), the tokens that drafters read for the first time, and the nodes that
            the policy allowed for all trees.
        """
        trees = [span.tree() for span in spans]
        decoding = [i for i, span in enumerate(spans) if span.produces_token]
        if self.drafter is None or not decoding:
            return trees, 0, 0
        asking = [spans[i] for i in decoding]
        free_slots = self.scheduler.room_for_guesses(spans, self.target.max_in_flight - len(self._in_flight_steps))
        if self.target.capacity is not None:
            num_known = sum(span.end - span.start for span in spans)
            num_prompt_logprobs = sum(span.end - span.start for span in spans if reads_prompt(span))
            free_slots = min(free_slots, self.target.capacity.max_guesses(num_known, num_prompt_logprobs))
        num_budgeted = 0
        try:
            budgets = fit(asking, self.policy.budgets(asking), free_slots)
            num_budgeted = sum(budget.max_nodes for budget in budgets)
            if not num_budgeted:
                return trees, 0, 0
            drafted = self.drafter.draft(asking, budgets)
        except Exception:  # drafts are optional, so the step goes on without them
            logger.exception("drafting failed; this step decodes plainly")
            self.metrics.num_draft_failures += 1
            for span in asking:
                self._forget(span.request)
            return trees, 0, num_budgeted
        num_read = 0
        for i, tree, budget in zip(decoding, drafted, budgets, strict=True):
            request = spans[i].request
            if budget.max_nodes and asks_model(budget) and not request.drafter_knows:
                request.drafter_knows = True
                num_read += len(request.token_ids) - request.num_cached
            if is_sound(tree, spans[i], budget, self.target.loaded.vocab_size):
                trees[i] = tree
        return trees, num_read, num_budgeted

    def _pieces(self, spans: Sequence[Span], trees: Sequence[TokenTree | None]) -> list[Piece]:
        cache, pieces = self.target.cache, []
        for span, tree in zip(spans, trees, strict=True):
            request_id = span.request.request_id
            num_new = span.end - span.start + (tree.num_guessed if tree else 0)
            slots = cache.reserve(request_id, num_new)
            piece = Piece.of_span(span.tokens, tree, cache.slots(request_id), slots)
            if reads_prompt(span):
                piece = replace(piece, num_logits=num_new)
            pieces.append(piece)
        return pieces

    def _by_tree(self, spans: Sequence[Span], trees: Sequence[TokenTree | None], logits: Tensor) -> list[Tensor]:
        """Return the logits of each tree: [nodes, vocab]. Rows for prompt log-probabilities go to their requests.

        Requests that ended while the pass was in flight are left out.
        """
        rows, start = [], 0
        for span, tree in zip(spans, trees, strict=True):
            num_tree = len(tree) if tree else 0
            if reads_prompt(span):
                num_before = span.end - span.start - (1 if tree else 0)
                if not span.request.is_finished:
                    note_prompt(span, logits[start : start + num_before + (1 if tree else 0)])
                start += num_before
            if tree and not span.request.is_finished:
                rows.append(logits[start : start + num_tree])
            start += num_tree
        return rows

    def _verify(self, decoding: Sequence[tuple[Span, TokenTree]], logits: Sequence[Tensor]) -> list[Acceptance]:
        if not decoding:
            return []
        trees = [tree for _, tree in decoding]
        return verify(self.verification, logits, [span.request for span, _ in decoding], trees)

    def _commit(
        self,
        spans: Sequence[Span],
        trees: Sequence[TokenTree | None],
        acceptances: Sequence[Acceptance],
        logits: Sequence[Tensor],
    ) -> int:
        """Store what was accepted in the cache, the requests and the drafter; return the number of emitted tokens."""
        num_generated, left = 0, iter(zip(acceptances, logits, strict=True))
        for span, tree in zip(spans, trees, strict=True):
            if span.request.is_finished:  # it ended while its pass was in flight
                continue
            if tree is None:
                self._keep(span.request, range(span.end - span.start))
                continue
            acceptance, rows = next(left)
            try:
                num_generated += self._commit_tree(span, tree, acceptance, rows)
            except Exception as error:
                self._fail(span.request, error)
        return num_generated

    def _commit_tree(self, span: Span, tree: TokenTree, acceptance: Acceptance, logits: Tensor) -> int:
        """Store what one request accepts of its tree; return the number of emitted tokens."""
        request, num_chain = span.request, span.end - span.start
        if acceptance.next_token < 0:
            self._handle_no_valid_token(request, tree, num_chain, acceptance.next_token)
            return 0
        num_generated = self._take(request, tree, acceptance, logits)
        # Reserved slots: the chain, whose last token is node 0, then nodes 1, 2, ...
        path = acceptance.path[:num_generated]  # the request may have ended inside the path
        self._keep(request, [*range(num_chain), *(num_chain - 1 + node for node in path)])
        if span.start < len(request.prompt_ids):  # its prompt is computed, and can be shared as a prefix
            self.target.cache.share(request.request_id, request.cache_salt, request.token_ids)
        self._settle(request, tree, acceptance)
        return num_generated

    def _take(self, request: Request, tree: TokenTree, acceptance: Acceptance, logits: Tensor) -> int:
        """Emit the tokens of a request, notify observers and the policy, and return the number of tokens."""
        num_generated = emit(request, tree, acceptance, logits)
        self._notify(lambda observer: observer.on_tokens(request, tree, acceptance, logits, num_generated))
        try:
            self.policy.on_tokens(request, tree, acceptance, logits, num_generated)
        except Exception:  # a step that the policy did not learn from costs at most time
            logger.exception("%s failed", type(self.policy).__name__)
        return num_generated

    def _settle(self, request: Request, tree: TokenTree, acceptance: Acceptance) -> None:
        """End the request or let its drafter observe the result, after the cache has been updated."""
        if request.is_finished:
            self._end(request)
        elif self.drafter is not None:
            self.drafter.observe(request, tree, acceptance)

    def _notify(self, call: Callable[[Observer], None]) -> None:
        """Notify the observers; a failing observer must not stop the engine."""
        for observer in self.observers:
            try:
                call(observer)
            except Exception:
                logger.exception("%s failed", type(observer).__name__)

    def _handle_no_valid_token(self, request: Request, tree: TokenTree, num_chain: int, reason: int) -> None:
        """Handle a request without a next token.

        A draft token may be the cause, because its values reach other nodes. Without draft tokens it is the request
        itself.
        """
        if tree.num_guessed and request.may_guess:
            request.may_guess = False
            self._keep(request, range(num_chain - 1))  # the root is computed again
            return
        request.error = NO_TOKEN_REASONS[reason]
        request.fault = Fault.NO_VALID_TOKEN if reason == NO_VALID_TOKEN else Fault.BROKEN
        if reason == NO_VALID_TOKEN and request.grammar is not None and request.grammar.is_lost:
            request.error = "structured_outputs: the grammar became too much work to follow; make it simpler"
        self._end(request, FinishReason.ERROR)

    def _keep(self, request: Request, kept: Sequence[int]) -> None:
        """Commit these of the slots reserved in this step, and free the others."""
        self.target.cache.commit(request.request_id, kept)
        request.num_computed = len(self.target.cache.slots(request.request_id))

    def _end(self, request: Request, reason: FinishReason | None = None) -> None:
        if reason is not None:
            request.finish(reason)
        request.finished_time = time.time()
        self.scheduler.remove(request)
        self._forget(request)

    def _forget(self, request: Request) -> None:
        request.drafter_knows = False
        if self.drafter is not None:
            self.drafter.forget(request.request_id)


NO_LOGITS = torch.empty((0, 0))  # for steps on the device, where nothing reads logits
MAX_FAILED_STEPS = 3  # consecutive failures of all requests, after which the engine itself is at fault

"""Committer: stores the result of a step in the cache, the requests and the drafter, and reports it to the learners."""

from collections.abc import Sequence

from specinfer.core.request import Request
from specinfer.core.step_record import PromptCounts, StepRecord
from specinfer.drafters.base import Drafter
from specinfer.engine.emission import emit, target_probs, trace_step
from specinfer.engine.ending import Endings
from specinfer.engine.executor import Outcome, StepResult
from specinfer.engine.learners import Learners
from specinfer.engine.scheduler import Scheduler


class Committer:
    """A writer of what was accepted. A failure on one request ends this request only."""

    def __init__(self, scheduler: Scheduler, drafter: Drafter | None, learners: Learners, endings: Endings) -> None:
        self._scheduler, self._drafter = scheduler, drafter
        self._learners, self._endings = learners, endings
        self._last_end = 0.0  # when the last step ended, by `time.perf_counter`

    def commit(self, result: StepResult) -> list[Request]:
        """Store and report the result of a step, and return the requests that emitted tokens or ended.

        Raises:
            Exception: The error of the step's pass.
        """
        if result.error is not None:
            raise result.error
        clock, outcomes = result.clock, result.outcomes
        clock.skip_to(self._last_end)
        prompts = PromptCounts.note([outcome.span for outcome in outcomes if not outcome.span.request.is_finished])
        num_generated = self.store(outcomes)
        clock.lap("rest")
        for stage, seconds in result.device_seconds.items():
            clock.assign(stage, seconds)
        self._last_end = clock.last
        if outcomes:  # otherwise all requests had ended, and there is nothing to learn
            record = StepRecord.from_step(
                [outcome.span for outcome in outcomes],
                [outcome.tree for outcome in outcomes],
                num_generated,
                result.num_read,
                clock.seconds,
                num_budgeted=result.num_budgeted,
                waiting_time=result.waiting_time,
                num_model_levels=result.num_model_levels,
                is_first_of_size=result.is_first_of_size,
                is_on_device=bool(result.device_seconds),
                prompts=prompts,
            )
            clock.end(record)
            self._scheduler.charge(record, [(outcome.span, outcome.tree) for outcome in outcomes])
            self._learners.on_step(
                record,
                [(outcome.tree, outcome.acceptance) for outcome in outcomes if outcome.tree and outcome.acceptance],
            )
        return [outcome.span.request for outcome in outcomes if outcome.acceptance is not None]

    def store(self, outcomes: Sequence[Outcome]) -> int:
        """Store what was accepted; return the number of emitted tokens."""
        num_generated = 0
        for outcome in outcomes:
            span = outcome.span
            if span.request.is_finished:  # it ended while its pass was in flight
                continue
            if outcome.acceptance is None:
                self._scheduler.keep(span.request, range(span.end - span.start), outcome.num_slots)
                continue
            try:
                num_generated += self._store_tree(outcome)
            except Exception as error:
                self._endings.fail(span.request, error)
        return num_generated

    def _store_tree(self, outcome: Outcome) -> int:
        """Store what one request accepts of its tree; return the number of emitted tokens."""
        span, tree, acceptance, logits = outcome.span, outcome.tree, outcome.acceptance, outcome.logits
        assert tree is not None
        assert acceptance is not None
        request, num_chain = span.request, span.end - span.start
        if acceptance.next_token < 0:
            self._retry_or_end(outcome, acceptance.next_token)
            return 0
        num_generated = emit(request, tree, acceptance, logits, outcome.logprobs)
        # Reserved slots: the chain, whose last token is node 0, then nodes 1, 2, ...
        path = acceptance.path[:num_generated]  # the request may have ended inside the path
        kept = [*range(num_chain), *(num_chain - 1 + node for node in path)]
        self._scheduler.keep(request, kept, outcome.num_slots)
        if request.trace is not None:
            probs = outcome.probs or target_probs(tree, acceptance, logits)
            request.trace.append(trace_step(request, tree, acceptance, probs, num_generated))
        self._learners.on_tokens(request, tree, acceptance, logits, num_generated)  # they may read the cache
        if span.start < len(request.prompt_ids):  # its prompt is computed, and can be shared as a prefix
            self._scheduler.share(request)
        if request.is_finished:
            self._learners.explain(request)
            self._endings.end(request)
        elif self._drafter is not None:
            self._drafter.observe(request, tree, acceptance)
        return num_generated

    def _retry_or_end(self, outcome: Outcome, reason: int) -> None:
        """Compute the last token again without draft tokens, which may be the cause, or end the request."""
        span, tree = outcome.span, outcome.tree
        if tree is not None and tree.num_guessed and span.request.drafting.is_allowed:
            span.request.drafting.is_allowed = False
            self._scheduler.keep(span.request, range(span.end - span.start - 1))
        else:
            self._endings.end_without_token(span.request, reason)

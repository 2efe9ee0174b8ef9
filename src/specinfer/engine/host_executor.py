"""HostExecutor: steps that are scheduled, drafted and verified on the host, with one target pass for each.

With a target in one process a step begins and ends at once. With several pipeline stages, each stage has a pass of
another group of requests.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from specinfer.core.clock import epoch_seconds
from specinfer.core.lookups import is_model
from specinfer.core.request import Request, Span
from specinfer.core.tree import OFF, TokenTree, TreeBudget
from specinfer.drafters.base import Drafter
from specinfer.drafters.drafter_cache import MAX_CHUNK
from specinfer.drafters.merge.merged import levels_of_models, reads_prompts, window_of
from specinfer.drafters.sparse_context import num_to_read
from specinfer.engine.emission import scores_prompt, step_logprobs
from specinfer.engine.ending import Endings
from specinfer.engine.executor import Outcome, StepResult
from specinfer.engine.host_step import HostStep, logits_by_tree, pieces_of
from specinfer.engine.learners import EngineMetrics, Learners
from specinfer.engine.scheduler import Scheduler
from specinfer.engine.timer import DeviceTimer, StageClock
from specinfer.model.runner import TargetRunner
from specinfer.policy.base import SpeculationPolicy
from specinfer.policy.rule_choice import RuleChoice
from specinfer.verify import Acceptance, verify

logger = logging.getLogger(__name__)


class HostExecutor:
    """An executor of a pass for each pipeline stage of the target.

    Args:
        verification: Verification rule.
        metrics: Counts of preempted requests and of failed drafts.
        endings: Frees what the drafter keeps of requests.
        rules: Chooses the verification rule of each request that starts, or None if there is only one.
    """

    def __init__(
        self,
        target: TargetRunner,
        drafter: Drafter | None,
        scheduler: Scheduler,
        verification: str,
        metrics: EngineMetrics,
        endings: Endings,
        rules: RuleChoice | None = None,
    ) -> None:
        self.target = target
        self._drafter, self._scheduler, self._verification = drafter, scheduler, verification
        self._metrics, self._endings, self._rules = metrics, endings, rules
        self.take_arrivals: Callable[[], None] = lambda: None  # adds the requests that arrived since the step began
        self._steps: deque[HostStep] = deque()  # oldest first
        self._finished: Sequence[Span] = ()  # the last finished step, which may not be stored yet
        self._last_pass_end = 0.0  # by `time.perf_counter`
        self._waited = 0.0  # seconds that passes had waited for weights by then

    @property
    def num_in_flight(self) -> int:
        return len(self._steps)

    @property
    def spans(self) -> list[Span]:
        """Spans of all steps in flight."""
        return [span for step in self._steps for span in step.spans]

    def plan(self, learners: Learners, timer: DeviceTimer | None) -> HostStep | None:
        if len(self._steps) >= self.target.max_in_flight:
            return None
        clock = StageClock(timer)
        spans = self._schedule()
        if not spans:
            return None
        num_programs = self.target.num_programs
        clock.lap("rest")
        return HostStep(spans, clock, self._budgets(spans, learners.policy), num_programs)

    def draft(self, plan: HostStep) -> None:
        if any(budget.max_nodes for budget in plan.budgets):
            self._draft(plan)
        plan.clock.lap("draft")
        plan.waited = self.target.loaded.seconds_waiting
        self._take_arrivals(plan)

    def score(self, plan: HostStep) -> None:
        self._steps.append(plan)
        self._scheduler.mark_in_flight(plan.spans)
        try:
            plan.target_pass = self.target.begin(pieces_of(plan, self.target.cache))
        except Exception as error:  # in the result of this step, since those before it come first
            plan.error = error

    def verify(self) -> StepResult:
        step = self._steps[0]
        result = self._result(step)
        self._finished = step.spans
        self._steps.popleft()
        return result

    def _result(self, step: HostStep) -> StepResult:
        clock = step.clock
        clock.skip_to(self._last_pass_end)
        try:
            logits = logits_by_tree(step, step.wait())
            clock.lap("target")
            waited = self.target.loaded.seconds_waiting - max(step.waited, self._waited)
            self._last_pass_end, self._waited = clock.last, self.target.loaded.seconds_waiting
            self._scheduler.release(step.spans)
            outcomes = self._outcomes(step.spans, step.trees, logits)
            clock.lap("verify")
            num_budgeted = sum(budget.max_nodes for budget in step.budgets if not budget.asks_none)
            is_first = self.target.num_programs > step.num_programs
            return StepResult(
                step.spans, clock, outcomes, step.num_read, num_budgeted, waited, step.num_model_levels,
                is_first_of_size=is_first,
            )  # fmt: skip
        except Exception as error:
            return StepResult(step.spans, clock, error=error)

    def run_alone(self, span: Span) -> StepResult:
        """Run a step of one request without draft tokens, while no other is in flight."""
        assert not self._steps
        self.score(HostStep([span], StageClock(), num_programs=self.target.num_programs))
        return self.verify()

    def drop(self, spans: Sequence[Span]) -> None:
        """Drop a step; its requests keep nothing of it that is not stored."""
        self._scheduler.release(spans)
        for span in spans:
            self._scheduler.keep(span.request, ())

    def abandon(self) -> None:
        groups = [self._finished, *(step.spans for step in self._steps)]
        self._steps.clear()
        self._finished = ()
        for spans in groups:
            self.drop(spans)

    def _schedule(self) -> list[Span]:
        schedule = self._scheduler.schedule(self.target.max_in_flight)
        self._metrics.num_preempted += len(schedule.preempted)
        for request in schedule.preempted:
            self._endings.forget(request)
        self._note_start(schedule.spans)
        return schedule.spans

    def _note_start(self, spans: Sequence[Span]) -> None:
        now = epoch_seconds()
        for request in [span.request for span in spans if span.request.times.scheduled is None]:
            request.times.scheduled = now
            if self._rules is not None:
                self._rules.start(request)

    def _take_arrivals(self, step: HostStep) -> None:
        """Take requests that arrived while trees were drafted: they need not wait for the end of the pass.

        A pass within a memory plan, and one of several groups, keeps its size.
        """
        if not step.num_guessed or self.target.capacity is not None or self.target.max_in_flight > 1:
            return
        self.take_arrivals()
        arrived = self._scheduler.schedule_arrivals(step.spans, step.num_guessed)
        self._note_start(arrived)
        step.add(arrived)

    def _budgets(self, spans: Sequence[Span], policy: SpeculationPolicy) -> list[TreeBudget]:
        """Return the budget of each span's tree: none for chunks of prompts, or where the pass has no draft tokens."""
        budgets = [OFF] * len(spans)
        decoding = [i for i, span in enumerate(spans) if span.produces_token]
        if self._drafter is None or not decoding or self._is_prioritized:
            return budgets
        asking, reading = [spans[i] for i in decoding], [span for span in spans if not span.produces_token]
        num_slots = self._num_draft_slots(spans)
        with self._drafting_safely(asking):
            wanted = [self._without_wait(*pair) for pair in zip(asking, policy.budgets(asking, reading), strict=True)]
            wanted = policy.with_forced(asking, wanted)
            to_read = {
                span.request: self._num_to_read(span.request)
                for span, budget in zip(asking, wanted, strict=True)
                if asks_model(budget)
            }
            wanted = self._scheduler.cut(asking, wanted, reading, lambda request: to_read.get(request, 0))
            for i, budget in zip(decoding, fit(asking, wanted, num_slots), strict=True):
                budgets[i] = budget
        return budgets

    def _without_wait(self, span: Span, budget: TreeBudget) -> TreeBudget:
        """Return the budget, or none if a first token would wait until the drafter has read a long prompt.

        Passes of streamed weights take longer than that.
        """
        request = span.request
        waits = not (request.num_output or request.drafting.is_read) and budget.max_nodes and asks_model(budget)
        if waits and self.target.loaded.stream is None and self._num_to_read(request) > MAX_CHUNK:
            return OFF
        return budget

    def _num_to_read(self, request: Request) -> int:
        """Return the known tokens that the drafter computes before it first drafts for a request."""
        assert self._drafter is not None
        if request.drafting.is_read or not reads_prompts(self._drafter):
            return 0
        return num_to_read(len(request.token_ids), request.num_cached, window_of(self._drafter))

    def _draft(self, step: HostStep) -> None:
        """Draft a tree for each span that produces a token."""
        drafter, trees = self._drafter, list(step.trees)
        assert drafter is not None
        asking = [(i, span, budget) for i, (span, budget) in enumerate(zip(step.spans, step.budgets, strict=True))]
        asking = [(i, span, budget) for i, span, budget in asking if span.produces_token]
        with self._drafting_safely([span for _, span, _ in asking]):
            drafted = drafter.draft([span for _, span, _ in asking], [budget for *_, budget in asking])
            levels = levels_of_models(drafter, drafted, [budget for *_, budget in asking])
            step.num_model_levels, reads = max(levels, default=0), reads_prompts(drafter)
            for (i, span, budget), tree, num_levels in zip(asking, drafted, levels, strict=True):
                request = span.request
                if budget.max_nodes and (num_levels or not reads) and not request.drafting.is_read:
                    step.num_read += self._num_to_read(request)
                    request.drafting.note_read()
                if is_sound(tree, span, budget, self.target.loaded.vocab_size):
                    trees[i] = tree
            step.trees = trees

    @contextmanager
    def _drafting_safely(self, spans: Sequence[Span]) -> Iterator[None]:
        """Return a context in which a failure costs the drafts of these spans: drafts are optional."""
        try:
            yield
        except Exception:
            logger.exception("drafting failed; this step decodes plainly")
            self._metrics.num_draft_failures += 1
            for span in spans:
                self._endings.forget(span.request)

    @property
    def _is_prioritized(self) -> bool:
        """True if the pass goes without draft tokens, which cost next to no time where weights are streamed."""
        return self._scheduler.is_prioritized and self.target.loaded.stream is None

    def _num_draft_slots(self, spans: Sequence[Span]) -> int:
        """Return the number of slots that draft tokens of a pass over these spans may take."""
        num_slots = self._scheduler.num_draft_slots(spans, self.target.max_in_flight - len(self._steps))
        if self.target.capacity is None:
            return num_slots
        num_known = sum(span.end - span.start for span in spans)
        num_prompt_logprobs = sum(span.end - span.start for span in spans if scores_prompt(span))
        return min(num_slots, self.target.capacity.max_guesses(num_known, num_prompt_logprobs))

    def _outcomes(
        self, spans: Sequence[Span], trees: Sequence[TokenTree | None], logits: Sequence[Tensor]
    ) -> list[Outcome]:
        """Return the outcome of each span; `logits` are those of `logits_by_tree`."""
        pairs = list(zip(spans, trees, strict=True))
        decoding = [(span, tree) for span, tree in pairs if tree is not None and not span.request.is_finished]
        accepted = self._verify(decoding, logits)
        verified = zip(accepted, logits, step_logprobs(decoding, accepted, logits), strict=True)
        return [
            Outcome(span, tree) if tree is None or span.request.is_finished else Outcome(span, tree, *next(verified))
            for span, tree in pairs
        ]

    def _verify(self, decoding: Sequence[tuple[Span, TokenTree]], logits: Sequence[Tensor]) -> list[Acceptance]:
        if not decoding:
            return []
        trees = [tree for _, tree in decoding]
        return verify(self._verification, logits, [span.request for span, _ in decoding], trees)


def fit(spans: Sequence[Span], budgets: Sequence[TreeBudget], free_slots: int) -> list[TreeBudget]:
    """Return the budgets, cut to the tokens that each request may still emit and to the free slots."""
    fitting = []
    for span, budget in zip(spans, budgets, strict=True):
        # The token after the path needs no draft token, so the path may be one shorter.
        budget = budget.cut(span.request.max_new_tokens - 1, free_slots) if span.request.drafting.is_allowed else OFF
        free_slots -= budget.max_nodes
        fitting.append(budget)
    return fitting


def is_sound(tree: TokenTree, span: Span, budget: TreeBudget, vocab_size: int) -> bool:
    """Return whether a tree keeps within its budget, starts at the last token, and has only tokens of the target."""
    known = min(tree.tokens) >= 0 and max(tree.tokens) < vocab_size
    rooted = tree.tokens[0] == span.request.token_ids[-1]
    return known and rooted and tree.num_guessed <= budget.max_nodes and tree.max_depth <= budget.max_depth


def asks_model(budget: TreeBudget) -> bool:
    """Return whether the budget uses a drafter that has to read the previous tokens first; lookups read as they go."""
    return budget.drafters is None or any(map(is_model, budget.drafters))

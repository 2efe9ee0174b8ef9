"""The speculation policy "auto": the tree size that is fastest at the expected acceptance and costs, or plain decoding.

Each step teaches the acceptance model and the cost model; the optimiser chooses from both. So a busy batch or a poor
drafter leads to small trees or none, and an idle machine and a good drafter to large ones. A network that was trained
for the drafters predicts acceptance for each request; without one, acceptance is that observed for each rank.
"""

from collections.abc import Collection, Sequence

from torch import Tensor

from specinfer.core.lookups import GRAMMAR, drafter_of
from specinfer.core.request import Request, Span
from specinfer.core.step_record import StepRecord
from specinfer.core.text import counted
from specinfer.core.tree import OFF, TokenTree, TreeBudget
from specinfer.drafters.lookup.grammar import has_forced
from specinfer.policy.acceptance import AcceptanceModel, AcceptanceProfile
from specinfer.policy.base import SpeculationPolicy
from specinfer.policy.cost_model import CostModel
from specinfer.policy.curves import FAST, Curve
from specinfer.policy.learned_choice import LearnedChoice
from specinfer.policy.lookup_policy import LookupPolicy, begins_text, lookup_budget
from specinfer.policy.optimizer import tokens_to_read
from specinfer.policy.rank_choice import RankChoice, TreeSizes
from specinfer.policy.remeasurement import Remeasurement
from specinfer.policy.slo_planner import SLOPlanner
from specinfer.policy.speedup import Speedup
from specinfer.policy.trial_allowance import TrialAllowance
from specinfer.verify import Acceptance


class AutoPolicy(SpeculationPolicy):
    """A speculation policy that chooses the trees with the most expected tokens per second for the whole batch.

    Args:
        costs: Costs of steps.
        lookups: Names of the drafters that are no models: they may draft alone.
        has_models: Whether other drafters are models.
        has_self: Whether the target itself, cheaper, is a drafter: it is right more often than others.
        network: The learned choice for each request, or None if no network was trained.
        why_off: Reason for never having trees, if there is no drafter; passes and prompts are planned all the same.
        profile: What was accepted in a measurement, or None if acceptance is assumed at first.
        remedy: What to do where drafting loses.
    """

    REVIEW = 8  # steps between choices for the same number of requests, because choosing costs time too
    # Steps without speculation, for whatever reason, before one tests whether it would be worthwhile: at first, and
    # after a test in which drafting took much less time than expected. Each further wait is twice as long.
    FIRST_TEST = 4
    TEST_EVERY = 40  # the longest of these waits
    MAX_TEST_EVERY = 1000  # the longest wait where a test loses more than is allowed
    TEST_REVIEW = 10  # steps between looks at whether a test is allowed by then
    TEST = TreeBudget.expansion((1, 1))
    # Steps with trees after which steps without show what they cost: at first, and after two checks, four, ...
    FIRST_CHECK, CHECK_EVERY = 8, 64
    NUM_CHECKS = 2  # the number of these
    CLEAR = 1.25  # gain from which that could not change the choice
    FIRST_CLEAR = CLEAR**3  # the same for the first check, before which the costs were hardly seen
    PAUSE = 20  # multiple of the time of measuring passes again that goes by before the next time
    DELAY = 0.03  # share of the time to a first token by which trees of others may delay it

    def __init__(
        self,
        costs: CostModel,
        lookups: Collection[str] = (),
        *,
        has_models: bool = True,
        has_self: bool = False,
        network: LearnedChoice | None = None,
        why_off: str | None = None,
        profile: AcceptanceProfile | None = None,
        remedy: str | None = None,
    ) -> None:
        self.costs, self.network, self._why_off = costs, network, why_off
        # Without models, on a device, the trees of lookups have the sizes of others, for which graphs are captured.
        self._lookups = LookupPolicy(costs, lookups if has_models or costs.max_rows is None else ())
        self._has_models = has_models or not self._lookups.names
        prior = AcceptanceModel.SELF_PRIOR if has_self else AcceptanceModel.PRIOR
        self.acceptance = AcceptanceModel(prior) if profile is None else AcceptanceModel.from_profile(profile)
        sizes = None if why_off is None else TreeSizes.none()
        self.rank_choice = RankChoice(costs, self.acceptance, sizes)
        self._remedy, self._speedup = remedy, Speedup(self._at_start()[1], remedy)
        self._planner = SLOPlanner(costs, self.rank_choice)
        self._budget = OFF
        self._num_steps = 0
        self._allowance = TrialAllowance(costs)
        self._num_plain = 0  # steps since the last draft tokens
        self._test_after = self.FIRST_TEST
        self._num_trees = 0  # steps since the cost of those without trees was seen
        self._check_after = self.FIRST_CHECK
        self._num_requests = self._age = 0  # those of the last choice
        self._remeasurement: Remeasurement | None = None  # under way
        self._is_measured = False  # whether the last step was one of it
        self._pause = 0.0  # seconds of steps until passes may be measured again

    @property
    def reads_logits(self) -> bool:
        return self.network is not None

    @property
    def planner(self) -> SLOPlanner:
        return self._planner

    def budgets(self, spans: Sequence[Span], reading: Sequence[Span] = ()) -> list[TreeBudget]:
        if self._why_off is not None:
            return [OFF] * len(spans)
        if self.network is None:
            return self._budgets_by_rank(spans, reading)
        budgets = self.network.budgets(spans)
        others = [span for span, budget in zip(spans, budgets, strict=True) if budget is None]
        by_rank = iter(self._budgets_by_rank(others, reading) if others else ())
        return [next(by_rank) if budget is None else budget for budget in budgets]

    def with_forced(self, spans: Sequence[Span], budgets: Sequence[TreeBudget]) -> list[TreeBudget]:
        """Return the budgets with tokens that grammars force, where each saves more than its row takes."""
        if self._is_measured or not any(has_forced(span.request) for span in spans):
            return list(budgets)
        forced = lookup_budget(self.costs, len(spans))
        return [
            budget.with_forced(forced) if has_forced(span.request) and self._may_delay(span.request) else budget
            for span, budget in zip(spans, budgets, strict=True)
        ]

    def _budgets_by_rank(self, spans: Sequence[Span], reading: Sequence[Span]) -> list[TreeBudget]:
        """Return the budgets by the observed acceptance of ranks, which requests with latency targets may exceed."""
        self.costs.follow(sum(span.start for span in (*spans, *reading)), len(spans) + len(reading))
        if self._remeasurement is None and self._pause <= 0.0 and self._may_remeasure(spans):
            assert isinstance(self.costs.target, Curve)
            self._remeasurement = Remeasurement(self.costs.target)
        if begins_text(spans):
            self._allowance.begin_text()
        self._is_measured = self._remeasurement is not None and self._may_measure(spans, self._remeasurement)
        if self._remeasurement is not None and self._is_measured:
            return self._for_one(spans, self._remeasurement.budget(len(spans)))
        return self.planner.budgets(spans, self._fastest(spans, reading))

    def _may_remeasure(self, spans: Sequence[Span]) -> bool:
        """Return whether the costs of passes are to be measured again, looked at now and then because it takes time."""
        is_due = spans and not self._num_steps % self.REVIEW and self.costs.is_doubtful
        return bool(is_due) and self.rank_choice.depends_on_passes(len(spans))

    def _may_measure(self, spans: Sequence[Span], remeasurement: Remeasurement) -> bool:
        """Return whether the next size of passes may be measured in this step, and count what that loses."""
        budget = remeasurement.next(len(spans))
        seconds = self._seconds_lost(spans, budget) if budget.max_nodes else 0.0
        is_allowed = self._allowance.take(spans, seconds)
        if not is_allowed and budget.max_nodes > 1:
            remeasurement.end_round()
        return is_allowed

    def _seconds_lost(self, spans: Sequence[Span], budget: TreeBudget) -> float:
        """Return the seconds that a tree for the request that takes least to read is expected to lose."""
        num_to_read = min(tokens_to_read(span.request, self.costs) for span in spans)
        depth = min(budget.max_nodes, budget.max_depth)
        return self.rank_choice.seconds_lost(budget.max_nodes, depth, num_to_read, len(spans))

    def _fastest(self, spans: Sequence[Span], reading: Sequence[Span]) -> list[TreeBudget]:
        """Return the budgets with most tokens per second, or those of a test of the drafter."""
        if not self._has_models:
            return self._of_lookups(spans)
        if begins_text(spans):
            self.acceptance.begin_text()
            self._num_requests = 0  # choose anew
        num_requests = len(spans) + len(reading)
        if num_requests != self._num_requests or self._age >= (1 if self.rank_choice.sizes.is_wide else self.REVIEW):
            self._budget = self.rank_choice.choose(num_requests)
            self._num_requests, self._age = num_requests, 0
        self._age += 1
        budget = self._budget
        if budget.max_nodes and reading:
            num_rows = sum(span.end - span.start for span in (*spans, *reading))
            budget = self.rank_choice.beside(len(spans), num_requests, num_rows)
        if budget.max_nodes:
            pays = [
                self._may_delay(span.request)
                and self.rank_choice.pays_to_read(span.request, num_requests, has_lookups=self._has_lookups)
                for span in spans
            ]
            if any(pays):
                self._num_plain = 0
                if self._delays_first_token(spans) or (not reading and self._must_check(len(spans))):
                    return [OFF] * len(spans)
                return self._with_lookups(spans, budget, pays)
        self._num_plain += 1
        if self._is_test_due(spans):
            self._num_plain = 0
            self._test_after = min(2 * self._test_after, self.TEST_EVERY)
            return self._for_one(spans, self.TEST)
        return self._of_lookups(spans)

    def _of_lookups(self, spans: Sequence[Span]) -> list[TreeBudget]:
        """Return the budgets of a step in which no model drafts."""
        budget = self._lookups.budget(spans)
        return [budget if self._may_delay(span.request) else OFF for span in spans]

    @property
    def _has_lookups(self) -> bool:
        """True if lookups come before models, as they do on a host."""
        return bool(self._lookups.names) and self.costs.max_rows is None

    def _must_check(self, num_requests: int) -> bool:
        """Return whether this step has no trees, to show what such steps cost, since that could change the choice."""
        self._num_trees += 1
        clear = self.FIRST_CLEAR if self._check_after == self.FIRST_CHECK else self.CLEAR
        if self._num_trees <= self._check_after or self.rank_choice.gain(num_requests) > clear:
            return False
        if self._num_trees >= self._check_after + self.NUM_CHECKS:
            self._num_trees, self._check_after = 0, min(2 * self._check_after, self.CHECK_EVERY)
        return True

    def _with_lookups(self, spans: Sequence[Span], budget: TreeBudget, pays: Sequence[bool]) -> list[TreeBudget]:
        """Return the budgets of a step in which models may draft for some requests, and lookups for all.

        On a host lookups come first, with limits of their own: where they suffice, no model is asked.
        """
        alone = self._lookups.budget(spans)
        both = budget
        if alone.max_nodes and self.costs.max_rows is None:
            sizes = max(alone.max_nodes, budget.max_nodes), max(alone.max_depth, budget.max_depth)
            both = TreeBudget(*sizes, row_prices=alone.row_prices, with_models=budget)
        return [
            both if is_worthwhile else alone if self._may_delay(span.request) else OFF
            for span, is_worthwhile in zip(spans, pays, strict=True)
        ]

    def _is_test_due(self, spans: Sequence[Span]) -> bool:
        """Return whether a step tests the drafter: it loses little of the time, and could change the choice.

        The first tests come early: costs may have been measured in another hour.
        """
        over = self._num_plain - self._test_after
        if over < 0 or over % self.TEST_REVIEW or not self.rank_choice.could_pay(len(spans)):
            return False
        is_overdue = self._num_plain >= self.MAX_TEST_EVERY
        return self._allowance.take(spans, self._seconds_lost(spans, self.TEST), is_overdue=is_overdue)

    def _delays_first_token(self, spans: Sequence[Span]) -> bool:
        """Return whether trees in this step would delay a first token noticeably.

        Passes that read prompts are bound by computing, so that nodes cost most there and the step loses little.
        """
        firsts = [span.request for span in spans if not self._may_delay(span.request)]
        if not firsts:
            return False
        others = [span.request for span in spans if span.request.num_output]
        trees = self.rank_choice.usual().times(len(others))
        num_rows = sum(span.end - span.start for span in spans)
        plain, grown = self.costs.target([num_rows, num_rows + int(trees.nodes)]).tolist()
        reading = self.costs.read_token * sum(tokens_to_read(request, self.costs) for request in others)
        added = grown - plain + float(self.costs.draft(trees.nodes, trees.levels)) + reading
        waited = self.planner.clock() - max(request.times.arrival for request in firsts)
        return bool(added > self.DELAY * (waited + plain))

    def _may_delay(self, request: Request) -> bool:
        """Return whether drafting may delay the next token of a request.

        It may not delay the first one, unless passes read weights from a disk, which takes much longer.
        """
        return bool(request.num_output) or not isinstance(self.costs.target, Curve)

    def _for_one(self, spans: Sequence[Span], budget: TreeBudget) -> list[TreeBudget]:
        """Return this budget for the request whose tokens take the drafter least time to read, and none for others."""
        chosen = min(spans, key=lambda span: tokens_to_read(span.request, self.costs))
        return [budget if span is chosen else OFF for span in spans]

    def observe(self, step: StepRecord, outcomes: Sequence[tuple[TokenTree, Acceptance]]) -> None:
        self._num_steps += 1
        self._pause -= step.time
        self.planner.observe(step)
        self._allowance.note_step(step.time)
        if not step.is_first_of_size:  # otherwise its time is mostly that of a capture
            num_levels = step.num_drafted_levels
            if num_levels and step.draft_time < FAST * float(self.costs.draft(step.num_guessed, num_levels)):
                self._test_after = self.FIRST_TEST
            learn = self.costs.observe_prompts if step.reads_prompts else self.costs.observe
            learn(step)
            if not step.reads_prompts:
                self._speedup.observe(step, float(self.costs.step(step.num_requests, 0, 0)))
            if self._remeasurement is not None and self._is_measured and not step.reads_prompts:
                self._remeasurement.observe(self.costs.without_context(step))
        if self._lookups.names and not step.num_model_levels:
            if not step.reads_prompts:
                self._lookups.observe(step, [acceptance for _, acceptance in outcomes])
        else:
            for tree, acceptance in outcomes:
                if {drafter_of(name) for name in tree.drafter_names} == {GRAMMAR}:
                    continue  # says nothing about drafters
                if tree.num_guessed or (step.num_budgeted and step.num_requests == 1):
                    self.acceptance.observe(tree, acceptance)

        if self._remeasurement is not None and self._remeasurement.is_done:
            self.costs.adopt(self._remeasurement.curve())
            self._pause, self._remeasurement = self.PAUSE * self._remeasurement.total, None
            self._num_requests = 0  # choose anew

    def on_tokens(
        self, request: Request, tree: TokenTree, acceptance: Acceptance, logits: Tensor, num_generated: int
    ) -> None:
        if request.is_finished:
            self.costs.lengths.observe(request.num_output)
        if self.network is not None:
            self.network.on_tokens(request, tree, acceptance, logits, num_generated)

    def reason(self, request: Request) -> str | None:
        if self._why_off is not None:
            return self._why_off
        if self.network is None:
            return self._why_plain(request)
        if (doubt := self.network.doubt) is None:
            return "speculation policy: plain decoding was expected to be the fastest for most of this text"
        by_rank = self._why_plain(request)
        return by_rank and f"{doubt}; {by_rank}"

    def _why_plain(self, request: Request) -> str | None:
        num_requests = max(self._num_requests, 1)
        if not self._has_models:
            names = ", ".join(sorted(self._lookups.names))
            return f"auto: plain decoding, drafts of {names} save no time here" if self._lookups.is_resting else None
        if not self._budget.max_nodes:
            # The request had model drafts if they paid in its first passes.
            does = "plain decoding" if self._lookups.is_resting else "no model drafts in most passes"
            return f"auto: {does}, {self.rank_choice.why_plain(num_requests)}"
        if request.drafting.is_read or request.num_output == 1:
            return None
        return "auto: no model drafts, reading the prompt with the drafter was not expected to pay yet"

    @property
    def speedup(self) -> Speedup | None:
        return None if self._why_off is not None or self.network is not None else self._speedup

    def summary(self) -> str | None:
        if self.network is not None:
            return None
        trial, gain = self._at_start()
        if not trial.max_nodes:
            chosen = RankChoice(self.costs, self.acceptance)
            advice = "" if self._remedy is None else f"; {self._remedy}"
            return f"auto: plain decoding, {chosen.why_plain(1)}{advice}"
        text = self.acceptance.text
        origin = "if drafts are accepted as usual" if text is None else f"by what was accepted on {text}"
        tree = "up to " + counted(trial.max_nodes, "draft token")
        return f"auto: {tree} for a single request, {gain:.2f} times the speed of plain decoding expected {origin}"

    def _at_start(self) -> tuple[TreeBudget, float]:
        """Return the tree of a single request by what is known now, and its expected speed over plain decoding."""
        if self._why_off is not None:
            return OFF, 1.0
        trial = RankChoice(self.costs, self.acceptance)
        return trial.choose(1), trial.gain(1)

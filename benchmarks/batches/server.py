"""A server on a simulated machine: the engine's scheduler and speculation policy, and a clock that costs advance."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from specinfer.core.request import Request, Span
from specinfer.core.step_record import StepRecord
from specinfer.core.tree import TokenTree, TreeBudget
from specinfer.drafters.growth.calibration import Calibration
from specinfer.engine.host_executor import asks_model, fit
from specinfer.engine.scheduler import Scheduler
from specinfer.model.kv_cache import KVCache
from specinfer.policy.base import SpeculationPolicy
from specinfer.policy.slo_planner import SLOPlanner
from specinfer.verify import Acceptance

_SLOTS = 1_000_000


class Costs(Protocol):
    """True seconds of the parts of a step."""

    @property
    def read_token(self) -> float: ...
    def target(self, num_rows: int) -> float: ...
    def draft(self, num_nodes: int, num_levels: int) -> float: ...
    def host(self, num_requests: int, num_nodes: int) -> float: ...


class Drafting(Protocol):
    """What is drafted for requests, and what of it is accepted."""

    calibration: Calibration

    def grow(self, spans: Sequence[Span], budgets: Sequence[TreeBudget]) -> tuple[list[TokenTree], int]: ...
    def accepted(self, tree: TokenTree) -> Acceptance: ...


class SimulatedServer:
    """Serves requests through the scheduler and a policy.

    Args:
        costs: True costs of the machine.
        drafting: Trees and what is accepted of them.
        policy: Speculation policy; None is plain decoding.
        planner: Planner of the scheduler, or None.
        noise: Standard deviation of the logarithm of a step's times.

    Attributes:
        now: Seconds since the start.
        steps: Records of all steps.
    """

    def __init__(
        self, costs: Costs, drafting: Drafting, policy: SpeculationPolicy, planner: SLOPlanner | None = None, *,
        max_num_seqs: int = 64, max_num_batched_tokens: int = 512, noise: float = 0.0, seed: int = 0,
    ) -> None:  # fmt: skip
        self.now, self.costs, self.policy = 1.0, costs, policy
        self.steps: list[StepRecord] = []
        self._drafting = drafting
        self._cache = KVCache(_SLOTS)
        self._scheduler = Scheduler(self._cache, max_num_seqs, max_num_batched_tokens)
        self._scheduler.planner = planner
        self._scheduler.waiting.clock = self.clock
        if planner is not None:
            planner.clock = self.clock
        self._noise, self._random = noise, np.random.default_rng(seed)

    def clock(self) -> float:
        return self.now

    def run(
        self, requests: Sequence[Request], when_ended: Callable[[Request], Request | None] = lambda one: None
    ) -> None:
        """Serve requests, each from its time of arrival, until all have ended.

        Args:
            when_ended: Returns the request that comes when one has ended, if any.
        """
        coming = sorted(requests, key=lambda request: request.times.arrival)
        while coming or self._scheduler.running or self._scheduler.waiting:
            if coming and not (self._scheduler.running or self._scheduler.waiting):
                self.now = max(self.now, coming[0].times.arrival)
            while coming and coming[0].times.arrival <= self.now:
                self._scheduler.add(coming.pop(0))
            for ended in self._step():
                if (following := when_ended(ended)) is not None:
                    following.times.arrival = self.now
                    self._scheduler.add(following)

    def _step(self) -> list[Request]:
        spans = self._scheduler.schedule().spans
        decoding = [span for span in spans if span.produces_token]
        reading = [span for span in spans if not span.produces_token]
        budgets = fit(decoding, self.policy.budgets(decoding, reading), _SLOTS) if decoding else []
        num_read = 0
        for span, budget in zip(decoding, budgets, strict=True):
            if budget.max_nodes and asks_model(budget) and not span.request.drafting.is_read:
                span.request.drafting.is_read = True
                num_read += len(span.request.token_ids) - span.request.num_cached
        trees, num_levels = self._drafting.grow(decoding, budgets)
        outcomes = [(tree, self._drafting.accepted(tree)) for tree in trees]
        num_guessed = sum(tree.num_guessed for tree in trees)
        num_rows = sum(span.end - span.start for span in spans) + num_guessed
        factor = float(np.exp(self._noise * self._random.standard_normal()))
        drafting = factor * (self.costs.draft(num_guessed, num_levels) + num_read * self.costs.read_token)
        passing = factor * self.costs.target(num_rows)
        resting = self.costs.host(len(spans), num_guessed)
        self.now += drafting + passing + resting
        num_generated, ended = self._commit(spans, decoding, outcomes)
        record = StepRecord(
            num_requests=len(spans), num_rows=num_rows, num_guessed=num_guessed,
            num_levels=max((tree.max_depth for tree in trees), default=0), num_generated=num_generated,
            num_read=num_read, draft_time=drafting, target_time=passing, rest_time=resting,
            num_budgeted=sum(budget.max_nodes for budget in budgets),
        )  # fmt: skip
        self.steps.append(record)
        self.policy.observe(record, outcomes)
        for span, outcome in zip(decoding, outcomes, strict=True):
            self._drafting.calibration.observe(span.request, *outcome)
        return ended

    def _commit(
        self, spans: Sequence[Span], decoding: Sequence[Span], outcomes: Sequence[tuple[TokenTree, Acceptance]]
    ) -> tuple[int, list[Request]]:
        """Store a step; return the number of emitted tokens, and the requests that ended."""
        for span in spans:
            self._cache.reserve(span.request.request_id, span.end - span.start)
            self._scheduler.keep(span.request, range(span.end - span.start))
        num_generated, ended = 0, list[Request]()
        for span, (_, acceptance) in zip(decoding, outcomes, strict=True):
            num_generated += self._emit(span.request, len(acceptance.path) + 1)
            if span.request.is_finished:
                ended.append(span.request)
        return num_generated, ended

    def _emit(self, request: Request, num_tokens: int) -> int:
        request.times.first_token = request.times.first_token or self.now
        num_tokens = min(num_tokens, request.max_new_tokens)
        for _ in range(num_tokens):
            request.append(1, None)
        # Keys and values of the accepted path are those of the pass.
        known = len(request.token_ids) - 1 - request.num_computed
        self._cache.reserve(request.request_id, known)
        self._scheduler.keep(request, range(known))
        if request.is_finished:
            request.times.finished = self.now
            self._scheduler.remove(request)
        return num_tokens

"""A server on a simulated machine: the real scheduler and policy, requests of classes that arrive at random."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simulated_machines import SimulatedDrafting
from specinfer.core.request import Request, Span
from specinfer.core.sampling import SamplingParams
from specinfer.core.slo import SLO
from specinfer.core.step_record import StepRecord
from specinfer.core.tree import OFF, TokenTree
from specinfer.engine.scheduler import Scheduler
from specinfer.model.kv_cache import KVCache
from specinfer.policy.auto_policy import AutoPolicy
from specinfer.policy.cost_model import CostModel
from specinfer.verify import Acceptance
from tiny import make_request


@dataclass(frozen=True, slots=True)
class RequestClass:
    """Requests alike: their share of all, the tokens of prompt and output, and their targets."""

    share: float
    num_prompt: int
    num_output: int
    slo: SLO | None = None


class SimulatedServer:
    """Requests through the scheduler and the policy "auto" until all have ended.

    Args:
        costs: Costs of the machine.
        classes: Classes of requests.
        rate: Requests per second.
        is_aware: Whether the engine knows the targets.

    Attributes:
        requests: All requests, each with its class.
    """

    def __init__(
        self, costs: CostModel, classes: Sequence[RequestClass], rate: float, *, is_aware: bool, seed: int = 0
    ) -> None:
        self.now, self.costs = 1.0, costs
        self.requests: list[tuple[Request, RequestClass]] = []
        self._drafting = SimulatedDrafting(costs, 0.6, seed=seed)
        self.policy = AutoPolicy(CostModel.from_dict(costs.as_dict()))
        self._cache = KVCache(100_000)
        self._scheduler = Scheduler(self._cache, 32, 512)
        self._scheduler.planner = self.policy.planner
        self.policy.planner.clock = self._scheduler.waiting.clock = lambda: self.now
        random = np.random.default_rng(seed)
        self._rate, self._random, self._is_aware, self._classes = rate, random, is_aware, classes

    def run(self, num_requests: int) -> None:
        """Serve so many requests."""
        arrivals = self.now + np.cumsum(self._random.exponential(1 / self._rate, num_requests))
        kinds = self._random.choice(len(self._classes), num_requests, p=[one.share for one in self._classes])
        chosen = [self._classes[kind] for kind in kinds]
        coming = [self._request(i, *one) for i, one in enumerate(zip(chosen, arrivals, strict=True))]
        self.requests = list(zip(coming, chosen, strict=True))
        while coming or self._scheduler.running or self._scheduler.waiting:
            if coming and not (self._scheduler.running or self._scheduler.waiting):
                self.now = max(self.now, coming[0].arrival_time)
            while coming and coming[0].arrival_time <= self.now:
                self._scheduler.add(coming.pop(0))
            self._step()

    def num_good(self, kind: RequestClass) -> int:
        """Return how many requests of a class have met both targets."""
        assert kind.slo is not None
        ttft, tpot = (np.inf if one is None else one / 1000 for one in (kind.slo.ttft, kind.slo.tpot))
        return sum(self._ttft(one) <= ttft and self._tpot(one) <= tpot for one, own in self.requests if own is kind)

    @staticmethod
    def seconds(request: Request) -> float:
        """Return the seconds from arrival to end."""
        assert request.finished_time is not None
        return request.finished_time - request.arrival_time

    @staticmethod
    def _ttft(request: Request) -> float:
        assert request.first_token_time is not None
        return request.first_token_time - request.arrival_time

    @classmethod
    def _tpot(cls, request: Request) -> float:
        return (cls.seconds(request) - cls._ttft(request)) / max(request.num_output - 1, 1)

    def _request(self, number: int, kind: RequestClass, time: float) -> Request:
        slo = kind.slo if self._is_aware else None
        params = SamplingParams(temperature=0.0, max_tokens=kind.num_output, slo=slo)
        request = make_request(str(number), range(kind.num_prompt), params, cache_salt=None)
        request.arrival_time = float(time)
        return request

    def _step(self) -> None:
        spans = self._scheduler.schedule().spans
        decoding = [span for span in spans if span.produces_token]
        budgets = self.policy.budgets(decoding) if decoding else []
        budgets = [
            one.cut(span.request.max_new_tokens - 1, one.max_nodes) if one.max_nodes else OFF
            for span, one in zip(decoding, budgets, strict=True)
        ]
        num_read = sum(
            len(span.request.token_ids)
            for span, one in zip(decoding, budgets, strict=True)
            if one.max_nodes and not span.request.drafter_knows
        )
        trees, num_levels = self._drafting.grow(decoding, budgets)
        outcomes = [(tree, self._drafting.accepted(tree)) for tree in trees]
        self._advance(spans, decoding, outcomes, sum(one.max_nodes for one in budgets), num_read, num_levels)
        for span, budget in zip(decoding, budgets, strict=True):
            span.request.drafter_knows |= budget.max_nodes > 0

    def _advance(
        self, spans: Sequence[Span], decoding: Sequence[Span], outcomes: Sequence[tuple[TokenTree, Acceptance]],
        num_budgeted: int, num_read: int, num_levels: int,
    ) -> None:  # fmt: skip
        num_guessed = sum(tree.num_guessed for tree, _ in outcomes)
        num_rows = sum(span.end - span.start for span in spans) + num_guessed
        drafting = float(self.costs.draft(num_guessed, num_levels)) + num_read * self.costs.read_token
        passing = float(self.costs.target(num_rows))
        self.now += drafting + passing
        num_generated = 0
        for span in spans:
            self._cache.reserve(span.request.request_id, span.end - span.start)
            self._scheduler.keep(span.request, range(span.end - span.start))
        for span, (_, acceptance) in zip(decoding, outcomes, strict=True):
            num_generated += self._emit(span.request, len(acceptance.path) + 1)
        depth = max((tree.max_depth for tree, _ in outcomes), default=0)
        record = StepRecord(
            len(spans), num_rows, num_guessed, depth, num_generated, num_read, drafting, passing, 0.0, num_budgeted
        )
        self.policy.observe(record, outcomes)
        for span, (tree, acceptance) in zip(decoding, outcomes, strict=True):
            self._drafting.calibration.observe(span.request, tree, acceptance)

    def _emit(self, request: Request, num_tokens: int) -> int:
        request.first_token_time = request.first_token_time or self.now
        num_tokens = min(num_tokens, request.max_new_tokens)
        for _ in range(num_tokens):
            request.append(7, None)
        # Keys and values of the accepted path are those of the pass.
        known = len(request.token_ids) - 1 - request.num_computed
        self._cache.reserve(request.request_id, known)
        self._scheduler.keep(request, range(known))
        if request.is_finished:
            request.finished_time = self.now
            self._scheduler.remove(request)
        return num_tokens

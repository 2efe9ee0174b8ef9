"""A server on a simulated machine, and requests of classes that arrive at it at random.

The server has the engine's scheduler and speculation policy, and a clock that costs advance.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from specinfer.core.limits import SLO
from specinfer.core.request import Request, Span
from specinfer.core.sampling import SamplingParams
from specinfer.core.step_record import StepRecord
from specinfer.core.tree import OFF, TokenTree, TreeBudget
from specinfer.drafters.growth.calibration import Calibration
from specinfer.engine.host_executor import asks_model, fit
from specinfer.engine.scheduler import Scheduler
from specinfer.model.kv_cache import KVCache
from specinfer.policy.auto_policy import AutoPolicy
from specinfer.policy.base import SpeculationPolicy
from specinfer.policy.cost_model import CostModel
from specinfer.policy.slo_planner import SLOPlanner
from specinfer.verify import Acceptance
from tests.policy.simulated_machines import SimulatedDrafting
from tiny import make_request

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
        score: Seconds that a log-probability takes.

    Attributes:
        now: Seconds since the start.
        steps: Records of all steps.
        emitted: When each request emitted tokens, by its name.
    """

    def __init__(
        self, costs: Costs, drafting: Drafting, policy: SpeculationPolicy, planner: SLOPlanner | None = None, *,
        max_num_seqs: int = 64, max_num_batched_tokens: int = 512, noise: float = 0.0, seed: int = 0,
        score: float = 0.0,
    ) -> None:  # fmt: skip
        self.now, self.costs, self.policy, self.score = 1.0, costs, policy, score
        self.steps: list[StepRecord] = []
        self.emitted = defaultdict[str, list[float]](list)
        self._drafting = drafting
        self._cache = KVCache(_SLOTS)
        self._scheduler = Scheduler(self._cache, max_num_seqs, max_num_batched_tokens)
        self._scheduler.plan_with(planner)
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
        self._scheduler.mark_in_flight(spans)
        budgets = [OFF] * len(decoding)
        if decoding and not self._scheduler.is_prioritized:
            wanted = self._scheduler.cut(decoding, self.policy.budgets(decoding, reading), reading, _num_to_read)
            budgets = fit(decoding, wanted, _SLOTS)
        num_read = 0
        for span, budget in zip(decoding, budgets, strict=True):
            if budget.max_nodes and asks_model(budget) and not span.request.drafting.is_read:
                num_read += _num_to_read(span.request)
                span.request.drafting.note_read()
        trees, num_levels = self._drafting.grow(decoding, budgets)
        outcomes = [(tree, self._drafting.accepted(tree)) for tree in trees]
        num_guessed = sum(tree.num_guessed for tree in trees)
        num_rows = sum(span.end - span.start for span in spans) + num_guessed
        factor = float(np.exp(self._noise * self._random.standard_normal()))
        drafting = factor * (self.costs.draft(num_guessed, num_levels) + num_read * self.costs.read_token)
        passing = factor * self.costs.target(num_rows)
        scoring = sum(map(self._score, spans))
        resting = self.costs.host(len(spans), num_guessed) + scoring
        self.now += drafting + passing + resting
        self._scheduler.release(spans)
        num_generated, ended = self._commit(spans, decoding, outcomes)
        record = StepRecord(
            num_requests=len(spans), num_rows=num_rows, num_guessed=num_guessed,
            num_levels=max((tree.max_depth for tree in trees), default=0), num_generated=num_generated,
            num_read=num_read, draft_time=drafting, target_time=passing, rest_time=resting,
            num_budgeted=sum(budget.max_nodes for budget in budgets),
        )  # fmt: skip
        self.steps.append(record)
        trees_of = {span.request: tree for span, tree in zip(decoding, trees, strict=True)}
        self._scheduler.charge(record, [(span, trees_of.get(span.request)) for span in spans])
        self.policy.observe(record, outcomes)
        for span, outcome in zip(decoding, outcomes, strict=True):
            self._drafting.calibration.observe(span.request, *outcome)
        return ended

    def _score(self, span: Span) -> float:
        """Return the seconds that log-probabilities of a span take, and note them in its request."""
        request = span.request
        if request.lacks_prompt_logprobs:
            count = request.num_scored * (span.end - span.start)
            request.prompt_logprobs += [None] * (span.end - span.start)
        else:
            count = request.num_scored if span.produces_token else 0
        request.scoring.seconds, request.scoring.count = self.score * count, count
        return request.scoring.seconds

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
        self.emitted[request.request_id].append(self.now)
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


def _num_to_read(request: Request) -> int:
    """Return the tokens that a drafter reads before it drafts for a request."""
    return 0 if request.drafting.is_read else len(request.token_ids) - request.num_cached


@dataclass(frozen=True, slots=True)
class RequestClass:
    """Requests alike: their share of all, the tokens of prompt and output, and their targets."""

    share: float
    num_prompt: int
    num_output: int
    slo: SLO | None = None


class MachineCosts:
    """Measured costs as those of a machine, whose host takes no time."""

    def __init__(self, costs: CostModel) -> None:
        self._costs, self.read_token = costs, costs.read_token

    def target(self, num_rows: int) -> float:
        return float(self._costs.target(num_rows))

    def draft(self, num_nodes: int, num_levels: int) -> float:
        return float(self._costs.draft(num_nodes, num_levels)) if num_levels else 0.0

    def host(self, num_requests: int, num_nodes: int) -> float:
        return 0.0


class ArrivingRequests:
    """Requests that arrive at random at a server on a simulated machine.

    Args:
        costs: Costs of the machine.
        classes: Classes of requests.
        rate: Requests per second.
        is_aware: Whether the engine knows the targets.
        policy: Speculation policy and planner in place of "auto" and its own.

    Attributes:
        requests: All requests, each with its class.
    """

    def __init__(
        self, costs: CostModel, classes: Sequence[RequestClass], rate: float, *, is_aware: bool, seed: int = 0,
        policy: tuple[SpeculationPolicy, SLOPlanner | None] | None = None,
    ) -> None:  # fmt: skip
        self.requests: list[tuple[Request, RequestClass]] = []
        if policy is None:
            auto = AutoPolicy(CostModel.from_dict(costs.as_dict()))
            policy = auto, auto.planner
        drafting = SimulatedDrafting(costs, 0.6, seed=seed)
        self._server = SimulatedServer(MachineCosts(costs), drafting, *policy, max_num_seqs=32)
        self._rate, self._random = rate, np.random.default_rng(seed)
        self._is_aware, self._classes = is_aware, classes

    def run(self, num_requests: int) -> None:
        """Serve so many requests."""
        arrivals = self._server.now + np.cumsum(self._random.exponential(1 / self._rate, num_requests))
        kinds = self._random.choice(len(self._classes), num_requests, p=[one.share for one in self._classes])
        chosen = [self._classes[kind] for kind in kinds]
        coming = [self._request(i, *one) for i, one in enumerate(zip(chosen, arrivals, strict=True))]
        self.requests = list(zip(coming, chosen, strict=True))
        self._server.run(coming)

    def num_good(self, kind: RequestClass) -> int:
        """Return how many requests of a class have met both targets."""
        assert kind.slo is not None
        ttft, tpot = (np.inf if one is None else one / 1000 for one in (kind.slo.ttft, kind.slo.tpot))
        return sum(self.ttft(one) <= ttft and self._tpot(one) <= tpot for one, own in self.requests if own is kind)

    @staticmethod
    def seconds(request: Request) -> float:
        """Return the seconds from arrival to end."""
        assert request.times.finished is not None
        return request.times.finished - request.times.arrival

    @staticmethod
    def ttft(request: Request) -> float:
        """Return the seconds from arrival to the first token."""
        assert request.times.first_token is not None
        return request.times.first_token - request.times.arrival

    @classmethod
    def _tpot(cls, request: Request) -> float:
        return (cls.seconds(request) - cls.ttft(request)) / max(request.num_output - 1, 1)

    def _request(self, number: int, kind: RequestClass, time: float) -> Request:
        slo = kind.slo if self._is_aware else None
        params = SamplingParams(temperature=0.0, max_tokens=kind.num_output, slo=slo)
        request = make_request(str(number), range(kind.num_prompt), params, cache_salt=None)
        request.times.arrival = float(time)
        return request

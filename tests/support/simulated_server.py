"""Requests of classes that arrive at random at a simulated server, with latency targets that it knows or not."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.batches.server import SimulatedServer
from simulated_machines import SimulatedDrafting
from specinfer.core.limits import SLO
from specinfer.core.request import Request
from specinfer.core.sampling import SamplingParams
from specinfer.policy.auto_policy import AutoPolicy
from specinfer.policy.base import SpeculationPolicy
from specinfer.policy.cost_model import CostModel
from specinfer.policy.slo_planner import SLOPlanner
from tiny import make_request


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

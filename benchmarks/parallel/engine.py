"""One arm's engine in its own process: a whole target, or rank 0 of a split one."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from benchmarks.parallel.namespaces import crossed
from benchmarks.parallel.part_costs import measure_part
from specinfer.bench.measurement import measure_batch
from specinfer.bench.options import PLAIN, bench_params
from specinfer.core.errors import ModelError
from specinfer.core.tree_shape import parse_tree
from specinfer.llm import LLM
from specinfer.model.sharding.runner import DistributedRunner
from specinfer.policy.auto_policy import AutoPolicy
from specinfer.policy.base import FixedPolicy, SpeculationPolicy
from specinfer.policy.cost_measurement import measure_costs
from specinfer.policy.cost_model import CostModel
from specinfer.policy.request_policy import make_policy
from specinfer.reporting.environment import Environment


@dataclass(frozen=True, slots=True)
class EngineJob:
    """The models to load and the situations to measure.

    Attributes:
        options: Options of `LLM`.
        trees: Trees, each of which is an arm.
        situations: Batch sizes and temperatures. An arm learns separately in each.
        drafter_parameters: Number of parameters of each drafter by name, for the report.
        device: Network device that connects this host to the other one, or None if there is no other host.
    """

    target: str
    options: dict[str, Any]
    trees: list[str]
    situations: list[tuple[int, float]]
    drafter_parameters: dict[str, int]
    device: str | None = None


@dataclass(frozen=True, slots=True)
class EngineAsk:
    """One batch for one arm.

    Attributes:
        setting: Name of the setting. An arm learns separately in each.
        numbers: Numbers of the prompts.
        seeds: One for each prompt.
    """

    setting: str
    tree: str
    repeat: int
    temperature: float
    max_tokens: int
    numbers: list[int]
    prompts: list[list[int]]
    seeds: list[int]


def create(num_threads: int) -> "ParallelEngine":
    return ParallelEngine(num_threads)


def answer(engine: "ParallelEngine", message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the reply to one message; {"refused": reason, ...} if the models cannot be loaded with these options."""
    match message["do"]:
        case "load":
            try:
                return engine.load(EngineJob(**message["job"]))
            except ValueError as error:
                return {"refused": str(error), "is_model": isinstance(error, ModelError)}
        case "costs":
            return engine.costs().as_dict()
        case "part":
            return engine.part(message["num_ranks"])
        case "busy":
            return engine.be_busy(message["seconds"])
        case "prepare":
            return engine.prepare(message["setting"])
        case _:
            return engine.measure(EngineAsk(**message["ask"]))


class ParallelEngine:
    """A target, its drafters, and a policy for each arm, setting and situation."""

    def __init__(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self._llm: LLM | None = None
        self._job: EngineJob | None = None
        self._policies: dict[tuple[str, str, int, float], SpeculationPolicy] = {}

    def load(self, job: EngineJob) -> dict[str, Any]:
        """Load the models, and return their size and the environment."""
        llm = self._llm = LLM(job.target, tree="1", **job.options)  # the tree applies until a policy is set
        self._job = job
        loaded = llm.target.loaded
        return {
            "num_bytes": loaded.num_bytes,
            "environment": Environment.from_llm(llm, job.drafter_parameters).as_dict(),
        }

    def costs(self) -> CostModel:
        """Measure costs now without caching them, since they include the load of other processes and the link."""
        assert self._llm is not None
        assert self._llm.drafter is not None
        return measure_costs(self._llm.target, self._llm.drafter)

    def part(self, num_ranks: int) -> dict[str, Any]:
        """Return [sizes, seconds] of passes through the layers on one of `num_ranks` tensor ranks, without waiting."""
        assert self._llm is not None
        assert self._llm.drafter is not None
        curve = measure_part(self._llm.target.loaded, self._llm.drafter, num_ranks)
        return {"part": [curve.sizes.tolist(), curve.seconds.tolist()]}

    def be_busy(self, seconds: float) -> dict[str, Any]:
        """Run passes for this many seconds, as load on the machine while another process is measured."""
        assert self._llm is not None
        assert self._llm.drafter is not None
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            measure_costs(self._llm.target, self._llm.drafter, max_seconds=0.1)
        return {}

    def prepare(self, setting: str) -> dict[str, Any]:
        """Create the policies of a setting from passes timed now, and return these costs."""
        assert self._llm is not None
        assert self._job is not None
        assert self._llm.drafter is not None
        costs = self.costs()
        for size, temperature in self._job.situations:
            self._policies[setting, PLAIN, size, temperature] = FixedPolicy()
            for tree in self._job.trees:
                fresh = CostModel.from_dict(costs.as_dict())
                self._policies[setting, tree, size, temperature] = (
                    AutoPolicy(fresh)
                    if parse_tree(tree).is_auto
                    else make_policy(parse_tree(tree), lambda: costs, self._llm.drafter.num_drafters)
                )
        return costs.as_dict()

    def measure(self, ask: EngineAsk) -> dict[str, Any]:
        """Run one batch, and return the run with the communication of rank 0 while decoding."""
        assert self._llm is not None
        params = [bench_params(ask.temperature, ask.max_tokens, seed) for seed in ask.seeds]
        policy = self._policies[ask.setting, ask.tree, len(ask.prompts), ask.temperature]
        begun: list[dict[str, Any]] = []
        run = measure_batch(
            self._llm, policy, ask.numbers, ask.prompts, params, ask.repeat, lambda: begun.append(self._traffic())
        )
        ended = self._traffic()
        by_rank = policy.acceptance.by_rank().tolist() if isinstance(policy, AutoPolicy) else None
        traffic = {name: ended[name] - begun[0][name] for name in ended}
        return asdict(replace(run, counters=traffic | {"by_rank": by_rank or []}))

    def _traffic(self) -> dict[str, Any]:
        assert self._llm is not None
        assert self._job is not None
        counts = {"num_bytes": 0, "num_messages": 0, "link_bytes": 0, "link_packets": 0}
        if isinstance(self._llm.target, DistributedRunner):
            traffic = self._llm.target.traffic
            counts["num_bytes"] = traffic.num_bytes + traffic.num_bytes_received
            counts["num_messages"] = traffic.num_messages + traffic.num_messages_received
        if self._job.device is not None:
            counts |= crossed(self._job.device)
        return counts

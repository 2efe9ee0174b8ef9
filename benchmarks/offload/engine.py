"""Our arms on a streamed target, in a separate process so that their memory can be measured."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from specinfer.bench.loop import copied
from specinfer.bench.measurement import measure_batch
from specinfer.bench.options import PLAIN, bench_params
from specinfer.core.errors import ModelError
from specinfer.core.tree_shape import parse_tree
from specinfer.llm import LLM
from specinfer.policy.base import FixedPolicy, SpeculationPolicy
from specinfer.reporting.environment import Environment


@dataclass(frozen=True, slots=True)
class OwnSetup:
    """Settings that all arms share.

    Attributes:
        options: Options of `LLM`.
        trees: Trees, one arm each.
        situations: Batch sizes and temperatures. An arm learns separately in each of them.
        num_slots: Slots of the KV cache that the largest batch needs.
        drafter_parameters: Number of parameters of each model drafter by its name, for the report.
    """

    target: str
    options: dict[str, Any]
    trees: list[str]
    situations: list[tuple[int, float]]
    num_slots: int
    drafter_parameters: dict[str, int]


@dataclass(frozen=True, slots=True)
class OwnAsk:
    """Request to run one batch with one arm.

    Attributes:
        numbers: Numbers of the prompts, for the report.
        seeds: Seed of each prompt.
    """

    arm: str
    repeat: int
    temperature: float
    max_tokens: int
    numbers: list[int]
    prompts: list[list[int]]
    seeds: list[int]


def create(num_threads: int) -> "OwnEngine":
    return OwnEngine(num_threads)


def answer(engine: "OwnEngine", message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to one message, which has the key "refused" with a reason if the models cannot be loaded."""
    if message["do"] == "load":
        try:
            return engine.load(OwnSetup(**message["job"]))
        except ValueError as error:
            return {"refused": str(error), "is_model": isinstance(error, ModelError)}
    return engine.measure(OwnAsk(**message["ask"]))


class OwnEngine:
    """Engine with the target, its drafters, and a policy for each arm and situation."""

    def __init__(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self._llm: LLM | None = None
        self._policies: dict[tuple[str, int, float], SpeculationPolicy] = {}

    def load(self, job: OwnSetup) -> dict[str, Any]:
        """Load the models, measure the costs of passes, and return a description of what was loaded."""
        llm = self._llm = LLM(job.target, tree="1", **job.options)  # a placeholder tree until each arm has its policy
        if llm.target.cache.num_slots < job.num_slots:
            size = max(size for size, _ in job.situations)
            raise ValueError(
                f"batch_sizes: {size} requests and their trees need {job.num_slots} slots of the KV cache, and memory "
                f"allows {llm.target.cache.num_slots}; lower batch_sizes, max_tokens or prompt_chars, or raise "
                "memory_budget"
            )
        for name in (PLAIN, *job.trees):
            # Costs are measured anew, so that results do not depend on an old file.
            policy = FixedPolicy() if name == PLAIN else llm.make_policy(parse_tree(name), fresh=True)
            for size, temperature in job.situations:
                self._policies[name, size, temperature] = copied(policy, llm)
        loaded, stream = llm.target.loaded, llm.target.loaded.stream
        return {
            "dtype": str(loaded.dtype).removeprefix("torch."),
            "device": str(loaded.device),
            "num_layers": 0 if stream is None else stream.num_layers,
            "num_resident": 0 if stream is None else stream.num_resident,
            "bytes_per_pass": 0 if stream is None else stream.bytes_per_pass,
            "environment": Environment.from_llm(llm, job.drafter_parameters).as_dict(),
        }

    def measure(self, ask: OwnAsk) -> dict[str, Any]:
        """Run one batch, and return the run with the stream's counters of its decoding."""
        assert self._llm is not None
        params = [bench_params(ask.temperature, ask.max_tokens, seed) for seed in ask.seeds]
        policy = self._policies[ask.arm, len(ask.prompts), ask.temperature]
        begun: list[dict[str, float]] = []
        run = measure_batch(
            self._llm, policy, ask.numbers, ask.prompts, params, ask.repeat, lambda: begun.append(self._counters())
        )
        ended = self._counters()
        return asdict(replace(run, counters={name: ended[name] - begun[0][name] for name in ended}))

    def _counters(self) -> dict[str, float]:
        assert self._llm is not None
        stream = self._llm.target.loaded.stream
        names = ("bytes_read", "seconds_reading", "seconds_waiting")
        return {name: 0 if stream is None else getattr(stream, name) for name in names}

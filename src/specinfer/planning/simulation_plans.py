"""Configuration of a simulation, and the search for the best split and tree by batch size and number of machines."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specinfer.bench.options import check_distinct, check_whole
from specinfer.core.errors import check_float
from specinfer.core.options import parse_size
from specinfer.planning.cluster import Cluster, RankCosts, Split, TargetShape
from specinfer.planning.network import Floats, Link, parse_rate, parse_seconds
from specinfer.planning.simulation import Round, group_step, groups_of, simulate
from specinfer.planning.simulation_report import Prediction
from specinfer.policy.acceptance import expected_tokens
from specinfer.policy.cost_measurement import SIZES
from specinfer.policy.cost_model import CostModel
from specinfer.policy.curves import Curve
from specinfer.policy.optimizer import TreeSizes

MAX_MACHINES = 1024
_MAX_BATCH = 4096
_MARGIN = 1.03  # least expected speedup at which speculation is chosen, as in the engine
_NO_SIZE = (1e9,)  # size of a curve that is constant over the number of rows


@dataclass(frozen=True, slots=True)
class SimulationConfig:
    """Given properties of machines to simulate.

    Attributes:
        machines: Numbers of machines to plan for.
        batch_sizes: Numbers of requests that run together on all machines.
        per_machine: Devices of each machine, with one rank on each.
        link_latency: One-way latency between machines, such as "1ms".
        link_bandwidth: Bandwidth of each machine, such as "1Gbit".
        inner_latency: One-way latency between the devices of a machine.
        inner_bandwidth: Bandwidth of each device to the others of its machine.
        scale: Speed of each device relative to this machine.
        memory_bandwidth: Rate at which each device reads weights, such as "200GB/s", or None to derive it from `scale`.
        device_memory: Limit of the weights of a rank, such as "16GiB", or None for no limit.
        layer_overhead: Time of a split layer in addition to its part of the whole layer's.
        message_overhead: CPU time of sending a message.

    Raises:
        ValueError: A field is out of range; the message names it.
    """

    machines: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    batch_sizes: tuple[int, ...] = (1, 8, 64)
    per_machine: int = 1
    link_latency: str = "1ms"
    link_bandwidth: str = "1Gbit"
    inner_latency: str = "20us"
    inner_bandwidth: str = "10GB/s"
    scale: float = 1.0
    memory_bandwidth: str | None = None
    device_memory: int | str | None = None
    layer_overhead: str = "0us"
    message_overhead: str = "50us"

    def __post_init__(self) -> None:
        check_distinct("machines", self.machines, MAX_MACHINES)
        check_distinct("batch_sizes", self.batch_sizes, _MAX_BATCH)
        check_whole("per_machine", self.per_machine, 1, MAX_MACHINES)
        check_float("scale", self.scale, 0, 1e6, low_open=True)
        for name in ("link_latency", "inner_latency", "layer_overhead", "message_overhead"):
            parse_seconds(name, getattr(self, name))
        for name in ("link_bandwidth", "inner_bandwidth"):
            parse_rate(name, getattr(self, name))
        if self.memory_bandwidth is not None:
            parse_rate("memory_bandwidth", self.memory_bandwidth)
        if self.device_memory is not None:
            parse_size("device_memory", self.device_memory)

    @property
    def cluster(self) -> Cluster:
        link, inner = (
            Link(parse_seconds(f"{name}_latency", latency), parse_rate(f"{name}_bandwidth", bandwidth))
            for name, latency, bandwidth in (
                ("link", self.link_latency, self.link_bandwidth),
                ("inner", self.inner_latency, self.inner_bandwidth),
            )
        )
        return Cluster(link, inner, self.per_machine)

    def costs(self, measured: CostModel, shape: TargetShape) -> RankCosts:
        """Return the costs of a device of these machines, derived from the costs measured here."""
        overhead = Curve(_NO_SIZE, (parse_seconds("layer_overhead", self.layer_overhead),))
        here = RankCosts(measured, overhead, parse_seconds("message_overhead", self.message_overhead))
        read_scale = self.scale
        if self.memory_bandwidth is not None:
            here_rate = shape.num_bytes / float(measured.target(1))
            read_scale = parse_rate("memory_bandwidth", self.memory_bandwidth) / here_rate
        return here.on_faster(self.scale, read_scale)


class Planner:
    """Comparison of splits and trees for one target.

    Args:
        by_rank: Probability that the first, second, ... proposed token at a node is the target's [ranks].
    """

    def __init__(self, shape: TargetShape, costs: RankCosts, cluster: Cluster, by_rank: Floats) -> None:
        self._shape, self._costs, self._cluster, self._by_rank = shape, costs, cluster, by_rank
        self._known: dict[tuple[int, int, int], tuple[Prediction, Prediction]] = {}

    def best(self, num_machines: int, batch_size: int, device_memory: float = math.inf) -> Prediction | None:
        """Return the fastest of all splits and numbers of replicas, or None if the target fits in none.

        The first split in the order of `splits_for` wins a tie.
        """
        found = None
        for tensor, pipeline in splits_for(self._shape, num_machines * self._cluster.per_machine):
            if Split(tensor, pipeline, self._shape, self._costs, self._cluster).bytes_per_rank > device_memory:
                continue
            replicas = min(num_machines * self._cluster.per_machine // (tensor * pipeline), batch_size)
            one, _ = self.predict(tensor, pipeline, math.ceil(batch_size / replicas))
            whole = one.replicated(num_machines, replicas, batch_size)
            if found is None or whole.tokens_per_second > found.tokens_per_second * (1 + 1e-9):
                found = whole
        return found

    def predict(self, tensor: int, pipeline: int, num_requests: int) -> tuple[Prediction, Prediction]:
        """Return the predictions of the best tree and of plain decoding for one target with this split."""
        key = tensor, pipeline, num_requests
        if key not in self._known:
            self._known[key] = self._weigh(*key)
        return self._known[key]

    def _weigh(self, tensor: int, pipeline: int, num_requests: int) -> tuple[Prediction, Prediction]:
        split = Split(tensor, pipeline, self._shape, self._costs, self._cluster)
        sizes = TreeSizes.for_costs(pass_costs(split))
        expected = expected_tokens(self._by_rank, sizes.num_nodes, sizes.num_levels)
        steady = run_round(split, num_requests, sizes.num_nodes, sizes.num_levels)
        rates = expected / steady.seconds
        best = int(rates.argmax())
        best = best if rates[best] > _MARGIN * rates[0] else 0

        def of(tree: int) -> Prediction:
            return Prediction(
                tensor=tensor,
                pipeline=pipeline,
                batch_size=num_requests,
                num_nodes=int(sizes.num_nodes[tree]),
                num_levels=int(sizes.num_levels[tree]),
                tokens_per_pass=float(expected[tree]),
                step_seconds=float(steady.seconds[tree]),
                communication=float(steady.communication[tree]),
                idle=float(steady.idle[tree]),
                plain_step_seconds=float(steady.seconds[0]),
            )

        return of(best), of(0)


def run_round(split: Split, num_requests: int, num_nodes: npt.ArrayLike, num_levels: npt.ArrayLike) -> Round:
    """Return a steady round of `num_requests` requests with trees of these numbers of nodes and levels [trees]."""
    nodes, levels = np.asarray(num_nodes), np.asarray(num_levels)
    made = {size: group_step(split, size, nodes, levels) for size in set(groups_of(num_requests, split.pipeline))}
    return simulate([made[size] for size in groups_of(num_requests, split.pipeline)])


def pass_costs(split: Split) -> CostModel:
    """Return the costs of passes through all stages by rows, as the engine would measure them."""
    sizes = np.asarray(SIZES)
    seconds = group_step(split, 1, sizes - 1, np.zeros_like(sizes)).alone
    step = split.costs.step
    return CostModel(Curve(sizes.tolist(), seconds.tolist()), step.draft_level, draft_start=step.draft_start)


def splits_for(shape: TargetShape, num_ranks: int) -> Iterator[tuple[int, int]]:
    """Yield (tensor, pipeline) of at most `num_ranks` ranks. Heads must divide evenly, and each stage needs a layer.

    A target that cannot be split has one rank, in as many replicas as there are machines.

    Numbers of stages are powers of two, or three times a power of two.
    """
    most_stages = shape.num_layers if shape.by_layers else 1
    for tensor in range(1, min(num_ranks, shape.num_heads) + 1):
        if shape.num_heads % tensor or max(tensor, shape.num_kv_heads) % min(tensor, shape.num_kv_heads):
            continue
        for pipeline in sorted({base << power for base in (1, 3) for power in range(MAX_MACHINES.bit_length())}):
            if pipeline <= min(most_stages, num_ranks // tensor):
                yield tensor, pipeline


def plan_machines(
    config: SimulationConfig, shape: TargetShape, measured: CostModel, by_rank: Sequence[float]
) -> tuple[Prediction, ...]:
    """Return the best split and tree for each number of machines and batch size.

    Raises:
        ValueError: The target fits on none of the given numbers of machines.
    """
    planner = Planner(shape, config.costs(measured, shape), config.cluster, np.asarray(by_rank))
    memory = math.inf if config.device_memory is None else float(parse_size("device_memory", config.device_memory))
    found = [planner.best(number, size, memory) for number in config.machines for size in config.batch_sizes]
    made = tuple(prediction for prediction in found if prediction is not None)
    if not made:
        raise ValueError(
            f"device_memory: {memory / 2**30:.2f} GiB hold no part of the target's {shape.num_bytes / 2**30:.2f} on at "
            f"most {max(config.machines)} machines; raise it, or machines"
        )
    return made

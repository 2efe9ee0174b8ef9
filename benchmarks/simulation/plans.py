"""Search for the best split and tree by batch size and number of machines."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from benchmarks.simulation.cluster import Cluster, RankCosts, Split
from benchmarks.simulation.links import Floats
from benchmarks.simulation.rounds import Round, group_step, groups_of, simulate
from specinfer.planning.target_shape import TargetShape
from specinfer.policy.acceptance import expected_tokens
from specinfer.policy.cost_measurement import SIZES
from specinfer.policy.cost_model import CostModel
from specinfer.policy.curves import Curve
from specinfer.policy.optimizer import clearly_faster
from specinfer.policy.rank_choice import TreeSizes

MAX_MACHINES = 1024
_MARGIN = 1.03  # least expected speedup at which speculation is chosen, as in the engine


@dataclass(frozen=True, slots=True)
class Prediction:
    """One split of the target with its number of replicas and the tree of each request; 0 nodes is plain decoding.

    Attributes:
        batch_size: Requests that run together on all replicas.
        tokens_per_pass: Expected tokens of one request in a pass.
        step_seconds: Seconds between two passes of a request.
        communication: Share of a step in which messages are in transit.
        idle: Share of a step in which a stage has nothing to do.
        plain_step_seconds: Seconds between two passes of a request with plain decoding on the same split.
        machines: Number of machines, or 0 if the prediction is for one target on any machines.
    """

    tensor: int
    pipeline: int
    batch_size: int
    num_nodes: int
    num_levels: int
    tokens_per_pass: float
    step_seconds: float
    communication: float
    idle: float
    plain_step_seconds: float
    replicas: int = 1
    machines: int = 0

    @property
    def seconds_per_token(self) -> float:
        """Mean seconds that one request waits for a token."""
        return self.step_seconds / self.tokens_per_pass

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all requests together."""
        return self.batch_size / self.seconds_per_token

    @property
    def speedup(self) -> float:
        """Speedup over plain decoding on the same ranks."""
        return self.tokens_per_pass * self.plain_step_seconds / self.step_seconds

    def replicated(self, machines: int, replicas: int, batch_size: int) -> "Prediction":
        """Return the prediction for this many replicas. The fullest replica has as many requests as this prediction."""
        return replace(self, machines=machines, replicas=replicas, batch_size=batch_size)


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
        best = clearly_faster(rates, 0, _MARGIN)

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

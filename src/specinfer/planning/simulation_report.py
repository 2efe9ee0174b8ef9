"""Values that a simulation predicts."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from specinfer.planning.cluster import TargetShape
from specinfer.planning.plan_report import PlanReport


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

    def as_dict(self) -> dict[str, object]:
        return {
            "machines": self.machines,
            "batch_size": self.batch_size,
            "tensor_parallel": self.tensor,
            "pipeline_parallel": self.pipeline,
            "replicas": self.replicas,
            "num_nodes": self.num_nodes,
            "num_levels": self.num_levels,
            "tokens_per_pass": self.tokens_per_pass,
            "step_ms": 1000 * self.step_seconds,
            "ms_per_token": 1000 * self.seconds_per_token,
            "tokens_per_second": self.tokens_per_second,
            "speedup": self.speedup,
            "communication_share": self.communication,
            "idle_share": self.idle,
        }


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """The best split and tree by number of machines and batch size, in the requested order.

    Attributes:
        plan: Costs and acceptance measured here, on which the predictions are based.
        options: Options that describe the machines.
    """

    predictions: tuple[Prediction, ...]
    plan: PlanReport
    shape: TargetShape
    options: Mapping[str, object]

    @property
    def batch_sizes(self) -> list[int]:
        return sorted({prediction.batch_size for prediction in self.predictions})

    def of_batch(self, size: int) -> list[Prediction]:
        """Return the predictions for a batch size, sorted by number of machines."""
        found = [prediction for prediction in self.predictions if prediction.batch_size == size]
        return sorted(found, key=lambda prediction: prediction.machines)

    def as_dict(self) -> dict[str, object]:
        """Return the report in a form ready for JSON."""
        return {
            "simulation": [prediction.as_dict() for prediction in self.predictions],
            "simulation_options": dict(self.options),
            "plan": self.plan.as_dict(),
        }

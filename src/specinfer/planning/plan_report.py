"""Values of a plan: costs, acceptance, and the tree for each batch size."""

from dataclasses import dataclass

from specinfer.planning.options import PlanConfig
from specinfer.policy.cost_model import CostModel
from specinfer.policy.curves import Curve
from specinfer.policy.offload_choice import OffloadChoice, best_of
from specinfer.policy.streamed_costs import StreamedCurve
from specinfer.reporting.environment import Environment


@dataclass(frozen=True, slots=True)
class Choice:
    """The average tree of each request when `num_requests` run together; 0 nodes is plain decoding.

    Attributes:
        tokens_per_pass: Expected tokens of one request in a pass.
        tokens_per_second: Expected tokens per second of all requests together.
        plain_rate: Expected tokens per second of all requests with plain decoding.
    """

    num_requests: int
    num_nodes: int
    num_levels: int
    tokens_per_pass: float
    tokens_per_second: float
    plain_rate: float

    @property
    def speedup(self) -> float:
        return self.tokens_per_second / self.plain_rate

    def as_dict(self) -> dict[str, object]:
        return {
            "num_requests": self.num_requests,
            "num_nodes": self.num_nodes,
            "num_levels": self.num_levels,
            "tokens_per_pass": self.tokens_per_pass,
            "tokens_per_second": self.tokens_per_second,
            "plain_tokens_per_second": self.plain_rate,
            "speedup": self.speedup,
        }


@dataclass(frozen=True, slots=True)
class Streaming:
    """Weight reads of a target whose layers are streamed in every pass.

    Attributes:
        seconds: Seconds of a pass over one token.
        bend: Number of rows from which computing takes longer than reading, or None if passes were too fast to find it.
    """

    num_layers: int
    num_resident: int
    bytes_per_pass: int
    seconds: float
    bend: float | None

    def as_dict(self) -> dict[str, object]:
        return {
            "num_layers": self.num_layers,
            "num_resident_layers": self.num_resident,
            "bytes_per_pass": self.bytes_per_pass,
            "seconds_per_pass": self.seconds,
            "bend": self.bend,
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """The choices, and the costs and acceptance on which they are based.

    Attributes:
        by_rank: Probability that the first, second, ... proposed token at a node is the target's.
        offload_choices: What drafters give a streamed target: none first, then those of the plan, then copies.
        command: The command line that serves with the best of them, or None for a target that is not streamed.
    """

    costs: CostModel
    by_rank: tuple[float, ...]
    choices: tuple[Choice, ...]
    config: PlanConfig
    environment: Environment
    streaming: Streaming | None = None
    offload_choices: tuple[OffloadChoice, ...] = ()
    command: str | None = None

    @property
    def target_ms(self) -> list[tuple[int, float]]:
        """Milliseconds of a target pass by number of tokens, as (tokens, milliseconds)."""
        return _milliseconds(self.costs.target)

    @property
    def draft_ms(self) -> list[tuple[int, float]]:
        """Milliseconds of drafting one level by its number of nodes, as (nodes, milliseconds)."""
        return _milliseconds(self.costs.draft_level)

    def as_dict(self) -> dict[str, object]:
        """Return the numbers of the report, ready for JSON."""
        return {
            "choices": [choice.as_dict() for choice in self.choices],
            "acceptance_by_rank": list(self.by_rank),
            "acceptance_measured": self.config.acceptance is None,
            "target_ms": self.target_ms,
            "draft_level_ms": self.draft_ms,
            "draft_start_ms": 1000 * self.costs.draft_start,
            "read_token_ms": 1000 * self.costs.read_token,
            "streaming": None if self.streaming is None else self.streaming.as_dict(),
            "offload_choices": [
                one.as_dict() | {"is_best": one is best_of(self.offload_choices)} for one in self.offload_choices
            ],
            "command": self.command,
        }


def _milliseconds(curve: Curve | StreamedCurve) -> list[tuple[int, float]]:
    return [(int(size), 1000 * float(time)) for size, time in zip(curve.sizes, curve.seconds, strict=True)]

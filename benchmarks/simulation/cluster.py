"""Cost model of a target split over ranks: the part of a pass that each rank computes, and the messages between ranks.

The time of a stage is its layers' share of the whole target's pass. Reading and multiplying weights is divided over the
tensor ranks of a stage. Two costs are not: keys and values where there are fewer KV heads than ranks, and the fixed
overhead of a layer. Twice per layer the partial results are summed (Megatron-LM, arXiv:1909.08053, section 3): each
rank sends its own to all others at the same time.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from benchmarks.simulation.links import Floats, Link
from specinfer.parallel.group import ShardSpec
from specinfer.planning.target_shape import TargetShape
from specinfer.policy.cost_model import CostModel
from specinfer.policy.curves import Curve

_REDUCTIONS = 2  # per layer: after attention and after the MLP
# Approximate bytes of the description of a pass: each row's token, position, slot and attention mask, and the previous
# context of each request.
_ROW_BYTES, _REQUEST_BYTES = 48, 1024
HIDDEN_BYTES = 4  # bytes of each number that ranks exchange, since sums are in float32


@dataclass(frozen=True, slots=True)
class RankCosts:
    """Seconds that one rank's device and processor take.

    Attributes:
        step: Seconds of the parts of a step with the whole target on one such device.
        layer_overhead: Seconds that a layer split over tensor ranks takes beyond its part of the whole, by rows.
        message: Seconds of processor time to send a message of any size.
    """

    step: CostModel
    layer_overhead: Curve
    message: float

    def on_faster(self, scale: float, read_scale: float) -> Self:
        """Return the costs on a device that computes `scale` times and reads weights `read_scale` times as fast.

        The time of a pass over one row counts as reading, and the time that further rows add counts as computing. One
        row of a drafter, which a cache may hold, gains no more than either.
        """
        step, sizes = self.step, self.step.target.sizes
        reading = float(step.target(1))
        seconds = reading / read_scale + (step.target.seconds - reading) / scale
        level, levels = float(step.draft_level(1)), step.draft_level.seconds
        drafting = level / min(scale, read_scale) + (levels - level) / scale
        draft = Curve(step.draft_level.sizes.tolist(), drafting.tolist())
        target = Curve(sizes.tolist(), seconds.tolist())
        faster = CostModel(target, draft, step.read_token / scale, step.draft_start / scale)
        faster.rest = step.rest / scale
        overhead = Curve(self.layer_overhead.sizes.tolist(), (self.layer_overhead.seconds / scale).tolist())
        return type(self)(faster, overhead, self.message / scale)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Machines and the links between them.

    Attributes:
        link: Link of each machine to all others.
        inner: Link between the devices of a machine.
        per_machine: Devices per machine, each for one rank.
    """

    link: Link
    inner: Link
    per_machine: int = 1


@dataclass(frozen=True, slots=True)
class Split:
    """Target split over `tensor` times `pipeline` ranks of a cluster.

    Ranks are numbered within each tensor group first, then through the stages from the last to the first. They fill one
    machine after another.
    """

    tensor: int
    pipeline: int
    shape: TargetShape
    costs: RankCosts
    cluster: Cluster

    @property
    def num_ranks(self) -> int:
        return self.tensor * self.pipeline

    @property
    def part(self) -> float:
        """Fraction of a layer that each tensor rank stores and computes."""
        shape = self.shape
        kv_part = max(1 / self.tensor, 1 / shape.num_kv_heads)  # a rank has at least one KV head
        rest = shape.layer_parameters - shape.kv_parameters
        return (rest / self.tensor + shape.kv_parameters * kv_part) / shape.layer_parameters

    def _layers_of(self, stage: int) -> int:
        return len(ShardSpec(stage=stage, num_stages=self.pipeline).layers(self.shape.num_layers))

    @property
    def bytes_per_rank(self) -> float:
        """Bytes of weights on the fullest rank: its layers, and the embeddings or head of the first or last stage."""
        layers = self._layers_of(0) * self.shape.layer_parameters * self.part
        return self.shape.bytes_per_parameter * (layers + self.shape.head_parameters)

    def computing(self, stage: int, num_rows: npt.ArrayLike) -> Floats:
        """Return the seconds of the stage's pass over `num_rows` rows, without waiting for other ranks."""
        rows, shape = np.asarray(num_rows), self.shape
        whole = self.costs.step.target(rows)
        num_layers = self._layers_of(stage)
        layers = whole * (1 - shape.head_share) * num_layers / shape.num_layers
        head = whole * shape.head_share if stage == self.pipeline - 1 else 0.0
        if self.tensor > 1:
            layers = layers * self.part + num_layers * self.costs.layer_overhead(rows)
        return np.asarray(layers + head)  # only rank 0 has the head, and the others wait for it

    def reducing(self, stage: int, num_rows: npt.ArrayLike) -> Floats:
        """Return the seconds that the stage's ranks take to sum their partial results."""
        if self.tensor == 1:
            return np.zeros(np.shape(num_rows))
        num_bytes = HIDDEN_BYTES * self.shape.width * np.asarray(num_rows, dtype=np.float64)
        here = min(self.tensor, self.cluster.per_machine)  # ranks of the stage on one machine
        away = self.tensor - here
        sending = self.costs.message * (self.tensor - 1)
        seconds = np.zeros(np.shape(num_rows))
        if here > 1:
            seconds = self.cluster.inner.seconds((here - 1) * num_bytes)
        if away:  # all ranks of a machine share its link to others
            seconds = np.maximum(seconds, self.cluster.link.seconds(here * away * num_bytes))
        return np.asarray(_REDUCTIONS * self._layers_of(stage) * (sending + seconds))

    def handing(self, stage: int, num_rows: npt.ArrayLike) -> Floats:
        """Return the seconds until the hidden states of this stage are at the next, each rank sending to its peer."""
        num_bytes = HIDDEN_BYTES * self.shape.width * np.asarray(num_rows, dtype=np.float64)
        first = (self.pipeline - 1 - stage) * self.tensor  # first rank of this stage; the next stage's come before
        machines = np.arange(first - self.tensor, first + self.tensor) // self.cluster.per_machine
        if (machines[: self.tensor] == machines[self.tensor :]).all():
            return self.costs.message + self.cluster.inner.seconds(self.tensor * num_bytes)
        return self.costs.message + self.cluster.link.seconds(min(self.tensor, self.cluster.per_machine) * num_bytes)

    def telling(self, num_requests: int, num_rows: npt.ArrayLike) -> Floats:
        """Return the seconds until the first stage knows what to compute: rank 0 sends it to each of the others.

        With a single stage, rank 0 begins at once and the others begin later by this time. They catch up by the second
        sum: they already have rank 0's part of the first sum when they reach it, so they do not wait there.
        """
        if self.num_ranks == 1:
            return np.zeros(np.shape(num_rows))
        num_bytes = _REQUEST_BYTES * num_requests + _ROW_BYTES * np.asarray(num_rows, dtype=np.float64)
        link = self.cluster.inner if self.num_ranks <= self.cluster.per_machine else self.cluster.link
        seconds = link.seconds((self.num_ranks - 1) * num_bytes)
        if self.pipeline > 1:
            return seconds
        return np.maximum(seconds - self.reducing(0, num_rows) / (_REDUCTIONS * self.shape.num_layers), 0.0)

    @property
    def sending(self) -> float:
        """Seconds of rank 0's processor time to send the others what to compute."""
        return self.costs.message * (self.num_ranks - 1)

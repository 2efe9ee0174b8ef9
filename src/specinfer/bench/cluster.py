"""A target split over ranks: which part of a pass each rank computes, and what they tell each other meanwhile.

A stage's pass is its layers' share of the whole target's. Over the tensor ranks of a stage, what reads and multiplies
weights divides. Keys and values do not where there are fewer KV heads than ranks, nor what a layer takes whatever it
computes. Twice a layer the parts are added up (Megatron-LM, arXiv:1909.08053, section 3): each rank sends its own to
all others, at once.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from specinfer.bench.network import Floats, Link
from specinfer.engine.costs import Curve, StepCosts
from specinfer.model.definition import load_config
from specinfer.model.folder import weight_shapes
from specinfer.parallel.share import Share
from specinfer.parallel.torch_group import SMALL_BYTES

_LAYER_WEIGHT = re.compile(r"\b(?:layers|h|blocks)\.\d+\.")
_REDUCTIONS = 2  # of each layer: after attention, and after the MLP
# About what is told of a pass, in bytes: tokens, positions, slots and who sees whom; what a request had before.
_ROW_BYTES, _REQUEST_BYTES = 48, 1024
HIDDEN_BYTES = 4  # of a number that ranks exchange: sums are kept in float32


@dataclass(frozen=True, slots=True)
class TargetShape:
    """What matters of a target for splitting it.

    Attributes:
        width: Of hidden states.
        layer_parameters: Of one decoder layer; `kv_parameters` of these make keys and values.
        head_parameters: Of the output head.
        bytes_per_parameter: As the weights are held.
    """

    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    layer_parameters: int
    kv_parameters: int
    head_parameters: int
    bytes_per_parameter: float

    @classmethod
    def of(cls, folder: Path, bytes_per_parameter: float) -> Self:
        """Counted in the headers of a folder's weight files."""
        config = load_config(folder).get_text_config()
        in_layers = sum(prod(shape) for name, shape in weight_shapes(folder).items() if _LAYER_WEIGHT.search(name))
        width, num_heads = config.hidden_size, config.num_attention_heads
        num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
        head_dim = getattr(config, "head_dim", None) or width // num_heads
        return cls(
            num_layers=config.num_hidden_layers,
            width=width,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            layer_parameters=in_layers // config.num_hidden_layers,
            kv_parameters=2 * width * num_kv_heads * head_dim,
            head_parameters=config.vocab_size * width,
            bytes_per_parameter=bytes_per_parameter,
        )

    @property
    def num_bytes(self) -> float:
        """That a pass reads."""
        return self.bytes_per_parameter * (self.num_layers * self.layer_parameters + self.head_parameters)

    @property
    def head_share(self) -> float:
        """Of a pass."""
        return self.bytes_per_parameter * self.head_parameters / self.num_bytes

    def part(self, num_ranks: int) -> float:
        """Of a layer, that each of so many tensor ranks holds and computes."""
        kv_part = max(1 / num_ranks, 1 / self.num_kv_heads)  # a rank has one KV head at least
        rest = self.layer_parameters - self.kv_parameters
        return (rest / num_ranks + self.kv_parameters * kv_part) / self.layer_parameters

    def layers_of(self, stage: int, num_stages: int) -> int:
        return len(Share(stage=stage, num_stages=num_stages).layers(self.num_layers))


@dataclass(frozen=True, slots=True)
class RankCosts:
    """What one rank's device and processor take.

    Attributes:
        step: Seconds of the parts of a step, the target whole on one such device.
        layer_overhead: Seconds that a layer split over tensor ranks takes beyond its part of the whole, by rows.
        message: Seconds of the processor for sending a message, whatever its size.
        parts: Number of tensor ranks -> seconds of all layers on one of them by rows, where that was measured.
    """

    step: StepCosts
    layer_overhead: Curve
    message: float
    parts: Mapping[int, Curve] = field(default_factory=dict)

    def on_faster(self, scale: float, read_scale: float) -> Self:
        """On a device that computes and reads weights so many times as fast.

        What a pass over one row takes is reading; what further rows add to it is computing.
        """
        step, sizes = self.step, self.step.target.sizes
        reading = float(step.target(1))
        seconds = reading / read_scale + (step.target.seconds - reading) / scale
        draft = Curve(step.draft_level.sizes.tolist(), (step.draft_level.seconds / scale).tolist())
        target = Curve(sizes.tolist(), seconds.tolist())
        faster = StepCosts(target, draft, step.read_token / scale, step.draft_start / scale)
        faster.rest = step.rest / scale
        assert not self.parts, "what was measured on ranks is not foreseen"
        overhead = Curve(self.layer_overhead.sizes.tolist(), (self.layer_overhead.seconds / scale).tolist())
        return type(self)(faster, overhead, self.message / scale)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Machines and what joins them.

    Attributes:
        link: Of each machine to all others.
        inner: Between the devices of a machine.
        per_machine: Devices, each for one rank.
    """

    link: Link
    inner: Link
    per_machine: int = 1


@dataclass(frozen=True, slots=True)
class Split:
    """A target over `tensor` times `pipeline` ranks of a cluster.

    Ranks count through the tensor group first, then through the stages from the last to the first, and fill one machine
    after the other.
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
    def bytes_per_rank(self) -> float:
        """Of weights, that the fullest rank holds; on the first stage and the last one, embeddings or head beside."""
        layers = self.shape.layers_of(0, self.pipeline) * self.shape.layer_parameters * self.shape.part(self.tensor)
        return self.shape.bytes_per_parameter * (layers + self.shape.head_parameters)

    def computing(self, stage: int, num_rows: npt.ArrayLike) -> Floats:
        """Seconds of the stage's pass over so many rows, without what ranks wait for."""
        rows, shape = np.asarray(num_rows), self.shape
        whole = self.costs.step.target(rows)
        num_layers = shape.layers_of(stage, self.pipeline)
        layers = whole * (1 - shape.head_share) * num_layers / shape.num_layers
        head = whole * shape.head_share if stage == self.pipeline - 1 else 0.0
        if self.tensor > 1:
            if (part := self.costs.parts.get(self.tensor)) is not None:
                layers = part(rows) * num_layers / shape.num_layers
            else:
                layers = layers * shape.part(self.tensor) + num_layers * self.costs.layer_overhead(rows)
        return np.asarray(layers + head)  # the head is on rank 0 alone, and others wait for it

    def reducing(self, stage: int, num_rows: npt.ArrayLike) -> Floats:
        """Seconds in which the stage's ranks add up their parts."""
        if self.tensor == 1:
            return np.zeros(np.shape(num_rows))
        num_bytes = HIDDEN_BYTES * self.shape.width * np.asarray(num_rows, dtype=np.float64)
        here = min(self.tensor, self.cluster.per_machine)  # ranks of the stage on one machine
        away = self.tensor - here
        sending = self.costs.message * (self.tensor - 1)
        delays = np.where(num_bytes > SMALL_BYTES, 2, 1)  # of larger ones the receiver says first where they go
        seconds = np.zeros(np.shape(num_rows))
        if here > 1:
            seconds = self.cluster.inner.seconds((here - 1) * num_bytes, delays)
        if away:  # what all ranks of a machine send away shares its link
            seconds = np.maximum(seconds, self.cluster.link.seconds(here * away * num_bytes, delays))
        return np.asarray(_REDUCTIONS * self.shape.layers_of(stage, self.pipeline) * (sending + seconds))

    def handing(self, stage: int, num_rows: npt.ArrayLike) -> Floats:
        """Seconds until the hidden states of this stage are at the next one, each rank sending to its peer."""
        num_bytes = HIDDEN_BYTES * self.shape.width * np.asarray(num_rows, dtype=np.float64)
        first = (self.pipeline - 1 - stage) * self.tensor  # of this stage's ranks; the next stage's come before them
        machines = np.arange(first - self.tensor, first + self.tensor) // self.cluster.per_machine
        if (machines[: self.tensor] == machines[self.tensor :]).all():
            return self.costs.message + self.cluster.inner.seconds(self.tensor * num_bytes)
        return self.costs.message + self.cluster.link.seconds(min(self.tensor, self.cluster.per_machine) * num_bytes)

    def telling(self, num_requests: int, num_rows: npt.ArrayLike) -> Floats:
        """Seconds until the first stage knows what to compute: rank 0 sends it to each of the others.

        In a single stage rank 0 begins at once. The others are late by that, which the second sum makes up for: they
        have rank 0's part of the first one when they come to it, and are ahead by as much.
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
        """Seconds of rank 0's processor for telling the others."""
        return self.costs.message * (self.num_ranks - 1)

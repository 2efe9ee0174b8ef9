"""Choice of the drafter of a streamed target, from what each leaves of the memory and is expected to gain.

A drafter takes memory from the target's layers, so that every pass reads more; its tokens save passes. Where little
was measured, for instance before the target is loaded, assumed figures take the place of measured ones.

Example: there is memory for 10 of 20 layers, a layer is read in 0.1 s, and a copy in 4 bits takes as much as 6 layers.
Then 4 layers stay, and passes take 1.6 s, not 1. With 7 tokens a pass this is 4.4 times as fast as plain decoding.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch

from specinfer.core.config import OffloadConfig
from specinfer.core.lookups import SELF_DRAFTERS
from specinfer.model.definition import outline
from specinfer.model.folder import weight_shapes
from specinfer.model.linears import rounds_experts
from specinfer.model.offload.budget import CACHE_SHARE, GUESS_SHARE, Budget, used_bytes
from specinfer.model.offload.checkpoint import layer_number
from specinfer.model.offload.shards import Shards
from specinfer.model.offload.streamed_layer import spread
from specinfer.model.quantized_experts import can_quantize_experts
from specinfer.policy.acceptance import AcceptanceModel
from specinfer.policy.cost_model import CostModel
from specinfer.policy.curves import Curve
from specinfer.policy.rank_choice import RankChoice
from specinfer.policy.streamed_costs import Pass, StreamedCurve

BYTES_PER_WEIGHT = {"int8": 1.0625, "int4": 0.5625}  # a code, and a scale of 16 bits for each 32 of them
COPIES = ("self:int8", "self:int4")
# Measured with a model of 30 layers (SmolLM2-135M-Instruct in bfloat16), greedily, on code.
ASSUMED_ACCEPTANCE = {"self:int8": (0.94, 0.04), "self:int4": AcceptanceModel.SELF_PRIOR[:3]}
_NUM_BUFFERS = 2  # of the ring: as many layers need no place of their own if all others have one
_DISK, _MEMORY, _COMPUTING = 1e9, 2e10, 5e11  # assumed rates: bytes per second, and weights times rows per second


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """The decoder layers of a streamed target, and the memory for them and for drafters.

    Attributes:
        layer_bytes: Bytes of the largest layer.
        weights: Numbers that a copy has in fewer bits, of all layers together, if each is as large as the largest.
        spare_bytes: Bytes for layers that stay, in addition to the ring, and for drafters.
        kept_bytes: Bytes of what a copy has as the target does: experts that are not rounded.
    """

    num_layers: int
    layer_bytes: int
    weights: int
    spare_bytes: int
    kept_bytes: int = 0

    def copy_bytes(self, copy: str) -> int:
        """Return the bytes of a copy in fewer bits."""
        return int(BYTES_PER_WEIGHT[str(SELF_DRAFTERS[copy].quantization)] * self.weights) + self.kept_bytes

    def num_resident(self, taken: int) -> int | None:
        """Return how many layers stay if drafters take these bytes, or None if they do not fit."""
        left = self.spare_bytes - taken
        return None if left < 0 else len(spread(left // self.layer_bytes, self.num_layers, _NUM_BUFFERS))


@dataclass(frozen=True, slots=True)
class Candidate:
    """Drafters that may be chosen together; none at all is plain decoding.

    Attributes:
        by_rank: Probability that the first, second, ... draft token at a node is the target's.
        costs: Cost of drafting, in any cost model that has it.
        share: Share of the passes for which there are draft tokens.
        is_measured: Whether these were measured.
    """

    drafters: tuple[str, ...]
    num_bytes: int = 0
    by_rank: tuple[float, ...] = (0.0,)
    costs: CostModel | None = None
    share: float = 1.0
    is_measured: bool = False


@dataclass(frozen=True, slots=True)
class OffloadChoice:
    """Speed that a candidate is expected to give to a single request, and its parts.

    Attributes:
        num_resident: Layers of the target that stay in memory, or None if the drafters do not fit.
        pass_seconds: Seconds of a pass over one token.
        num_nodes, num_levels: The tree; 0 nodes is plain decoding.
        speedup: Speed over plain decoding with all of the memory.
    """

    candidate: Candidate
    num_resident: int | None
    pass_seconds: float = 0.0
    num_nodes: int = 0
    num_levels: int = 0
    tokens_per_pass: float = 0.0
    tokens_per_second: float = 0.0
    speedup: float = 0.0

    def as_dict(self) -> dict[str, object]:
        """Return the choice in a form ready for JSON."""
        return {
            "drafters": list(self.candidate.drafters),
            "drafter_bytes": self.candidate.num_bytes,
            "acceptance_by_rank": list(self.candidate.by_rank) if self.candidate.drafters else [],
            "drafted_share": self.candidate.share,
            "is_measured": self.candidate.is_measured,
            "fits": self.num_resident is not None,
            "num_resident_layers": self.num_resident,
            "seconds_per_pass": self.pass_seconds,
            "num_nodes": self.num_nodes,
            "num_levels": self.num_levels,
            "tokens_per_pass": self.tokens_per_pass,
            "tokens_per_second": self.tokens_per_second,
            "speedup": self.speedup,
        }


def copies_of(
    memory: LayerMemory, computing: StreamedCurve, quantization: str | None, known: Sequence[str] = ()
) -> list[Candidate]:
    """Return the copies of the target in fewer bits that are none of the `known` drafters, with assumed acceptance.

    A level costs a pass over rows that are in memory, whose weights are read in proportion to their bytes.
    """
    candidates = []
    for copy in COPIES:
        if copy not in known and SELF_DRAFTERS[copy].quantization != quantization:
            num_bytes = memory.copy_bytes(copy)
            base = computing.base * num_bytes / (memory.num_layers * memory.layer_bytes)
            level = Curve((1, 512), (base + computing.row, base + 512 * computing.row))
            candidates.append(Candidate((copy,), num_bytes, ASSUMED_ACCEPTANCE[copy], CostModel(computing, level)))
    return candidates


def compare(
    memory: LayerMemory, computing: StreamedCurve, layer_seconds: float, candidates: Sequence[Candidate]
) -> tuple[OffloadChoice, ...]:
    """Return what plain decoding, which comes first, and each candidate give.

    Args:
        computing: Cost of computing rows; its reading time is not used.
        layer_seconds: Seconds in which one layer is read.
    """
    plain: OffloadChoice | None = None
    choices = []
    for candidate in (Candidate((), is_measured=True), *candidates):
        resident = memory.num_resident(candidate.num_bytes)
        if resident is None:
            choices.append(OffloadChoice(candidate, None))
            continue
        curve = computing.reading_for(layer_seconds * (memory.num_layers - resident))
        costs = CostModel(curve, Curve((1,), (1.0,)))
        if (drafting := candidate.costs) is not None:
            costs = CostModel(curve, drafting.draft_level, drafting.read_token, drafting.draft_start)
        trees = RankChoice(costs, AcceptanceModel.assumed(candidate.by_rank, candidate.share))
        rates = trees.rates(1)
        best = int(rates.argmax()) if candidate.drafters else 0
        rate, tree = float(rates[best]), trees.expected()[best]
        gain = 1.0 if plain is None else rate / plain.tokens_per_second
        choices.append(
            OffloadChoice(
                candidate, resident, float(curve(1)), int(tree.nodes), int(tree.levels), float(tree.tokens), rate, gain
            )
        )
        plain = plain or choices[0]
    return tuple(choices)


def best_of(choices: Sequence[OffloadChoice]) -> OffloadChoice:
    """Return the fastest choice."""
    return max(choices, key=lambda choice: choice.tokens_per_second)


def usual_copy(target: Path, offload: OffloadConfig, quantization: str | None, device: torch.device) -> str | None:
    """Return the copy that should draft for a target of which nothing was measured, or None for no copy.

    It is None for a target that is not streamed, or streamed without a folder for packed copies.
    """
    if offload.offload != "disk" or offload.offload_folder is None:
        return None
    memory = _estimate(target, offload, quantization, device)
    seconds = memory.num_layers * memory.layer_bytes / _MEMORY, memory.weights / _COMPUTING
    computing = StreamedCurve([Pass(rows, seconds[0] + rows * seconds[1], 0.0) for rows in (1, 128)])
    choices = compare(memory, computing, memory.layer_bytes / _DISK, copies_of(memory, computing, quantization))
    return next(iter(best_of(choices).candidate.drafters), None)


def _estimate(target: Path, offload: OffloadConfig, quantization: str | None, device: torch.device) -> LayerMemory:
    """Return the layers of a target that is not loaded, and about the memory that its budget leaves for them."""
    with Shards(target) as shards:
        sizes = {name: source.num_bytes for name, source in shards.sources.items()}
    rounded, kept, layers = layer_weights(target, device)
    by_layer: dict[int | None, int] = defaultdict(int)
    for name, size in sizes.items():
        by_layer[layer_number(name)] += size
    outside = by_layer.pop(None, 0)
    layer_bytes = max(by_layer.values())
    kept_bytes = layer_bytes * kept // (rounded + kept)
    if quantization in BYTES_PER_WEIGHT:
        layer_bytes = int(BYTES_PER_WEIGHT[quantization] * rounded) + kept_bytes
    budget = Budget(offload.budget_bytes, device)
    shares = int((CACHE_SHARE + GUESS_SHARE) * budget.own_bytes)
    spare = budget.num_bytes - shares - used_bytes(device) - outside - _NUM_BUFFERS * layer_bytes
    return LayerMemory(layers, layer_bytes, rounded * layers, spare, kept_bytes * layers)


class LayerWeights(NamedTuple):
    """The numbers of the largest decoder layer.

    Attributes:
        rounded: Those that are rounded to fewer bits.
        kept: Those of experts that are not.
        num_layers: Number of layers.
    """

    rounded: int
    kept: int
    num_layers: int


def layer_weights(target: Path, device: torch.device, quantization: str = "int8") -> LayerWeights:
    """Return the sizes of the decoder layers of a folder. What has one dimension is small, and not streamed.

    Args:
        device, quantization: What it is rounded to, and where, which decides whether experts are.
    """
    layers: dict[int, list[int]] = {}
    for name, shape in weight_shapes(target).items():
        if (number := layer_number(name)) is not None:
            is_expert = len(shape) > 2 or ".experts." in name  # each for itself, or in a stack
            layers.setdefault(number, [0, 0])[is_expert] += prod(shape)
    rounded, kept = max(layers.values(), key=sum)
    if kept and rounds_experts(quantization, device) and any(map(can_quantize_experts, outline(target).modules())):
        rounded, kept = rounded + kept, 0
    return LayerWeights(rounded, kept, len(layers))

"""Costs of a step on a GPU that is not here, from its published rates and the kernels that a step launches.

A pass takes the time of reading its weights, or of multiplying its rows where that takes longer, then that of reading
keys, values and states, and some time for each kernel. It shows what limits a step; only the time of a kernel was
measured, in layers with one row on an H200.

Example: 7 billion bfloat16 weights in 32 layers on a GPU that reads 2.85 TB/s. A pass over one row reads for 4.9 ms,
and 10 kernels a layer take 2 us each: 5.6 ms.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from specinfer.core.lookups import SelfKind
from specinfer.drafters.sparse_context import num_kept
from specinfer.model.graphs.sizes import max_rows
from specinfer.model.recurrent.states import ROWS_PER_REQUEST
from specinfer.planning.invariance_costs import InvarianceCosts, WorkDivision
from specinfer.planning.options import Accelerator
from specinfer.planning.target_shape import TargetShape
from specinfer.policy.cost_model import CostModel
from specinfer.policy.curves import Curve, Floats

_SLOT_BYTES = 2  # of a number that a recurrence stores of a token, which is in the type of the model
_SIZES = tuple(sorted({*range(1, 65), *(2**power for power in range(7, 15))}))  # rows of the curves


@dataclass(frozen=True, slots=True)
class StepDesign:
    """Kernels and bytes of a step, and the shares of the peak rates that kernels are assumed to reach.

    The default counts are those of the present code, which `tests/engine/device/test_step_programs.py` holds them to.

    Attributes:
        layer_kernels, level_kernels, draft_kernels, verify_kernels: Kernels of a layer, of a draft level and of the
            drafting apart from the passes, and of verification.
        layer_kernel_seconds: Seconds that a kernel of a layer takes in addition to its reading and computing, in a
            captured graph with dependent launches.
        kernel_seconds: The same of all other kernels, and without dependent launches.
        weight_bytes: Bytes of a weight of the target, or None for those of its dtype.
        kv_bytes: Bytes of a number in the KV cache.
        batch_invariant: Whether the target's passes have one order of sums.
    """

    layer_kernels: int = 10
    level_kernels: int = 8
    draft_kernels: int = 43
    verify_kernels: int = 43
    layer_kernel_seconds: float = 2.3e-6
    kernel_seconds: float = 3.2e-6
    weight_bytes: float | None = None
    kv_bytes: float = 2.0
    read_share: float = 0.88
    compute_share: float = 0.6
    batch_invariant: bool = False


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Costs of the steps of a target and a drafter on one device.

    Args:
        drafter: Shape of the small model, or None for lookups, which the host asks.
        context: Tokens in the KV cache of each request.
        copy: What the drafter is if it is the target itself, or a copy: it reads no prompts, and has no cache.
    """

    device: Accelerator
    target: TargetShape
    drafter: TargetShape | None
    context: int
    design: StepDesign = StepDesign()
    copy: SelfKind | None = None

    def of_batch(self, num_requests: int) -> CostModel:
        """Return the costs of a step with this many requests."""
        design = self.design
        in_order = self._invariance() if design.batch_invariant else None
        target = Curve(_SIZES, self._pass(self.target, num_requests, self.context, design.weight_bytes, in_order))
        levels = np.full(len(_SIZES), design.level_kernels * design.kernel_seconds)
        if self.drafter is not None:
            seen = num_kept(self.context) if self.copy is not None and self.copy.is_sparse else self.context
            levels += self._pass(self.drafter, num_requests, seen)
        reader = None if self.copy is not None else self.drafter
        reading = 0.0 if reader is None else 2 * weights_of(reader) / self._flops
        costs = CostModel(target, Curve(_SIZES, levels), reading, design.draft_kernels * design.kernel_seconds)
        costs.rest = design.verify_kernels * design.kernel_seconds
        costs.max_rows = max_rows(has_states=self.target.state_bytes > 0)
        return costs

    @property
    def _flops(self) -> float:
        return self.device.flops * self.design.compute_share

    def fits(self, num_requests: int) -> bool:
        """Return whether the weights, and the caches of this many requests, fit into the device's memory."""
        models = [(self.target, self.design.weight_bytes)]
        if self.drafter is not None and (self.copy is None or self.copy.quantization is not None):
            models.append((self.drafter, None))
        weights = sum(weights_of(shape) * (width or shape.bytes_per_parameter) for shape, width in models)
        stored = [shape for shape, _ in models[: 2 if self.copy is None else 1]]
        cache = sum(
            num_requests * (self._context_bytes(shape, self.context) + self._recurrent_bytes(shape)) for shape in stored
        )
        return weights + cache < self.device.memory

    def _invariance(self) -> InvarianceCosts:
        design = self.design
        soon = design.layer_kernel_seconds if self.device.has_dependent_launches else design.kernel_seconds
        rate = self.device.bandwidth * design.read_share
        order = WorkDivision(layer_kernels=design.layer_kernels)
        return InvarianceCosts(self.device, self.target, rate, self._flops, (soon, design.kernel_seconds), order)

    def invariance_ratios(self, rows: Sequence[int]) -> list[float]:
        """Return the time of passes of one request with `batch_invariant` over the time without, by rows."""
        passes = [
            replace(self, design=replace(self.design, batch_invariant=one)).of_batch(1).target for one in (True, False)
        ]
        return [float(passes[0](size) / passes[1](size)) for size in rows]

    def _pass(
        self,
        shape: TargetShape,
        num_requests: int,
        context: int,
        weight_bytes: float | None = None,
        in_order: InvarianceCosts | None = None,
    ) -> Floats:
        """Return the seconds of passes over `_SIZES` rows, [sizes].

        Args:
            in_order: What one order of sums costs, or None for sums in any order.
        """
        device, design = self.device, self.design
        rate = device.bandwidth * design.read_share
        reading = weights_of(shape) * (weight_bytes or shape.bytes_per_parameter) / rate
        rows = np.asarray(_SIZES, dtype=np.float64)
        computed = rows if in_order is None else in_order.padded(rows)
        computing = 2 * weights_of(shape) * computed / self._flops
        # Of recurrences a state is read and one is written; what they have stored of earlier tokens is not read.
        cache = num_requests * (self._context_bytes(shape, context) + 2 * shape.state_bytes) / rate
        if in_order is not None:
            adding = in_order.adding(rows) + in_order.attention(rows, num_requests, context, cache)
            return np.maximum(reading, computing) + adding + in_order.launches()
        each = design.layer_kernel_seconds if device.has_dependent_launches else design.kernel_seconds
        return np.maximum(reading, computing) + cache + shape.num_layers * design.layer_kernels * each

    def _context_bytes(self, shape: TargetShape, context: int) -> float:
        """Return the bytes of the keys and values of one request with this many tokens."""
        numbers_per_token = shape.num_layers * shape.kv_parameters / shape.width
        return context * numbers_per_token * self.design.kv_bytes

    def _recurrent_bytes(self, shape: TargetShape) -> float:
        """Return the bytes of the kept states of one request, and of what recurrent layers store for its tokens."""
        return ROWS_PER_REQUEST * shape.state_bytes + self.context * shape.slot_numbers * _SLOT_BYTES


def weights_of(shape: TargetShape) -> float:
    """Return the number of weights that a pass reads and multiplies each row with."""
    return shape.num_layers * shape.layer_parameters + shape.head_parameters


def designs(present: StepDesign, copy: SelfKind | None = None) -> Sequence[tuple[str, StepDesign]]:
    """Return the present step and others, each with one change, by what is changed.

    Args:
        copy: What the drafter is if it is a copy of the target, which must have other bits than that.
    """
    has_int4 = copy is not None and copy.quantization == "int4"
    found = {
        "as built": present,
        "4 kernels a layer": replace(present, layer_kernels=4),
        "FP8 keys and values": replace(present, kv_bytes=1.0),
        "int4 weights": None if has_int4 else replace(present, weight_bytes=0.56),
        "142 kernels a draft level": replace(present, level_kernels=142),
        "without dependent launches": replace(present, layer_kernel_seconds=present.kernel_seconds),
        "without captured graphs": replace(present, layer_kernel_seconds=10e-6, kernel_seconds=10e-6),
    }
    return [(name, design) for name, design in found.items() if design is not None]

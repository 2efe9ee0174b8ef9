"""Decoder layers without attention, between their linear layers: convolution, recurrence, norm and gates; see mix.h."""

import ctypes
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from specinfer.ops.cpu.recurrence import ConvolutionCall, ConvolutionFields, RecurrenceCall, RecurrenceFields


class _Recurrent(ctypes.Structure):
    _fields_ = (
        ("convolution", ConvolutionFields),
        ("recurrence", RecurrenceFields),
        ("norm", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("inputs", "factors", "steps", "num_steps", "gates", "group")),
        ("order", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("activates", "opens_first")),
    )


@dataclass(frozen=True, slots=True)
class RecurrentParts:
    """A layer without attention between its linear layers; columns are those of the first one's outputs.

    Attributes:
        recurrence: Recurrence on the convolution's results, or None if these are the layer's.
        inputs, gates: Columns where the inputs of the convolution and the gates of the results begin.
        factors: Column of what the inputs are multiplied by, or None for nothing.
        steps: Column of what a recurrence stores in addition.
        norm: [width] float32 weight of the norm of the results, or None.
        group: How many of these are normed together.
        activates: Whether gates are activated by SiLU.
        opens_first: Whether gates come before the norm.
        order: [columns] int64 which of the first one's outputs each column is, or None for the same.
    """

    convolution: ConvolutionCall
    recurrence: RecurrenceCall | None
    inputs: int
    gates: int
    factors: int | None = None
    steps: int = 0
    norm: Tensor | None = None
    group: int = 1
    eps: float = 0.0
    activates: bool = True
    opens_first: bool = False
    order: Tensor | None = None

    @property
    def scratch_floats(self) -> int:
        """Floats of scratch memory for each token of a scan."""
        return 0 if self.recurrence is None else self.recurrence.scratch_floats


class RecurrentCall:
    """A layer without attention on one cache, for `LayerCall`. Copies of a model share this object.

    Args:
        inputs: [slots, 1, channels] inputs of the convolution by slot.
        stored: [slots, 1, width] what a recurrence stores in addition.
        pool: Kept states, see `RecurrenceCall`.
    """

    def __init__(self, parts: RecurrentParts, inputs: Tensor, stored: Tensor, pool: Tensor | None) -> None:
        self._alive = (parts, inputs, stored, pool)
        recurrence = parts.recurrence
        self._structure = _Recurrent(
            parts.convolution.fields(inputs),
            RecurrenceFields() if recurrence is None else recurrence.fields(stored, pool),
            None if parts.norm is None else parts.norm.data_ptr(),
            parts.inputs, -1 if parts.factors is None else parts.factors,
            parts.steps, 0 if recurrence is None else recurrence.num_stored, parts.gates, parts.group,
            None if parts.order is None else parts.order.data_ptr(), parts.eps, parts.activates, parts.opens_first,
        )  # fmt: skip
        self.address = ctypes.addressof(self._structure)

    def __deepcopy__(self, memo: object) -> Self:
        return self

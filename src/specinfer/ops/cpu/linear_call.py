"""Calls of linear layers on the native kernels. Activations are float32."""

import ctypes
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from enum import IntEnum
from functools import cache
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from specinfer.ops.cpu.library import call
from specinfer.ops.cpu.panels import FP8, HAVE_LEVELS, TYPES, Panels, has_dots
from specinfer.ops.quantized_weight import QuantizedWeight
from specinfer.ops.scales import WIDTH

if TYPE_CHECKING:  # adapters are packed in panels
    from specinfer.ops.cpu.low_rank import AdapterRuns

_SIZE = 1024  # inputs and outputs of measured layers, large enough to hide the cost of a call
_NUM_LAYERS = 8  # measured in turn, as in a model; a single one would stay in the nearest cache
_NUM_ROWS = 16
_ROUNDS = 8
_CLEARLY = 0.8  # the instructions of a type are used unless those of float32 are clearly faster


class Ending(IntEnum):
    """The operation on a linear layer's sums at the end of the call."""

    STORE = 0
    ADD = 1  # to the old contents of the result
    GATED = 2  # silu of each panel's first half times the second half
    GATED_GELU = 3  # the same with GELU's tanh approximation


# The ending of a gated layer, by transformers' name of the activation.
GATES = {"silu": Ending.GATED, "gelu_pytorch_tanh": Ending.GATED_GELU}


class _Linear(ctypes.Structure):
    _fields_ = (
        ("packed", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("type", ctypes.c_int32),
        ("dots", ctypes.c_int32),
        ("number", ctypes.c_int64),
        ("first", ctypes.c_int64),
        ("stride", ctypes.c_int64),
        ("next", ctypes.c_void_p),
        ("levels", ctypes.c_void_p),
        ("scaling", ctypes.c_int32),
    )


class LinearCall:
    """A linear layer, ready to be called. Copies of a model share this object.

    Args:
        dots: Whether to multiply in the weights' own type, where the CPU has instructions for that; None if they are
            the fastest.
        widens: Whether to multiply in float32, for float32 weights that are stored in a smaller type without loss.
        following: Call with the same inputs, whose outputs come after these; for weights of several types.
    """

    def __init__(
        self,
        panels: Panels,
        *,
        dots: bool | None = None,
        widens: bool = False,
        following: "LinearCall | None" = None,
    ) -> None:
        self.panels, self.widens, self.following = panels, widens, following
        self.outputs: int = panels.outputs + (0 if following is None else following.outputs)
        self.num_bytes: int = panels.num_bytes + (0 if following is None else following.num_bytes)
        if dots is None:
            # Codes of fp8 are multiplied by the instructions of bfloat16; those of integers have faster ones.
            dtype = torch.bfloat16 if panels.type == FP8 else panels.packed.dtype
            dots = not widens and (not dtype.is_floating_point or uses_dots(dtype))
        # Levels need these instructions, see `Panels.from_codes`.
        dots = panels.type in HAVE_LEVELS or (dots and not widens)
        pointers = (None if t is None else t.data_ptr() for t in (panels.packed, panels.scales, panels.bias))
        self._structure = _Linear(
            *pointers, panels.inputs, panels.outputs, panels.type, dots and has_dots(panels.type), 0
        )
        self._structure.levels = None if panels.levels is None else panels.levels.data_ptr()
        self._structure.scaling = panels.scaling
        self.address = ctypes.addressof(self._structure)
        scratch = panels.scratch_floats(dots=bool(self._structure.dots))
        self.scratch_floats: int = max(scratch, 0 if following is None else following.scratch_floats)  # for each row
        self._place(0, self.outputs)

    @classmethod
    def from_weight(cls, weight: Tensor | QuantizedWeight, bias: Tensor | None = None) -> Self:
        """Pack a weight [out, in] of numbers or codes."""
        if isinstance(weight, QuantizedWeight):
            return cls(Panels.from_codes(weight, bias))
        return cls(Panels.from_weight(weight, bias))

    def _place(self, first: int, stride: int) -> None:
        """Set the column of the first output in result rows of `stride` columns, also for calls that follow."""
        assert first % WIDTH == 0
        self._structure.first, self._structure.stride = first, stride
        if self.following is not None:
            assert self.following.panels.inputs == self.panels.inputs
            self._structure.next = self.following.address
            self.following._place(first + self.panels.outputs, stride)

    def part(self, runs: Sequence[range]) -> "LinearCall":
        """Return a call of some outputs, run by run, with the same weights in memory, see `Panels.part`."""
        assert self.following is None
        dots, following = bool(self._structure.dots), None
        for run in reversed(runs):
            following = LinearCall(self.panels.part(run), dots=dots, widens=self.widens, following=following)
        assert following is not None
        return following

    @property
    def chain(self) -> "list[LinearCall]":
        """This call and those that follow it."""
        return [self, *([] if self.following is None else self.following.chain)]

    def bind(self, packed: Tensor, scales: Tensor | None) -> None:
        """Use other weights of the same shapes from now on."""
        assert packed.shape == self.panels.packed.shape
        self.panels = replace(self.panels, packed=packed, scales=scales)
        self._structure.packed = packed.data_ptr()
        self._structure.scales = None if scales is None else scales.data_ptr()

    def __deepcopy__(self, memo: object) -> Self:
        return self

    @property
    def number(self) -> int:
        """Number of this layer in the tables of adapters."""
        return int(self._structure.number)

    @number.setter
    def number(self, number: int) -> None:
        self._structure.number = number
        if self.following is not None:
            self.following.number = number

    def rows(self, numbers: Tensor) -> Tensor:
        """Return [rows, inputs] float32, the weight's rows with the indices `numbers` [rows] int64."""
        assert self.following is None
        result = torch.empty((numbers.shape[0], self.panels.inputs))
        call("specinfer_rows", self.address, numbers.data_ptr(), result.data_ptr(), len(numbers))
        return result

    def __call__(
        self,
        x: Tensor,
        result: Tensor | None = None,
        ending: Ending = Ending.STORE,
        runs: "AdapterRuns | None" = None,
    ) -> Tensor:
        """Compute float32 [rows, outputs], or half as many if gated, from contiguous float32 `x` [rows, inputs].

        A row's result does not depend on the other rows.

        Args:
            result: Tensor that the result is written or added to, or None for a new one.
            runs: Rows with adapters.
        """
        rows = x.shape[0]
        assert x.is_contiguous()
        if result is None:
            result = torch.empty((rows, self.outputs // 2 if ending in GATES.values() else self.outputs))
        if rows:
            scratch = torch.empty(rows * self.scratch_floats)
            addresses = (self.address, x.data_ptr(), result.data_ptr(), scratch.data_ptr())
            call("specinfer_linear", *addresses, rows, ending, None if runs is None else runs.address)
        return result


@cache
def uses_dots(dtype: torch.dtype) -> bool:
    """Return whether weights are multiplied by the instructions of their own type, see `LinearCall`.

    Some processors have them, but compute faster in float32, so both are measured.
    """
    if not has_dots(TYPES[dtype]) or os.environ.get("SPECINFER_NATIVE") == "always":
        return has_dots(TYPES[dtype])
    source = torch.Generator().manual_seed(0)
    panels = [Panels.from_weight(torch.randn((_SIZE, _SIZE), generator=source).to(dtype)) for _ in range(_NUM_LAYERS)]
    ways = [[LinearCall(panel, dots=dots) for panel in panels] for dots in (True, False)]
    x = torch.ones((_NUM_ROWS, _SIZE))
    # In turns, and the least time of each, because other load only adds time.
    times = [[_seconds(layers, x) for layers in ways] for _ in range(_ROUNDS)]
    with_dots, without = map(min, zip(*times, strict=True))
    return bool(without / with_dots > _CLEARLY)


def _seconds(layers: Sequence[LinearCall], x: Tensor) -> float:
    start = time.perf_counter()
    for layer in layers:
        layer(x)
    return time.perf_counter() - start

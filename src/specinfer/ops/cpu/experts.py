"""Routed experts on the native kernels: see experts.h."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

from torch import Tensor

from specinfer.ops.cpu.linear_call import Ending, LinearCall


class Opening(IntEnum):
    """The way in which the values of an MLP's first linear layer are opened."""

    IN_PANELS = 0  # gates open them where it ends
    SILU_HALVES = 1  # each row is all gates, then all values
    GELU_HALVES = 2  # the same with GELU's tanh approximation
    SQUARES = 3  # there are no gates: those above 0 are squared
    SILU_OF_INPUTS = 4  # there are only gates: the values are inputs of the layer other than hidden states
    GELU_OF_INPUTS = 5  # the same with GELU's tanh approximation


class Scores(IntEnum):
    """The scores and weights of experts, made of the results of a router."""

    SOFTMAX = 0
    SIGMOIDS = 1
    SOFTMAX_OF_CHOSEN = 2


@dataclass(frozen=True, slots=True)
class Routing:
    """The rules by which a router chooses experts.

    Attributes:
        num_chosen: Number of experts of each token.
        normalizes: Whether the weights of a token's experts are divided by their sum.
        factor: What weights are multiplied by.
        bias: [experts] float32 what is added to scores before experts are chosen, or None.
        scales: [experts] float32 what weights are multiplied by at last, or None.
        norm: [hidden] float32 weight of the norm of hidden states that the router reads, or None if it reads what
            experts read.
        groups: Number of groups of neighbouring experts, and of those, the best ones, that a token may choose from.
    """

    scores: Scores
    num_chosen: int
    normalizes: bool = False
    factor: float = 1.0
    bias: Tensor | None = None
    groups: tuple[int, int] = (1, 1)
    scales: Tensor | None = None
    norm: Tensor | None = None


class _Experts(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("first", "second", "bias", "scales")),
        *((name, ctypes.c_int64) for name in ("count", "chosen", "groups", "chosen_groups")),
        ("factor", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("scores", "normalizes", "ending", "opening")),
    )


class ExpertsCall:
    """The experts of a layer, for `PartCall`. Copies of a model share this object.

    Args:
        linears: Of each expert the linear layer of gates and values, or of values alone, and that of its results.
        opening: What becomes of the values. IN_PANELS: `ending` opens them.
    """

    def __init__(
        self,
        linears: Sequence[tuple[LinearCall, LinearCall]],
        routing: Routing,
        opening: Opening,
        ending: Ending = Ending.STORE,
    ) -> None:
        self.calls = [call for pair in linears for call in pair]
        count = len(linears)
        assert count % routing.groups[0] == 0
        assert (opening == Opening.IN_PANELS) == (ending != Ending.STORE)
        addresses = [
            (ctypes.c_void_p * count)(*(call.address for call in calls)) for calls in zip(*linears, strict=True)
        ]
        self._alive, self.routing = addresses, routing
        self._structure = _Experts(
            *map(ctypes.addressof, addresses),
            *(None if tensor is None else tensor.data_ptr() for tensor in (routing.bias, routing.scales)),
            count, routing.num_chosen, *routing.groups, routing.factor, routing.scores, routing.normalizes,
            ending, opening,
        )  # fmt: skip
        self.address = ctypes.addressof(self._structure)
        first, second = linears[0]
        inner = second.panels.inputs
        rows = 2 * first.panels.inputs + inner + (0 if opening == Opening.IN_PANELS else first.outputs)
        scratch = max(call.scratch_floats for call in self.calls)
        self.scratch_floats = count + routing.num_chosen + rows + scratch  # for each token

    def __deepcopy__(self, memo: object) -> Self:
        return self

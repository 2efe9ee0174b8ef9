"""Parts of decoder layers on the native kernels: attention, a recurrence, an MLP or experts."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

import torch
from torch import Tensor

from specinfer.ops.cpu.attention import AttentionCall, NativePieces, norm
from specinfer.ops.cpu.experts import ExpertsCall, Opening
from specinfer.ops.cpu.library import call
from specinfer.ops.cpu.linear_call import Ending, LinearCall
from specinfer.ops.cpu.low_rank import AdapterRuns
from specinfer.ops.cpu.recurrent_layer import RecurrentCall, RecurrentParts

AllReduce = Callable[[Tensor], Tensor]  # sums a tensor over all ranks
NormOverRanks = Callable[[Tensor, AllReduce], None]  # changes [tokens, columns] outputs of a linear layer in place
Mixer = AttentionCall | RecurrentCall | None  # what mixes the tokens of a part on one cache


class _Part(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("first", "second", "gate", "norm", "post_norm", "scales")),
        *((name, ctypes.c_void_p) for name in ("sum_norm", "router_norm")),
        *((name, ctypes.c_int64) for name in ("hidden", "column")),
        *((name, ctypes.c_float) for name in ("eps", "factor", "hidden_factor")),
        *((name, ctypes.c_int32) for name in ("between", "ending", "opening", "skips_norm", "sum")),
    )


@dataclass(frozen=True, slots=True)
class Attends:
    """Attention over a cache, between the linear layers of a part."""


@dataclass(frozen=True, slots=True)
class Opens:
    """The opening of values, between the linear layers of a part. IN_PANELS: `ending` does it.

    Attributes:
        column: Where values begin in the inputs of layers, if they are such; see `Opening`.
    """

    opening: Opening = Opening.IN_PANELS
    ending: Ending = Ending.GATED
    column: int = 0


class Sum(IntEnum):
    """The place that the results of a part are added to: hidden states, or a sum that neighbouring parts make."""

    ALONE = 0
    FIRST = 1
    LAST = 2


@dataclass(frozen=True, slots=True)
class Adds:
    """The way in which the results of a part are added.

    Attributes:
        post_norm: [hidden] float32 weight of the norm of what is added, or None.
        sum: What they are added to. LAST: the sum, normed, is then added to the hidden states.
        sum_norm: [hidden] float32 weight of the norm of the sum, for its last part.
        hidden_factor: What the hidden states are multiplied by afterwards.
    """

    post_norm: Tensor | None = None
    sum: Sum = Sum.ALONE
    sum_norm: Tensor | None = None
    hidden_factor: float = 1.0

    def __post_init__(self) -> None:
        assert self.sum == Sum.ALONE or self.post_norm is not None
        assert (self.sum == Sum.LAST) == (self.sum_norm is not None)


Between = Attends | RecurrentParts | Opens | ExpertsCall


@dataclass(frozen=True, slots=True)
class LayerPass:
    """A pass of a layer that is computed in steps.

    Attributes:
        tables: [positions, rotated] float32 cosines and sines.
        hidden: [tokens, hidden] float32, changed in place.
        sum_over_ranks: Sum over the ranks with shards of the layer.
        runs: Rows with adapters.
    """

    pieces: NativePieces
    tables: tuple[Tensor, Tensor]
    hidden: Tensor
    sum_over_ranks: AllReduce
    runs: AdapterRuns | None


class PartCall:
    """A part of a decoder layer: a norm, a linear layer, what lies between, and another, added to the hidden states.

    Copies of a model share this object.

    Attributes:
        norm_over_ranks: Function that norms the first linear layer's outputs over the heads of all ranks, or None.

    Args:
        linears: The two linear layers. Of experts the router, which is all.
        norm: [hidden] float32 weight of the norm of the hidden states, or None to read what the part before has read.
        skips_norm: Whether it reads the hidden states as they are. Experts do not.
        scales: [outputs] float32 what the outputs of the first linear layer are multiplied by, or None.
        factor: What the inputs of the second one are multiplied by.
        gate: Linear layer of one output, whose sigmoid they are multiplied by, too, or None.
        adds: The way in which its results are added to the hidden states.
    """

    def __init__(
        self,
        linears: Sequence[LinearCall],
        between: Between,
        norm: Tensor | None,
        eps: float,
        *,
        skips_norm: bool = False,
        scales: Tensor | None = None,
        factor: float = 1.0,
        gate: LinearCall | None = None,
        adds: Adds = Adds(),
    ) -> None:
        self.first, self.second = linears[0], linears[1] if len(linears) > 1 else None
        self.between, self.norm, self.eps, self.adds = between, norm, eps, adds
        self.scales, self.factor, self.gate, self.skips_norm = scales, factor, gate, skips_norm
        self.is_split = True  # whether ranks with shards of the layer add up its results
        self.norm_over_ranks: NormOverRanks | None = None
        self.experts = between if isinstance(between, ExpertsCall) else None
        assert (self.second is None) == (self.experts is not None)
        assert not skips_norm or (norm is None and self.experts is None)
        router_norm = None if self.experts is None else self.experts.routing.norm
        opens = between if isinstance(between, Opens) else Opens(Opening.IN_PANELS, Ending.STORE)
        self.ending = opens.ending if opens.opening == Opening.IN_PANELS else Ending.STORE
        self.is_opened_at_once = self.ending != Ending.STORE
        self.scan_floats = between.scratch_floats if isinstance(between, RecurrentParts) else 0  # by token of a scan
        kind = next(
            i for i, one in enumerate((Attends, RecurrentParts, Opens, ExpertsCall)) if isinstance(between, one)
        )
        self.hidden = self.first.panels.inputs if self.second is None else self.second.outputs
        addresses = (None if call is None else call.address for call in (self.first, self.second, gate))
        norms = (norm, adds.post_norm, scales, adds.sum_norm, router_norm)
        weights = (None if tensor is None else tensor.data_ptr() for tensor in norms)
        self._alive = norms
        sizes, factors = (self.hidden, opens.column), (eps, factor, adds.hidden_factor)
        numbers = (*sizes, *factors, kind, self.ending, opens.opening, skips_norm, adds.sum)
        self._structure = _Part(*addresses, *weights, *numbers)
        self.address = ctypes.addressof(self._structure)
        # For each token: what it reads, a sum, and more.
        self.scratch_floats = self.hidden * (1 if adds.sum == Sum.ALONE else 2) + self._floats()

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def _floats(self) -> int:
        if self.experts is not None:
            results = 0 if self.adds.post_norm is None else self.hidden
            return results + self.experts.scratch_floats + self.first.scratch_floats
        assert self.second is not None
        rows = self.second.panels.inputs + (0 if self.is_opened_at_once else self.first.outputs)
        return rows + max(linear.scratch_floats for linear in self.linears) + (self.gate is not None)

    @property
    def linears(self) -> list[LinearCall]:
        """Linear layers of the pass, but for the router of experts, which adapters do not change."""
        given = () if self.experts is not None else (self.first, self.second, self.gate)
        return [call for call in given if call is not None]

    @property
    def calls(self) -> list[LinearCall]:
        """All linear layers."""
        return self.linears if self.experts is None else [self.first, *self.experts.calls]

    def run_apart(self, within: LayerPass, mixer: Mixer, inputs: Tensor) -> None:
        """Compute the part in steps, between which ranks add up results; it is added to the hidden states alone.

        Args:
            inputs: Float32 [tokens, inputs] that it reads.
        """
        assert self.adds.sum == Sum.ALONE
        if self.second is None:
            self._run_experts(within, inputs)
            return
        rows = self.first(inputs, None, self.ending, within.runs)
        if self.norm_over_ranks is not None:
            self.norm_over_ranks(rows, within.sum_over_ranks)
        result = rows if self.is_opened_at_once else torch.empty(len(within.hidden), self.second.panels.inputs)
        room = torch.empty(within.pieces.num_scanned * self.scan_floats)
        places = (tensor.data_ptr() for tensor in (*within.tables, rows, result, room))
        address = None if mixer is None else mixer.address
        call("specinfer_mix", self.address, address, within.pieces.address, *places)
        if self.gate is not None:
            result *= self.gate(inputs, runs=within.runs).sigmoid()
        self._add(within, result)

    def _run_experts(self, within: LayerPass, inputs: Tensor) -> None:
        hidden, sum_over_ranks = within.hidden, self._sum_of(within)
        places = Places([self], [None], [within.tables])
        if sum_over_ranks is None:
            run_parts(places, within.pieces, hidden, None, None, inputs)
            return
        assert self.adds == Adds()
        added = torch.zeros_like(hidden)
        run_parts(places, within.pieces, added, None, None, inputs)
        hidden += sum_over_ranks(added)

    def _sum_of(self, within: LayerPass) -> AllReduce | None:
        return within.sum_over_ranks if self.is_split else None

    def _add(self, within: LayerPass, x: Tensor) -> None:
        assert self.second is not None
        hidden, runs, post_norm, sum_over_ranks = within.hidden, within.runs, self.adds.post_norm, self._sum_of(within)
        if sum_over_ranks is None and post_norm is None:
            self.second(x, hidden, Ending.ADD, runs)
        else:
            added = self.second(x, runs=runs)
            added = added if sum_over_ranks is None else sum_over_ranks(added)
            hidden += added if post_norm is None else norm(added, post_norm, self.eps)
        if self.adds.hidden_factor != 1.0:
            hidden *= self.adds.hidden_factor


class Places:
    """The addresses of parts that are computed one after the other, with those of what they read.

    Args:
        mixers: Attention or recurrence of each part on one cache, or None.
        tables: [positions, rotated] float32 cosines and sines of each.
    """

    def __init__(
        self, parts: Sequence[PartCall], mixers: Sequence[Mixer], tables: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        self.parts, self._alive = list(parts), (list(mixers), list(tables))
        addresses: list[int | None] = []
        for part, mixer, (cosines, sines) in zip(parts, mixers, tables, strict=True):
            mixed = part.experts or mixer
            addresses += (part.address, None if mixed is None else mixed.address, cosines.data_ptr(), sines.data_ptr())
        self._places = (ctypes.c_void_p * len(addresses))(*addresses)
        self.arguments = (ctypes.addressof(self._places), len(parts))


def run_parts(
    places: Places,
    pieces: NativePieces,
    hidden: Tensor,
    scratch: Tensor | None,
    runs: AdapterRuns | None,
    inputs: Tensor | None = None,
) -> None:
    """Compute parts in place on `hidden`, the first from `inputs`; see `LayerCall`."""
    if scratch is None:
        floats = len(hidden) * max(part.scratch_floats for part in places.parts)
        scratch = torch.empty(floats + pieces.num_scanned * max(part.scan_floats for part in places.parts))
    given, adapters = (None if inputs is None else inputs.data_ptr()), None if runs is None else runs.address
    call(
        "specinfer_decode_all",
        *places.arguments,
        pieces.address,
        given,
        hidden.data_ptr(),
        scratch.data_ptr(),
        adapters,
    )

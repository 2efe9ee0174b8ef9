"""A decoder layer on the native kernels: Llama's structure, with optional norms of results, or a recurrence inside."""

import ctypes
from collections.abc import Callable, Sequence
from typing import Self

import torch
from torch import Tensor

from specinfer.kernels.attention import AttentionCall, NativePieces, norm
from specinfer.kernels.library import call
from specinfer.kernels.linear_call import Ending, LinearCall
from specinfer.kernels.low_rank import AdapterRuns
from specinfer.kernels.recurrent_layer import RecurrentCall, RecurrentParts


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("mixed", "output", "gated", "down")),
        *((name, ctypes.c_void_p) for name in ("attention_norm", "mlp_norm", "attention_post_norm", "mlp_post_norm")),
        ("hidden", ctypes.c_int64),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("gate", "recurs")),
    )


class LayerCall:
    """A layer call: norm and attention (or a recurrence), then norm and gated MLP, each added to the hidden states.

    Copies of a model share this object.

    Args:
        linears: Queries, keys and values together, or what a recurrence reads; the output of either; alternating gates
            and values; the MLP's output.
        norms: [hidden] float32 weights of the norms before attention and before the MLP.
        post_norms: [hidden] float32 weights of the norms of the results of attention and MLP, or None if there are
            none.
        gate: One of `GATES`.
        recurrent: What mixes tokens in place of attention, or None.
    """

    def __init__(
        self,
        linears: tuple[LinearCall, LinearCall, LinearCall, LinearCall],
        norms: tuple[Tensor, Tensor],
        eps: float,
        *,
        post_norms: tuple[Tensor, Tensor] | None = None,
        gate: Ending = Ending.GATED,
        recurrent: RecurrentParts | None = None,
    ) -> None:
        self.linears, self.norms, self.eps = linears, norms, eps
        self.post_norms, self.gate = post_norms or (None, None), gate
        weights = (None if one is None else one.data_ptr() for one in (*norms, *self.post_norms))
        addresses, recurs = (one.address for one in linears), recurrent is not None
        self._structure = _Layer(*addresses, *weights, norms[0].shape[0], eps, gate, recurs)
        self.scan_floats = 0 if recurrent is None else recurrent.scratch_floats  # for each token of a scan
        self.address = ctypes.addressof(self._structure)
        self._max_rows = min(one.max_rows for one in linears)
        output, down = linears[1].panels, linears[3].panels
        results = norms[0].shape[0] + linears[0].outputs + output.inputs + down.inputs
        self._scratch_floats = results + max(one.scratch_floats for one in linears)  # floats for each token

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def scratch_floats(self, tokens: int) -> int | None:
        """Return the scratch floats per token of a pass over `tokens` tokens, or None if PyTorch runs some of it."""
        return self._scratch_floats if tokens <= self._max_rows else None

    def __call__(
        self,
        mixer: AttentionCall | RecurrentCall,
        pieces: NativePieces,
        cosines: Tensor,
        sines: Tensor,
        hidden: Tensor,
        scratch: Tensor | None = None,
        sum_over_ranks: Callable[[Tensor], Tensor] | None = None,
        runs: AdapterRuns | None = None,
        inputs: Tensor | None = None,
    ) -> None:
        """Compute the layer in place on contiguous float32 `hidden` [tokens, hidden].

        The other arguments are those of `AttentionCall.rotate`.

        Args:
            scratch: [at least tokens * `scratch_floats(tokens)`, and `scan_floats` for each token of a scan] float32
                scratch memory, which layers may share.
            sum_over_ranks: Sum over the ranks with shards of the layer, or None for a whole layer.
            runs: Rows with adapters.
            inputs: Contiguous float32 [tokens, inputs of the first linear layer] that it reads in place of the norm of
                the hidden states, or None. May be `hidden`.
        """
        tokens = hidden.shape[0]
        assert inputs is None or inputs.is_contiguous()
        if tokens > self._max_rows or sum_over_ranks is not None:
            self._part_by_part(mixer, pieces, cosines, sines, hidden, sum_over_ranks, runs, inputs)
            return
        floats = tokens * self._scratch_floats + pieces.num_scanned * self.scan_floats
        scratch = torch.empty(floats) if scratch is None else scratch
        assert len(scratch) >= floats
        addresses = (self.address, mixer.address, pieces.address, cosines.data_ptr(), sines.data_ptr())
        adapters = None if runs is None else runs.address
        given = None if inputs is None else inputs.data_ptr()
        call("specinfer_decode", *addresses, given, hidden.data_ptr(), scratch.data_ptr(), adapters)

    def _part_by_part(
        self,
        mixer: AttentionCall | RecurrentCall,
        pieces: NativePieces,
        cosines: Tensor,
        sines: Tensor,
        hidden: Tensor,
        sum_over_ranks: Callable[[Tensor], Tensor] | None,
        runs: AdapterRuns | None,
        inputs: Tensor | None,
    ) -> None:
        """Compute the layer in steps, for many rows, where PyTorch does some products, and for several ranks."""
        mixed, output, gated, down = self.linears
        rows = mixed(norm(hidden, self.norms[0], self.eps) if inputs is None else inputs, runs=runs)
        result = torch.empty(len(hidden), output.panels.inputs)
        room = torch.empty(pieces.num_scanned * self.scan_floats)
        places = (tensor.data_ptr() for tensor in (cosines, sines, rows, result, room))
        call("specinfer_mix", self.address, mixer.address, pieces.address, *places)
        self._add(output, self.post_norms[0], result, hidden, sum_over_ranks, runs)
        opened = gated(norm(hidden, self.norms[1], self.eps), None, self.gate, runs)
        self._add(down, self.post_norms[1], opened, hidden, sum_over_ranks, runs)

    def _add(
        self,
        linear: LinearCall,
        post_norm: Tensor | None,
        x: Tensor,
        hidden: Tensor,
        sum_over_ranks: Callable[[Tensor], Tensor] | None,
        runs: AdapterRuns | None,
    ) -> None:
        if sum_over_ranks is None and post_norm is None:
            linear(x, hidden, Ending.ADD, runs)
            return
        added = linear(x, runs=runs)
        added = added if sum_over_ranks is None else sum_over_ranks(added)
        hidden += added if post_norm is None else norm(added, post_norm, self.eps)


class LayersCall:
    """Layers called one after the other, in one native call.

    Args:
        layers: Calls of the layers.
        mixers: Attention or recurrence of each layer on one cache.
        tables: [positions, rotated] float32 cosines and sines of each layer.

    Attributes:
        arguments: Address of the addresses of each layer's parts, and the number of layers.
    """

    def __init__(
        self,
        layers: Sequence[LayerCall],
        mixers: Sequence[AttentionCall | RecurrentCall],
        tables: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        self._alive = (list(layers), list(mixers), list(tables))
        addresses = [
            (layer.address, mixer.address, cosines.data_ptr(), sines.data_ptr())
            for layer, mixer, (cosines, sines) in zip(layers, mixers, tables, strict=True)
        ]
        self._places = (ctypes.c_void_p * (4 * len(addresses)))(*(one for four in addresses for one in four))
        self.arguments = (ctypes.addressof(self._places), len(addresses))

    @property
    def num_positions(self) -> int:
        """Positions that the tables have."""
        return min(len(cosines) for cosines, _ in self._alive[2])

    def has_tables(self, tables: Sequence[tuple[Tensor, Tensor]]) -> bool:
        """Return whether these are the tables it was made with."""
        return all(one[0] is other[0] for one, other in zip(self._alive[2], tables, strict=True))

    def __call__(self, pieces: NativePieces, hidden: Tensor, scratch: Tensor, runs: AdapterRuns | None) -> None:
        """Compute the layers in place on `hidden`; the arguments are those of `LayerCall.__call__`."""
        adapters = None if runs is None else runs.address
        call("specinfer_decode_all", *self.arguments, pieces.address, hidden.data_ptr(), scratch.data_ptr(), adapters)

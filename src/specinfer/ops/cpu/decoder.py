"""Decoder layers on the native kernels, as lists of parts (`layer_part.py`)."""

from collections.abc import Callable, Sequence
from typing import Self

from torch import Tensor

from specinfer.ops.cpu.attention import NativePieces, norm
from specinfer.ops.cpu.layer_part import LayerPass, Mixer, PartCall, Places, Sum, run_parts
from specinfer.ops.cpu.low_rank import AdapterRuns


class LayerCall:
    """A layer call: its parts one after the other. Copies of a model share this object."""

    def __init__(self, parts: Sequence[PartCall]) -> None:
        self.parts = list(parts)
        before: PartCall | None = None
        for part in parts:  # what a part reads again must be there still
            reads_anew = part.norm is not None or part.skips_norm
            assert reads_anew or (before is not None and before.adds.post_norm is None)
            assert (part.adds.sum == Sum.LAST) == (before is not None and before.adds.sum == Sum.FIRST)
            before = part
        self.linears = [linear for part in parts for linear in part.linears]
        self.calls = [call for part in parts for call in part.calls]
        self.scan_floats = max(part.scan_floats for part in parts)
        self.scratch_floats = max(part.scratch_floats for part in parts)

    def __deepcopy__(self, memo: object) -> Self:
        return self

    @property
    def has_experts(self) -> bool:
        return any(part.experts is not None for part in self.parts)

    def __call__(
        self,
        mixers: Sequence[Mixer],
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
            mixers: Attention or recurrence of each part on one cache, or None.
            scratch: [at least tokens * `scratch_floats`, and `scan_floats` for each token of a scan] float32
                scratch memory, which layers may share.
            sum_over_ranks: Sum over the ranks with shards of the layer, or None for a whole layer.
            runs: Rows with adapters.
            inputs: Contiguous float32 [tokens, inputs of the first linear layer] that it reads in place of the norm of
                the hidden states, or None. May be `hidden`.
        """
        tokens, tables = hidden.shape[0], (cosines, sines)
        assert inputs is None or inputs.is_contiguous()
        if sum_over_ranks is None:
            floats = tokens * self.scratch_floats + pieces.num_scanned * self.scan_floats
            assert scratch is None or len(scratch) >= floats
            run_parts(Places(self.parts, mixers, [tables] * len(mixers)), pieces, hidden, scratch, runs, inputs)
            return
        read, within = inputs, LayerPass(pieces, tables, hidden, sum_over_ranks, runs)
        for i, (part, mixer) in enumerate(zip(self.parts, mixers, strict=True)):
            if (part.norm is not None or part.skips_norm) and (i or inputs is None):
                read = hidden if part.norm is None else norm(hidden, part.norm, part.eps)
            assert read is not None
            part.run_apart(within, mixer, read)


class LayersCall:
    """Layers called one after the other, in one native call.

    Args:
        layers: Calls of the layers.
        mixers: Attention or recurrence of each part of each layer on one cache, or None.
        tables: [positions, rotated] float32 cosines and sines of each layer.

    Attributes:
        arguments: Address of the addresses of each part, and the number of parts.
    """

    def __init__(
        self,
        layers: Sequence[LayerCall],
        mixers: Sequence[Sequence[Mixer]],
        tables: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        self._tables = list(tables)
        each = [table for layer, table in zip(layers, tables, strict=True) for _ in layer.parts]
        self._places = Places(
            [part for layer in layers for part in layer.parts],
            [mixer for of_layer in mixers for mixer in of_layer],
            each,
        )
        self.arguments = self._places.arguments

    @property
    def num_positions(self) -> int:
        """Positions that the tables have."""
        return min(len(cosines) for cosines, _ in self._tables)

    def has_tables(self, tables: Sequence[tuple[Tensor, Tensor]]) -> bool:
        """Return whether these are the tables it was made with."""
        return all(one[0] is other[0] for one, other in zip(self._tables, tables, strict=True))

    def __call__(
        self,
        pieces: NativePieces,
        hidden: Tensor,
        scratch: Tensor,
        runs: AdapterRuns | None,
    ) -> None:
        """Compute the layers in place on `hidden`; the arguments are those of `LayerCall.__call__`."""
        run_parts(self._places, pieces, hidden, scratch, runs)

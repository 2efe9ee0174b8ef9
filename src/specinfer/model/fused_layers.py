"""Fused layers one after the other: those of a decoder in one native call, and the layers of a head."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from specinfer.model.batch import ForwardBatch, KVStore
from specinfer.model.fused_layer import Layer, taken_apart
from specinfer.model.layer_families import kind_of
from specinfer.model.packing import Packing
from specinfer.model.rotations import Rotations, Table
from specinfer.ops import LayersCall
from specinfer.ops.quantization import BITS


def call_of_layers(layers: Sequence[Layer], store: KVStore, tables: Sequence[Table]) -> LayersCall:
    """Return one call of all layers on a store, with the rotations of each."""
    mixers = [layer.mixers(store, i, table) for i, (layer, table) in enumerate(zip(layers, tables, strict=True))]
    return LayersCall([layer.call for layer in layers], mixers, tables)


def scratch_floats(layers: Sequence[Layer], tokens: int) -> int | None:
    """Return the floats per token that layers need in a pass over `tokens`, or None if PyTorch runs some of it."""
    floats = [layer.call.scratch_floats(tokens) for layer in layers]
    known = [count for count in floats if count is not None]
    return max(known) if len(known) == len(floats) else None


class FusedLayers(nn.Module):
    """The decoder layers of a head on a target's hidden states, taken apart; arguments as for `fused.FusedDecoder`."""

    def __init__(self, layers: nn.ModuleList, rotary: nn.Module, config: Any, quantization: str | None = None) -> None:
        super().__init__()
        kind, packing = kind_of(config), Packing(None if quantization is None else BITS[quantization], narrows=True)
        assert kind is not None
        self.layers = [Layer(layer, kind, config, packing) for layer in taken_apart(layers)]
        self._rotations = Rotations(rotary)

    def forward(
        self, batch: ForwardBatch, hidden: Tensor, inputs: Tensor | None = None, windowed: ForwardBatch | None = None
    ) -> Tensor:
        """Run the layers on `hidden` [tokens, width] in place, and return it; both arguments are contiguous float32.

        Args:
            inputs: What the first layer's attention reads in place of the norm of `hidden`, or None.
            windowed: The batch as layers with a window see it, or None for the same.
        """
        positions = int(batch.positions.max()) + 1
        for i, layer in enumerate(self.layers):
            pieces = (batch if windowed is None or layer.window is None else windowed).native
            assert pieces is not None
            table = self._rotations.table(layer.rotation, positions)
            layer.call(
                layer.mixers(batch.store, i, table),
                pieces,
                *table,
                hidden,
                runs=batch.adapters,
                inputs=None if i else inputs,
            )
        return hidden

    def in_one_call(self, store: KVStore, positions: int) -> tuple[LayersCall, int] | None:
        """Return a call of all layers on a store for positions up to a number, and its scratch floats for each token.

        None if PyTorch runs some of it.
        """
        floats = scratch_floats(self.layers, 1)
        tables = [self._rotations.table(layer.rotation, positions) for layer in self.layers]
        return None if floats is None else (call_of_layers(self.layers, store, tables), floats)

    def read(self, batch: ForwardBatch, inputs: Tensor) -> None:
        """Store the keys and values that each layer makes of contiguous float32 `inputs` [tokens, inputs]."""
        pieces, positions = batch.native, int(batch.positions.max()) + 1
        assert pieces is not None
        for i, layer in enumerate(self.layers):
            layer.read(batch.store, i, pieces, self._rotations.table(layer.rotation, positions), inputs)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights, which are not parameters of this module."""
        return sum(call.num_bytes for layer in self.layers for call in layer.call.calls)

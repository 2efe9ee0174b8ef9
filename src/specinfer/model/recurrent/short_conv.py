"""Short causal convolutions on token trees.

The inputs of a convolution are stored by slot, as keys are. A token reads those of the last tokens on its own path. So
a node never sees another branch, and accepted paths, cached prefixes and preempted requests need nothing else.
"""

from functools import cached_property
from typing import Any

from torch import Tensor, nn

from specinfer.model.batch import ForwardBatch
from specinfer.model.recurrent.recurrence import convolve
from specinfer.model.recurrent.split import EVENLY, Block, Blocks
from specinfer.ops import tree_ops
from specinfer.ops.cpu.recurrence import ConvolutionCall
from specinfer.ops.cpu.recurrent_layer import RecurrentParts


def store_inputs(batch: ForwardBatch, layer: int, inputs: Tensor, more: Tensor | None = None) -> None:
    """Store the inputs [tokens, channels] of a convolution, and what else a layer reads of each token: [tokens, width].

    Args:
        layer: Number of the layer within the model or its stage.
    """
    more = inputs[:, :0] if more is None else more
    if batch.layout is None:
        batch.store.store(layer, batch.slots, inputs.unsqueeze(1), more.unsqueeze(1))
        return
    _store(batch, batch.store.keys[layer], inputs)
    if more.shape[1]:
        _store(batch, batch.store.values[layer], more)


def store_more(batch: ForwardBatch, layer: int, more: Tensor) -> None:
    """Store [tokens, width] what a layer reads of each token in addition to inputs that it has stored."""
    stored = batch.store.values[layer]
    if batch.layout is None:
        stored[batch.slots, 0] = more.to(stored.dtype)
    else:
        _store(batch, stored, more)


def _store(batch: ForwardBatch, pool: Tensor, rows: Tensor) -> None:
    """Store rows but for those of padding, which have no slot; keys and values are the same here."""
    tree_ops.store(pool, pool, batch.slots, rows.unsqueeze(1), rows.unsqueeze(1))


class ShortConv(nn.Module):
    """A loaded short convolution of LFM2 with gates before and after it, on token trees."""

    counts: tuple[str, ...] = ()
    can_fuse = True

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer_idx = layer.layer_idx
        self.in_proj, self.conv, self.out_proj = layer.in_proj, layer.conv, layer.out_proj

    @property
    def blocks(self) -> Blocks:
        return {"in_proj": (Block(len(self.conv.weight)),) * 3, "conv": EVENLY, "out_proj": None}

    def forward(self, hidden_states: Tensor, forward_batch: ForwardBatch, **_: Any) -> Tensor:
        before, after, x = self.in_proj(hidden_states[0]).chunk(3, dim=-1)
        inputs = before * x
        store_inputs(forward_batch, self.layer_idx, inputs)
        paths, stored = forward_batch.paths(self.conv.kernel_size[0]), forward_batch.store.keys[self.layer_idx]
        mixed = convolve(forward_batch, stored, paths, self._call)
        out: Tensor = self.out_proj(after * mixed.to(inputs.dtype))
        return out.unsqueeze(0)

    def parts(self) -> RecurrentParts:
        """Return the layer between its linear layers, for fused layers."""
        width = len(self.conv.weight)
        return RecurrentParts(self._call, None, inputs=2 * width, gates=width, factors=0, activates=False)

    @cached_property
    def _call(self) -> ConvolutionCall:
        return ConvolutionCall(self.conv.weight, self.conv.bias, activates=False)

"""Layers that mix tokens without attention: what all kinds have in common, and their passes over the tokens of a batch.

The inputs of a convolution are stored by slot, as keys are. A token reads those of the last tokens on its own path. So
a node never sees another branch, and accepted paths, cached prefixes and preempted requests need nothing else. What a
recurrence reads of a token is stored in the same way; states are stored only after known tokens (`states`).
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from specinfer.core.errors import ModelError
from specinfer.model.batch import ForwardBatch
from specinfer.model.recurrent.scan import Scan
from specinfer.ops import layer_ops, tree_ops
from specinfer.ops.cpu.recurrence import ConvolutionCall, RecurrenceCall


class Block(NamedTuple):
    """Neighbouring outputs of a weight, or channels of a parameter: each rank has an equal part of them, or all."""

    size: int
    is_split: bool = True


# By name within a layer: the blocks of a weight's outputs, () for one of all of them, or None to split it by inputs.
Blocks = Mapping[str, tuple[Block, ...] | None]
EVENLY: tuple[Block, ...] = ()


class Adopted(nn.Module):
    """A module in place of one of transformers, whose submodules it has by the same names, but for activations."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        for name, child in layer.named_children():
            if name != "act":
                self.add_module(name, child)

    if TYPE_CHECKING:  # submodules and parameters that only some families have

        def __getattr__(self, name: str) -> Any: ...


class Mixer(Adopted):
    """A loaded layer without attention, on token trees.

    Attributes:
        layer_idx: Number of the layer within the model or its stage.
        counts: Names of its attributes that are numbers of heads or channels, of which each rank has a part.
        can_fuse: Whether it has `parts`, for native layers.
    """

    counts: tuple[str, ...] = ()
    can_fuse: bool = False

    def __init__(self, layer: Any, layer_idx: int | None = None) -> None:
        super().__init__(layer)
        self.layer_idx: int = layer.layer_idx if layer_idx is None else layer_idx

    @property
    def state_shape(self) -> tuple[int, ...] | None:
        """Shape of a state, or None if there are none."""
        return None

    @property
    def blocks(self) -> Blocks:
        """The blocks of all weights, for ranks."""
        raise NotImplementedError

    def recur(self, batch: ForwardBatch, inputs: Tensor, more: Tensor) -> Tensor:
        """Store [tokens, channels] inputs and what a recurrence reads in addition, and return what it computes.

        Returns:
            [tokens, heads, value_dim] float32.
        """
        store_inputs(batch, self.layer_idx, inputs, more)
        mixed = convolve(batch, self.layer_idx, self.calls[0])
        store = batch.store
        return _recur(batch, self.layer_idx, self.calls[1], mixed, store.values[self.layer_idx], _pool(self, batch))

    def recur_channels(self, batch: ForwardBatch, mixed: Tensor, steps: Tensor) -> Tensor:
        """Return the [tokens, width] float32 results of a recurrence whose numbers have a decay each.

        Args:
            mixed: [scanned, channels] float32 queries, keys and values.
            steps: [scanned, width] float32 steps.
        """
        call, pool = self.calls[1], _pool(self, batch)
        pool = None if pool is None else pool.view(len(pool), 1, call.sizes.key_dim, steps.shape[1])
        return _recur(batch, self.layer_idx, call, mixed, steps.unsqueeze(1), pool).squeeze(1)


def check_activation(name: str, what: str) -> None:
    """Refuse an activation other than SiLU, of layers of this kind."""
    if name != "silu":
        raise ModelError(f"model: the activation {name!r} of {what} is not supported")


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


def convolve(batch: ForwardBatch, layer: int, call: ConvolutionCall, paths: Tensor | None = None) -> Tensor:
    """Return the [tokens, channels] float32 results of a layer's convolution, rounded to the type of what is stored.

    Args:
        paths: [tokens, taps] slots of the last tokens on each token's path, itself last, or None for those of the scan.
    """
    stored = batch.store.keys[layer]
    paths = batch.scan.paths(call.num_taps) if paths is None else paths
    return call(stored, paths) if _is_native(batch) else layer_ops.convolve(stored, paths, call)


def _is_native(batch: ForwardBatch) -> bool:
    """Return whether native code computes recurrences: on a CPU, in passes without padding."""
    return batch.slots.device.type == "cpu" and isinstance(batch.scan, Scan)


def _pool(mixer: Mixer, batch: ForwardBatch) -> Tensor | None:
    return batch.store.states.pools.get(mixer.layer_idx)


def _recur(
    batch: ForwardBatch, layer: int, call: RecurrenceCall, mixed: Tensor, stored: Tensor, pool: Tensor | None
) -> Tensor:
    """Run a recurrence, and store the states that are wanted."""
    scan = batch.scan
    if _is_native(batch):
        assert isinstance(scan, Scan)
        result = call(scan.native, mixed, stored, pool)
    else:
        result = layer_ops.recur(mixed, call, scan.order, stored, pool)
    scan.wrote(layer)
    return result

"""Convolutions and recurrences over the tokens of a pass: native on CPUs, by kernels on GPUs, or in PyTorch."""

from torch import Tensor

from specinfer.model.batch import ForwardBatch
from specinfer.model.recurrent.scan import Scan
from specinfer.ops import layer_ops
from specinfer.ops.cpu.recurrence import ConvolutionCall, RecurrenceCall


def convolve(batch: ForwardBatch, stored: Tensor, paths: Tensor, call: ConvolutionCall) -> Tensor:
    """Return the [tokens, channels] float32 results of a convolution, rounded to the type of what is stored.

    Args:
        stored: [slots, 1, channels] inputs by slot.
        paths: [tokens, taps] slots of the last tokens on each token's path, itself last; -1 before the first.
    """
    return call(stored, paths) if batch.uses_native else layer_ops.convolve(stored, paths, call)


def recur(batch: ForwardBatch, layer: int, convolution: ConvolutionCall, recurrence: RecurrenceCall) -> Tensor:
    """Return the [tokens, heads, value_dim] float32 results of a layer, and keep the states that are wanted.

    Args:
        layer: Number of the layer.
    """
    store = batch.store
    mixed = convolve(batch, store.keys[layer], batch.scan.paths(convolution.num_taps), convolution)
    return _recur(batch, layer, recurrence, mixed, store.values[layer], store.states.pools.get(layer))


def recur_channels(batch: ForwardBatch, layer: int, call: RecurrenceCall, mixed: Tensor, steps: Tensor) -> Tensor:
    """Return the [tokens, width] float32 results of a recurrence whose numbers have a decay each, and keep its states.

    Args:
        layer: Number of the layer.
        mixed: [scanned, channels] float32 queries, keys and values.
        steps: [scanned, width] float32 steps.
    """
    pool = batch.store.states.pools.get(layer)
    pool = None if pool is None else pool.view(len(pool), 1, call.sizes.key_dim, steps.shape[1])
    return _recur(batch, layer, call, mixed, steps.unsqueeze(1), pool).squeeze(1)


def _recur(
    batch: ForwardBatch, layer: int, call: RecurrenceCall, mixed: Tensor, stored: Tensor, pool: Tensor | None
) -> Tensor:
    scan = batch.scan
    if batch.uses_native:
        assert isinstance(scan, Scan)
        result = call(scan.native, mixed, stored, pool)
    else:
        result = layer_ops.recur(mixed, call, scan.order, stored, pool)
    scan.wrote(layer)
    return result

"""All recurrences over the tokens of a pass: in one native call, or the same as a loop in PyTorch."""

from collections.abc import Callable

import torch
from torch import Tensor

from specinfer.kernels.recurrence import ConvolutionCall, RecurrenceCall
from specinfer.model.batch import ForwardBatch

Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def recur_natively(batch: ForwardBatch, layer: int, convolution: ConvolutionCall, recurrence: RecurrenceCall) -> Tensor:
    """Return the [tokens, heads, value_dim] float32 results of a layer, and keep the states that are wanted.

    Args:
        layer: Number of the layer.
    """
    scan, store = batch.scan, batch.store
    mixed = convolution(store.keys[layer], scan.paths(convolution.num_taps))
    pool = store.states.pools.get(layer)
    result = recurrence(scan.native, mixed, store.values[layer], pool)
    store.states.wrote(layer)
    return result


def recur_channels_natively(
    batch: ForwardBatch, layer: int, recurrence: RecurrenceCall, mixed: Tensor, steps: Tensor
) -> Tensor:
    """Return the [tokens, width] float32 results of a recurrence whose numbers have a decay each, and keep its states.

    Args:
        layer: Number of the layer.
        mixed: [scanned, channels] float32 queries, keys and values.
        steps: [scanned, width] float32 steps.
    """
    states = batch.store.states
    pool = states.pools.get(layer)
    pool = None if pool is None else pool.view(len(pool), 1, -1, steps.shape[1])
    result = recurrence(batch.scan.native, mixed, steps.unsqueeze(1), pool)
    states.wrote(layer)
    return result.squeeze(1)


def recur(batch: ForwardBatch, layer: int, state_shape: tuple[int, ...], step: Step, result: Tensor) -> None:
    """Compute a recurrence level by level, each token from its parent's state, and keep the states that are wanted.

    Args:
        layer: Number of the layer.
        step: Function of the [n] index of tokens and the [n, *state_shape] states before them, which returns the states
            after them and their results.
        result: [scanned, ...] results of all tokens of the scan, to be filled.
    """
    store = batch.store
    states = _first_states(batch, layer, state_shape)
    for number, level in enumerate(batch.scan.levels):
        states, found = step(level.tokens, states if number == 0 else states[level.sources])
        result[level.tokens] = found
        if len(level.rows):
            store.states.pools[layer][level.rows] = states[level.kept]
    store.states.wrote(layer)


def _first_states(batch: ForwardBatch, layer: int, state_shape: tuple[int, ...]) -> Tensor:
    """Return [n, *state_shape] states before the first level: kept ones, or zeros."""
    rows, pool = batch.scan.levels[0].sources, batch.store.states.pools.get(layer)
    if pool is None or not len(pool):
        return torch.zeros(len(rows), *state_shape, device=rows.device)
    return pool[rows.clamp(min=0)].masked_fill((rows < 0).view(-1, *(1 for _ in state_shape)), 0.0)

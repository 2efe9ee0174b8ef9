"""Layers without attention, and gated attention, in one native call are what their parts compute one by one."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from native_layers import paired_call
from reference.recurrences import KINDS, Kind, layer_of, numbers
from specinfer.core.tree import TokenTree
from specinfer.model.batch import ForwardBatch, Piece, pack
from specinfer.model.kv_tensors import KVTensors, LayerShape
from specinfer.ops import AttentionCall, Ending, LayerCall, LinearCall, NativePieces, Panels, norm
from specinfer.ops.cpu.recurrence import ConvolutionCall
from specinfer.ops.cpu.recurrent_layer import RecurrentCall, RecurrentParts

CPU, WIDTH, OPENED, TAPS = torch.device("cpu"), 40, 48, 3
TREE = TokenTree((8, 9, 10, 11, 9, 13), (-1, 0, 0, 1, 2, 1))
ANGLES = numbers((2, 20, 6), 8)  # more positions than tokens, and fewer numbers than a head has


def _linear(outputs: int, inputs: int, seed: int) -> LinearCall:
    return LinearCall(Panels.from_weight(numbers((outputs, inputs), seed) / 5))


def _layer(mixed: int, results: int, recurrent: RecurrentParts | None = None) -> LayerCall:
    linears = (
        _linear(mixed, WIDTH, 1),
        _linear(WIDTH, results, 2),
        _linear(2 * OPENED, WIDTH, 3),
        _linear(WIDTH, OPENED, 4),
    )
    norms = (1 + numbers((WIDTH,), 5) / 5, 1 + numbers((WIDTH,), 6) / 5)
    return paired_call(linears, norms, 1e-6, recurrent=recurrent)


def _batch(shape: LayerShape, dtype: torch.dtype) -> tuple[ForwardBatch, NativePieces]:
    store, slots = KVTensors((shape,), 30, dtype, CPU), np.arange(30)
    trees = (
        Piece.from_span([5, 6, 8], TREE, slots[:0], slots[:8]),
        Piece.from_span([7, 8], TREE, slots[:0], slots[8:15]),
    )
    batch = pack(trees, store, CPU, native=True)
    assert batch.native is not None
    return batch, batch.native


def _normed(call: LayerCall, part: int, hidden: Tensor) -> Tensor:
    weight = call.parts[part].norm
    assert weight is not None
    return norm(hidden, weight, call.parts[part].eps)


def _check(call: LayerCall, mixer: Any, pieces: NativePieces, wanted: Tensor, hidden: Tensor) -> None:
    """One call is the layer with `wanted` [tokens, results] as the result of what mixes tokens; so is part by part."""
    _, output, gated, down = call.linears
    after = output(wanted.contiguous(), hidden.clone(), Ending.ADD)
    down(gated(_normed(call, 1, after), None, Ending.GATED), after, Ending.ADD)
    for sum_over_ranks in (None, lambda added: added):
        found = hidden.clone()
        call((mixer, None), pieces, *ANGLES, found, sum_over_ranks=sum_over_ranks)
        torch.testing.assert_close(found, after, rtol=1e-5, atol=1e-5)
    assert (after - hidden).abs().mean() > 0.1


@pytest.mark.parametrize("opens_first", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind[1] != "column"], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_with_a_recurrence_is_its_parts(isa: str, kind: Kind, opens_first: bool, dtype: torch.dtype) -> None:
    recurrence = layer_of(2, 2, 16, 10, kind)
    sizes, steps = recurrence.sizes, recurrence.width
    channels, results = sizes.num_channels, sizes.num_heads * sizes.value_dim
    convolution = ConvolutionCall(numbers((channels, 1, TAPS), 3), numbers((channels,), 4), activates=True)
    weight, group = 1 + numbers((results,), 7) / 5, 2 * sizes.value_dim
    parts = RecurrentParts(
        convolution, recurrence.call, inputs=results, gates=0, steps=results + channels, norm=weight, group=group,
        eps=1e-5, opens_first=opens_first,
    )  # fmt: skip
    call = _layer(results + channels + steps, results, parts)
    batch, pieces = _batch(LayerShape(1, channels, steps), dtype)
    keys, values = batch.store.keys[0], batch.store.values[0]
    scan: Any = batch.scan
    pieces.follow(scan.native, scan.paths(TAPS))
    hidden = numbers((len(batch.slots), WIDTH), 9)
    rows = call.linears[0](_normed(call, 0, hidden))
    gates, inputs, stored = rows.split([results, channels, steps], dim=1)
    keys[batch.slots, 0], values[batch.slots, 0] = inputs.to(dtype), stored.to(dtype)
    mixed = recurrence.call(scan.native, convolution(keys, scan.paths(TAPS)), values, None).flatten(1)
    opened = mixed * functional.silu(gates) if opens_first else mixed
    normed = functional.rms_norm(opened.unflatten(1, (-1, group)), (group,), None, 1e-5).flatten(1) * weight
    wanted = normed if opens_first else normed * functional.silu(gates)
    keys.fill_(torch.nan)
    values.fill_(torch.nan)
    _check(call, RecurrentCall(parts, keys, values, None), pieces, wanted, hidden)


def test_a_layer_with_a_convolution_is_its_parts(isa: str) -> None:
    convolution = ConvolutionCall(numbers((WIDTH, 1, TAPS), 3), None, activates=False)
    parts = RecurrentParts(convolution, None, inputs=2 * WIDTH, gates=WIDTH, factors=0, activates=False)
    call = _layer(3 * WIDTH, WIDTH, parts)
    batch, pieces = _batch(LayerShape(1, WIDTH, 0), torch.float32)
    keys, scan = batch.store.keys[0], batch.scan
    pieces.follow(scan.native, scan.paths(TAPS))  # type: ignore[union-attr]
    hidden = numbers((len(batch.slots), WIDTH), 9)
    rows = call.linears[0](_normed(call, 0, hidden))
    before, after, x = rows.chunk(3, dim=1)
    keys[batch.slots, 0] = before * x
    wanted = after * convolution(keys, scan.paths(TAPS))
    keys.fill_(torch.nan)
    _check(call, RecurrentCall(parts, keys, batch.store.values[0], None), pieces, wanted, hidden)


@pytest.mark.parametrize(("heads", "dim"), [(4, 8), (2, 24)])
def test_a_layer_with_gated_attention_is_its_parts(isa: str, heads: int, dim: int) -> None:
    call = _layer((2 * heads + 4) * dim, heads * dim)
    batch, pieces = _batch(LayerShape(2, dim, dim), torch.float32)
    keys, values = batch.store.keys[0], batch.store.values[0]
    norms: dict[str, Any] = {"query_norm": 1 + numbers((dim,), 11) / 5, "key_norm": 1 + numbers((dim,), 12) / 5}
    options = norms | {"eps": 1e-6, "rotated": ANGLES.shape[2]}
    hidden = numbers((len(batch.slots), WIDTH), 9)
    rows = call.linears[0](_normed(call, 0, hidden))
    queries, rest = rows.split([2 * heads * dim, 4 * dim], dim=1)
    queries, gates = queries.unflatten(1, (heads, 2, dim)).unbind(2)
    qkv = torch.cat([queries.flatten(1), rest], dim=1)
    attention = AttentionCall(keys, values, heads, 0.3, **options)
    attention.rotate(pieces, *ANGLES, qkv)
    wanted = attention.attend(pieces, qkv) * gates.flatten(1).sigmoid()
    keys.fill_(torch.nan)
    values.fill_(torch.nan)
    gated = AttentionCall(keys, values, heads, 0.3, **options, is_gated=True)
    _check(call, gated, pieces, wanted, hidden)

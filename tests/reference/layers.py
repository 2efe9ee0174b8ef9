"""Operations of decoder layers on GPUs, in plain PyTorch: each is what the Triton kernel of its name computes.

Numbers are rounded to the type of activations, or of what is stored, where transformers rounds them.
"""

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from specinfer.ops.cpu.recurrence import ConvolutionCall, RecurrenceCall
from specinfer.ops.kv_types import NO_SCALES, KVScales, to_stored
from specinfer.ops.layer_ops import sum_parts
from specinfer.ops.quantization import dequantize
from specinfer.ops.quantized_weight import QuantizedWeight
from specinfer.ops.routes import Routes
from specinfer.ops.scan_order import ScanOrder


def add_norm(hidden: Tensor, added: Tensor | None, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    if added is not None:
        hidden += sum_parts(added, hidden.dtype)
    values = hidden.float()
    scale = torch.rsqrt(values.pow(2).mean(dim=-1, keepdim=True) + eps)
    normed = weight * (values * scale).to(hidden.dtype)
    return normed if out is None else out.copy_(normed)


def rotate_and_store(
    qkv: Tensor,
    positions: Tensor,
    rotations: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    scales: KVScales = NO_SCALES,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    qkv = sum_parts(qkv, dtype or qkv.dtype)
    kv_heads, dim = keys.shape[1:]
    heads = qkv.shape[1] // dim - 2 * kv_heads
    query, key, value = qkv.unflatten(1, (-1, dim)).split([heads, kv_heads, kv_heads], dim=1)
    if norms is not None:
        query, key = (add_norm(one, None, weight, eps) for one, weight in zip((query, key), norms, strict=True))
    turns = rotations[positions].unsqueeze(1)
    rotated = _rotated(query, turns) if out is None else out.copy_(_rotated(query, turns))
    for pool, rows, inverse in zip((keys, values), (_rotated(key, turns), value), scales.inverses, strict=True):
        _store(pool, slots, to_stored(rows, pool.dtype, inverse))
    return rotated


def _rotated(x: Tensor, turns: Tensor) -> Tensor:
    """Return x [tokens, heads, dim] rotated by turns [tokens, 1, dim]."""
    (left, right), (cosines, sines) = x.float().chunk(2, dim=-1), turns.chunk(2, dim=-1)
    return torch.cat([left * cosines - right * sines, right * cosines + left * sines], dim=-1).to(x.dtype)


def _store(pool: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Store rows; a row without a slot repeats the write of the first row with one, so that shapes stay fixed."""
    if not len(slots):
        return
    first = (slots >= 0).int().argmax()
    chosen = torch.where(slots >= 0, torch.arange(len(slots), device=slots.device), first)
    kept = slots[chosen]
    # If no row has a slot, the first is still below 0, and the old contents are written again.
    place = kept.clamp(min=0).long()
    pool[place] = torch.where((kept >= 0).view(-1, 1, 1), rows[chosen], pool[place])


def gate(gated: Tensor, out: Tensor | None = None) -> Tensor:
    gates, opened = gated.chunk(2, dim=-1)
    result = functional.silu(gates) * opened
    return result if out is None else out.copy_(result)


def few_rows_product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return functional.linear(rows, weight, bias)


def gated_product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return gate(functional.linear(rows, weight, bias))


def row_sum(x: Tensor) -> Tensor:
    return x.float().sum(1)


def routed_product(
    rows: Tensor, weight: QuantizedWeight | Tensor, routes: Routes, each: int, bias: Tensor | None = None
) -> Tensor:
    outputs = (len(weight) if isinstance(weight, Tensor) else weight.out_features) // routes.num_experts
    result = rows.new_zeros(routes.num_pairs, outputs)
    for expert, block in zip(routes.experts.tolist(), routes.pairs.view(-1, routes.size), strict=True):
        if expert < routes.num_experts:
            pairs, part = block[block < routes.num_pairs], slice(expert * outputs, (expert + 1) * outputs)
            own = weight[part] if isinstance(weight, Tensor) else weight.part(part)
            result[pairs] = product(rows[pairs // each], own, None if bias is None else bias[part])
    return result


def product(
    rows: Tensor, weight: QuantizedWeight | Tensor, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    wide = weight if isinstance(weight, Tensor) else dequantize(weight, rows.dtype)
    result = functional.linear(rows, wide, bias)
    return result if out is None else out.copy_(result)


product_of_many = product


def rounded_product(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Return [rows, out] of finite x as CPUs compute it: with whole numbers by group, the rest in float32 in order."""
    size, groups = weight.group_size, weight.scales.shape[1]
    values = functional.pad(x.float(), (0, groups * size - x.shape[1])).unflatten(1, (groups, size))
    numbers, scales, added = weight.numbers().unflatten(1, (groups, size)), weight.group_scales(), weight.group_added()
    largest = values.abs().amax(dim=2)
    largest = largest.masked_fill(largest < 2.0**-120, 0.0)
    factor = torch.where(largest == 0, 0.0, 127 / largest)
    rounded = torch.round(values * factor.unsqueeze(2)).clamp(-127, 127)
    total = torch.zeros(len(x), weight.out_features)
    for group in range(groups):
        sums, steps = (rounded[:, group].double() @ numbers[:, group].double().T).float(), largest[:, group, None] / 127
        if added is None:
            total += steps * scales[:, group] * sums
        else:
            total += steps * (scales[:, group] * sums + rounded[:, group].sum(dim=1, keepdim=True) * added[:, group])
    return (total if bias is None else total + bias.float()).to(x.dtype)


def add_low_rank(y: Tensor, x: Tensor, lora_indices: Tensor, places: Tensor, max_rank: int) -> None:
    for slot, (down, up, rank) in enumerate(places.T.tolist()):
        assert rank <= max_rank
        if rank:
            pair = _tensor_at(down, (rank, x.shape[1]), y.dtype), _tensor_at(up, (y.shape[1], rank), y.dtype)
            added = functional.linear(functional.linear(x.to(y.dtype), pair[0]), pair[1])
            y += added.where((lora_indices == slot).unsqueeze(1), 0.0)


def _tensor_at(address: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    data = (ctypes.c_char * (shape[0] * shape[1] * dtype.itemsize)).from_address(address)
    return torch.frombuffer(data, dtype=dtype).view(shape)


def convolve(inputs: Tensor, paths: Tensor, call: ConvolutionCall) -> Tensor:
    result = torch.zeros(len(paths), inputs.shape[2], device=paths.device)
    if call.bias is not None:
        result += call.bias
    for weight, slots in zip(call.weight, paths.unbind(dim=1), strict=True):
        taken = inputs[slots.clamp(min=0), 0].float()
        # Not multiplied by 0: what a slot had before may be NaN.
        result += taken.masked_fill((slots < 0).unsqueeze(-1), 0.0) * weight
    result = result.to(inputs.dtype)
    return (functional.silu(result) if call.activates else result).float()


def recur(mixed: Tensor, call: RecurrenceCall, order: ScanOrder, stored: Tensor, pool: Tensor | None) -> Tensor:
    sizes, device = call.sizes, mixed.device
    query, key, value = (
        mixed[:, start : start + heads * dim].unflatten(1, (heads, dim))
        for start, heads, dim in (
            (sizes.query, sizes.num_key_heads, sizes.key_dim),
            (sizes.key, sizes.num_key_heads, sizes.key_dim),
            (sizes.value, sizes.num_heads, sizes.value_dim),
        )
    )
    if call.is_delta:
        query, key = unit(query) * sizes.key_dim**-0.5, unit(key)
    query, key = (one.repeat_interleave(sizes.num_heads // sizes.num_key_heads, dim=1) for one in (query, key))
    share, kept = _rates(call, stored[:, 0] if call.decays == "column" else stored[order.slots, 0])
    state_shape = (sizes.num_heads, sizes.key_dim, sizes.value_dim)
    states = torch.zeros(len(order.first_rows), *state_shape, device=device)
    if pool is not None and len(pool):
        has_row = (order.first_rows >= 0).view(-1, 1, 1, 1)
        states = torch.where(has_row, pool[order.first_rows.clamp(min=0)], states)
    # The last places and results are those of tokens that have none.
    held = torch.empty(order.num_places + 1, *state_shape, device=device)
    held[order.first_places] = states
    result = torch.zeros(order.num_results + 1, *state_shape[::2], device=device)
    kept_ones: list[tuple[Tensor, Tensor]] = []
    lengths = order.ends - order.starts
    for i in range(int(lengths.max())):
        live = (lengths > i).nonzero().squeeze(1)
        of = order.starts[live] + i
        origins, rows = order.origins[of], order.rows[of]
        before = torch.where((origins >= 0).view(-1, 1, 1, 1), held[origins], states[live])
        before = before * kept(of)
        change = value[of]
        if call.is_delta:
            change = change - torch.einsum("nhkv,nhk->nhv", before, key[of])
        change = change if share is None else change * share[of].unsqueeze(-1)
        after = before + key[of].unsqueeze(-1) * change.unsqueeze(-2)
        states[live] = held[order.places[of]] = after
        result[order.results[of]] = torch.einsum("nhkv,nhk->nhv", after, query[of])
        if pool is not None:
            kept_ones.append((rows[rows >= 0], after[rows >= 0]))
    for rows, after in kept_ones:  # a row that one request reads may be written for another
        assert pool is not None
        pool[rows] = after
    if call.skip is not None:
        result[order.results] += call.skip.unsqueeze(-1) * value
    return result[:-1]


def _rates(call: RecurrenceCall, stored: Tensor) -> tuple[Tensor | None, Callable[[Tensor], Tensor]]:
    """Return [tokens, heads] the shares of the changes, and the function from tokens [n] to what they keep of states.

    Args:
        stored: [tokens, width].
    """
    least, most = call.limits
    if call.decays == "column":
        return None, lambda of: (stored[of].unsqueeze(1) * call.decay).exp().unsqueeze(1)
    assert call.bias is not None
    heads, decay = call.sizes.num_heads, call.decay.view(-1, 1)
    if call.is_delta:
        steps = (stored[:, heads:].float() + call.bias.flatten()).unflatten(1, (heads, -1))
        log_kept = functional.softplus(steps) * decay if least >= 0 else (-decay * steps).sigmoid() * least
        share = stored[:, :heads].sigmoid().float() * most
    else:
        share = functional.softplus(stored + call.bias.to(stored.dtype)).clamp(least, most).float()
        log_kept = share.unsqueeze(-1) * decay
    kept = log_kept.exp().unsqueeze(-1)
    return share, lambda of: kept[of]


def unit(vectors: Tensor) -> Tensor:
    """Return vectors of length 1, where they are not almost 0."""
    return vectors * torch.rsqrt(vectors.pow(2).sum(dim=-1, keepdim=True) + 1e-6)

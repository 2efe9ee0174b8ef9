"""Operations of decoder layers on GPUs, in plain PyTorch: the reference of the kernels of the same names.

Nothing here waits for the device or has a shape that depends on contents, so it can be captured too. Results are
rounded to the type of activations at the same places as in transformers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from specinfer.ops import float8
from specinfer.ops.kv_types import NO_SCALES, KVScales, to_stored
from specinfer.ops.quantization import dequantize
from specinfer.ops.quantized_weight import QuantizedWeight
from specinfer.ops.routes import Routes


def add_norm(hidden: Tensor, added: Tensor | None, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """Add `added` to `hidden` in place, and return the RMS norm (arXiv 1910.07467) of the sum, [tokens, width].

    Args:
        hidden: [tokens, width] residual stream, contiguous, modified in place.
        added: Tensor of the same shape and type, its parts as `few_rows_product` returns them, or None to add nothing.
        weight: [width].
        out: [tokens, width] of contiguous rows, which may be parts of longer ones, or None for a new tensor.
    """
    if added is not None:
        hidden += sum_parts(added, hidden.dtype)
    values = hidden.float()
    scale = torch.rsqrt(values.pow(2).mean(dim=-1, keepdim=True) + eps)
    normed = weight * (values * scale).to(hidden.dtype)
    return normed if out is None else out.copy_(normed)


def sum_parts(result: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [tokens, width] in a type, the sum of float32 [parts, tokens, width] where a product has parts."""
    return (result if result.dim() == 2 else result.sum(dim=0)).to(dtype)


def rotation_table(cosines: Tensor, sines: Tensor) -> Tensor:
    """Return a [positions, dim] float32 table, half cosines and half sines, from transformers' [positions, dim] tables.

    The two halves of each of transformers' tables are equal (rotary embeddings, arXiv 2104.09864, with pairs of numbers
    `dim / 2` apart).
    """
    half = cosines.shape[1] // 2
    assert torch.equal(cosines[:, :half], cosines[:, half:])
    assert torch.equal(sines[:, :half], sines[:, half:])
    return torch.cat([cosines[:, :half], sines[:, :half]], dim=1).float()


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
    """Return [tokens, heads, dim] rotated queries, and store rotated keys and values in their slots.

    Args:
        qkv: [tokens, (heads + 2 * kv_heads) * dim] queries, keys and values, contiguous, or their parts as
            `few_rows_product` returns them.
        positions: [tokens].
        rotations: [positions, dim], see `rotation_table`.
        slots: [tokens] slots for keys and values; rows with a slot below 0 are skipped.
        keys: [slots, kv_heads, dim], written to.
        values: [slots, kv_heads, dim], written to.
        norms: [dim] each, weights of the RMS norms of each head of queries and keys before rotation, or None.
        scales: What keys and values are stored as multiples of, in 8 bits.
        dtype: Type of the queries and of summed parts, or None for that of `qkv`.
    """
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
    """Return [tokens, width] silu(gates) * values (SwiGLU, arXiv 2002.05202).

    Args:
        gated: [tokens, 2 * width] gates, then values; contiguous.
    """
    gates, opened = gated.chunk(2, dim=-1)
    result = functional.silu(gates) * opened
    return result if out is None else out.copy_(result)


def few_rows_product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the product of a linear layer: [rows, outputs], or float32 [parts, rows, outputs] to be added up.

    Args:
        rows: [rows, inputs], contiguous.
        weight: [outputs, inputs] of the same type.
        bias: [outputs].
    """
    return functional.linear(rows, weight, bias)


def gated_product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return [rows, width] `gate` of the product with `weight` [2 * width, inputs]; otherwise as `few_rows_product`."""
    return gate(functional.linear(rows, weight, bias))


def product(rows: Tensor, weight: QuantizedWeight, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Return [rows, outputs] products with quantized weights, summed in float32, plus the bias, in the type of `rows`.

    Weights are widened for some outputs at a time, to limit the memory that they take.

    Args:
        rows: [rows, inputs] float32, bfloat16 or float16, contiguous.
        weight: Weights, of 4 bits packed, of 5 and 6 bits with one code in a byte.
        bias: [outputs].
    """
    outputs = weight.out_features
    result = rows.new_empty(len(rows), outputs) if out is None else out
    for part in float8.row_ranges(torch.Size((outputs, rows.shape[1]))):
        wide = dequantize(weight.part(part), rows.dtype)
        result[:, part] = functional.linear(rows, wide, None if bias is None else bias[part])
    return result


def routed_product(
    rows: Tensor, weight: QuantizedWeight, routes: Routes, each: int, bias: Tensor | None = None
) -> Tensor:
    """Return [pairs, outputs] products with the weights of each pair's expert, and zeros for pairs without one.

    Args:
        rows: [pairs / each, inputs], contiguous.
        weight: The weights of all experts, one after the other, as for `product`.
        each: Number of neighbouring pairs that a row belongs to.
        bias: [experts * outputs].
    """
    outputs = weight.out_features // routes.num_experts
    result = rows.new_zeros(routes.num_pairs, outputs)
    for expert, block in zip(routes.experts.tolist(), routes.pairs.view(-1, routes.size), strict=True):
        if expert < routes.num_experts:
            pairs, part = block[block < routes.num_pairs], slice(expert * outputs, (expert + 1) * outputs)
            result[pairs] = product(rows[pairs // each], weight.part(part), None if bias is None else bias[part])
    return result


def add_low_rank(y: Tensor, x: Tensor, lora_indices: Tensor, pairs: Sequence[tuple[Tensor, Tensor] | None]) -> None:
    """Add to `y` [rows, outputs] in place what the adapter of each row adds to a linear layer (arXiv 2106.09685).

    Args:
        x: [rows, inputs].
        lora_indices: [rows] int32 index of the row's adapter.
        pairs: Matrices [rank, inputs] and [outputs, rank] of each adapter, or None if it adds nothing.
    """
    for slot, pair in enumerate(pairs):
        if pair is not None:
            added = functional.linear(functional.linear(x.to(pair[0].dtype), pair[0]), pair[1]).to(y.dtype)
            y += added.where((lora_indices == slot).unsqueeze(1), 0.0)

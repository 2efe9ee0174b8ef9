"""What decoder layers do on GPUs, in plain PyTorch: the meaning of the kernels of the same names.

Nothing here waits for the device or has a shape that depends on contents, so that it may be captured, too. Roundings
to the type of activations are where transformers has them.
"""

import torch
from torch import Tensor
from torch.nn import functional

from specinfer.kernels import float8, quantization


def add_norm(hidden: Tensor, added: Tensor | None, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """[tokens, width] RMS norm (arXiv 1910.07467) of `hidden + added`; `hidden` becomes that sum.

    Args:
        hidden: [tokens, width] the residual stream, contiguous; written to.
        added: The same shape and type; None: nothing is added.
        weight: [width].
    """
    if added is not None:
        hidden += added
    values = hidden.float()
    scale = torch.rsqrt(values.pow(2).mean(dim=-1, keepdim=True) + eps)
    normed = weight * (values * scale).to(hidden.dtype)
    return normed if out is None else out.copy_(normed)


def rotation_table(cosines: Tensor, sines: Tensor) -> Tensor:
    """[positions, dim] float32: a half cosines, a half sines; of both [positions, dim] as transformers makes them.

    The halves of those are equal (rotary embeddings, arXiv 2104.09864, as pairs of numbers `dim / 2` apart).
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
    out: Tensor | None = None,
) -> Tensor:
    """[tokens, heads, dim] rotated queries; rotated keys, and values, go to their slots.

    Args:
        qkv: [tokens, (heads + 2 * kv_heads) * dim] queries, keys and values, contiguous.
        positions: [tokens].
        rotations: [positions, dim] see `rotation_table`.
        slots: [tokens] where keys and values go; those below 0 are skipped.
        keys: [slots, kv_heads, dim]; written to.
        values: The same shape; written to.
        norms: [dim] each, weights of the RMS norm of each head of queries and keys before they are rotated.
    """
    kv_heads, dim = keys.shape[1:]
    heads = qkv.shape[1] // dim - 2 * kv_heads
    query, key, value = qkv.unflatten(1, (-1, dim)).split([heads, kv_heads, kv_heads], dim=1)
    if norms is not None:
        query, key = (add_norm(one, None, weight, eps) for one, weight in zip((query, key), norms, strict=True))
    turns = rotations[positions].unsqueeze(1)
    rotated = _rotated(query, turns) if out is None else out.copy_(_rotated(query, turns))
    _store(keys, slots, _rotated(key, turns))
    _store(values, slots, value)
    return rotated


def _rotated(x: Tensor, turns: Tensor) -> Tensor:
    """Of x [tokens, heads, dim] and turns [tokens, 1, dim]."""
    (left, right), (cosines, sines) = x.float().chunk(2, dim=-1), turns.chunk(2, dim=-1)
    return torch.cat([left * cosines - right * sines, right * cosines + left * sines], dim=-1).to(x.dtype)


def _store(pool: Tensor, slots: Tensor, rows: Tensor) -> None:
    """A row without a slot writes what the first row with one does: shapes do not depend on how many have none."""
    if not len(slots):
        return
    first = (slots >= 0).int().argmax()
    chosen = torch.where(slots >= 0, torch.arange(len(slots), device=slots.device), first)
    kept = slots[chosen]
    # Without any slot the first is still below 0: then what is there is written again.
    place = kept.clamp(min=0).long()
    pool[place] = torch.where((kept >= 0).view(-1, 1, 1), rows[chosen].to(pool.dtype), pool[place])


def gate(gated: Tensor, out: Tensor | None = None) -> Tensor:
    """[tokens, width] silu(gates) * opened (SwiGLU, arXiv 2002.05202).

    Args:
        gated: [tokens, 2 * width] the gates, then what they open; contiguous.
    """
    gates, opened = gated.chunk(2, dim=-1)
    result = functional.silu(gates) * opened
    return result if out is None else out.copy_(result)


def product(
    rows: Tensor, codes: Tensor, scales: Tensor, kind: str, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """[rows, outputs] of the type of `rows`: products with what codes stand for, summed in float32, and the bias.

    Some outputs at a time, so that little is held of what the codes become.

    Args:
        rows: [rows, inputs] float32, bfloat16 or float16, contiguous.
        codes: [outputs, bytes] uint8 as `QuantizedLinear` and `Float8Linear` hold them.
        scales: [outputs, groups] bfloat16, or for "fp8" [outputs] float32.
        kind: "int8", "int4" or "fp8".
        bias: [outputs].
    """
    outputs, inputs = len(codes), rows.shape[1]
    result = rows.new_empty(len(rows), outputs) if out is None else out
    for part in float8.row_ranges(codes.shape):
        weight = widened(codes[part], scales[part], kind, inputs, rows.dtype)
        result[:, part] = functional.linear(rows, weight, None if bias is None else bias[part])
    return result


def widened(codes: Tensor, scales: Tensor, kind: str, inputs: int, dtype: torch.dtype) -> Tensor:
    """[outputs, inputs] the numbers that codes stand for; arguments as of `product`."""
    if kind == "fp8":
        return float8.dequantize(float8.Float8Weight(codes, scales), dtype)
    bits = quantization.BITS[kind]
    return quantization.dequantize(quantization.QuantizedWeight.of_bytes(codes, scales, bits, inputs), dtype)

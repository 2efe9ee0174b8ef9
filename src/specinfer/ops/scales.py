"""Scales of groups as panels.h stores them, panel by panel, and as `QuantizedWeight` has them."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from specinfer.ops.quantized_weight import NEST, QuantizedWeight

WIDTH = 32  # columns of a panel; like all constants here, as in types.h
BF16_SCALES, FP16_SCALES, FP16_AFFINE, NESTED, NESTED_AFFINE, FP16_ZEROS, FP32_SCALES = range(7)

_WHOLE = {torch.bfloat16: BF16_SCALES, torch.float32: FP32_SCALES}  # types of scales with nothing beside them


def pack_scales(weight: QuantizedWeight) -> tuple[int, Tensor]:
    """Return how scales are stored, and the scales of each panel as panels.h has them."""
    if weight.zeros is not None:
        scales = _in_columns(weight.scales.half()).view(torch.uint8)
        return FP16_ZEROS, torch.cat([scales, _in_columns(weight.zeros)], dim=2).flatten(1)
    both = [weight.scales] if weight.added is None else [weight.scales, weight.added]
    if weight.nest is None:
        packed = torch.stack([_in_columns(numbers) for numbers in both], dim=2)  # [panels, groups, 1 or 2, WIDTH]
        if weight.scales.dtype in _WHOLE:
            assert weight.added is None
            return _WHOLE[weight.scales.dtype], packed.squeeze(2)
        return FP16_SCALES if weight.added is None else FP16_AFFINE, packed.flatten(1).view(torch.uint8)
    nested = weight.nest.shape[1]
    # [panels, nests, 1 or 2, WIDTH]
    outer = torch.stack([_in_columns(numbers) for numbers in weight.nest.unbind(2)], dim=2)
    inner = torch.stack([_in_columns(numbers.view(torch.uint8)) for numbers in both], dim=2)
    inner = inner.unflatten(1, (nested, -1)).flatten(2)
    return (
        NESTED if weight.added is None else NESTED_AFFINE,
        torch.cat([outer.flatten(2).view(torch.uint8), inner], dim=2).flatten(1),
    )


def _in_columns(numbers: Tensor) -> Tensor:
    """Return [panels, groups, WIDTH] of [outputs, groups], filled up with zeros."""
    padded = functional.pad(numbers, (0, 0, 0, -len(numbers) % WIDTH))
    return padded.view(-1, WIDTH, padded.shape[1]).transpose(1, 2).contiguous()


def with_scales(weight: QuantizedWeight, scales: Tensor, scaling: int) -> QuantizedWeight:
    """Return codes with the scales of panels, which `pack_scales` made."""
    outputs, group = weight.out_features, weight.group_size
    if scaling == FP16_ZEROS:
        both = scales.unflatten(1, (-1, 3 * WIDTH))
        halves = both[..., : 2 * WIDTH].contiguous().view(torch.float16)
        zeros = _in_rows(both[..., 2 * WIDTH :], outputs)
        return replace(weight, scales=_in_rows(halves, outputs), zeros=zeros)
    count = 2 if scaling in (FP16_AFFINE, NESTED_AFFINE) else 1
    if scaling in (NESTED, NESTED_AFFINE):
        outer = 2 * WIDTH * count
        nests = scales.unflatten(1, (-1, outer + NEST // group * WIDTH * count))
        numbers = nests[..., outer:].unflatten(2, (-1, count, WIDTH)).flatten(1, 2)
        nest = nests[..., :outer].contiguous().view(torch.float16).unflatten(2, (count, WIDTH))
        weight = replace(weight, nest=torch.stack([_in_rows(one, outputs) for one in nest.unbind(2)], dim=2))
        numbers = numbers if count > 1 else numbers.view(torch.int8)
    else:
        dtype = next((one for one, kind in _WHOLE.items() if kind == scaling), torch.float16)
        numbers = scales.view(dtype).view(len(scales), -1, count, WIDTH)
    in_rows = [_in_rows(one, outputs) for one in numbers.unbind(2)]  # of [panels, groups, count, WIDTH]
    return replace(weight, scales=in_rows[0], added=in_rows[1] if count > 1 else None)


def _in_rows(numbers: Tensor, outputs: int) -> Tensor:
    """Return [outputs, groups] of [panels, groups, WIDTH]."""
    return numbers.transpose(1, 2).flatten(0, 1)[:outputs].contiguous()

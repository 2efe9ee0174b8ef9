"""Formats of safetensors with floating-point codes or tables: FP8, NVFP4, MXFP4, and those of bitsandbytes."""

import json
import math
from typing import Any

import torch
from torch import Tensor

from specinfer.model.quantized.format import (
    FLOATS,
    Block,
    Fields,
    Format,
    Scaling,
    Sizes,
    Sources,
    Tensors,
    matrix_shape,
    unpack,
)
from specinfer.ops.float8 import LEVELS

_FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])  # E2M1


def find_fp8(settings: Fields) -> tuple[Format, ...]:
    """Return the formats of FP8: in blocks, as DeepSeek has it, or without, by the names that scales may have then."""
    if (block := settings.get("weight_block_size")) is not None:
        rows, columns = map(int, block)
        return (_fp8("weight_scale_inv", (rows, columns)),)
    return tuple(_fp8(name, (1, 1)) for name in ("weight_scale", "weight_scale_inv"))


def _fp8(name: str, block: Block) -> Format:
    return Format(
        ("weight", name), ("input_scale", "activation_scale"), lambda sources: matrix_shape(sources["weight"]), 8,
        lambda tensors: tensors["weight"], lambda tensors: Scaling(tensors[name], block),
        levels=LEVELS, types={"weight": (torch.float8_e4m3fn,), name: (*FLOATS, torch.float8_e8m0fnu)},
        sizes=lambda sources: Sizes(sources[name].shape or (1,), block, True),
    )  # fmt: skip


def find_fp4(stored: str, weights: Fields) -> Format:
    """Return the formats of 4-bit floating-point codes, NVFP4 with scales in FP8 and MXFP4 with powers of 2."""
    size, is_nv = int(weights.get("group_size") or 0), stored == "nvfp4-pack-quantized"

    def scaling(tensors: Tensors) -> Scaling:
        scales = tensors["weight_scale"]
        if is_nv:
            return Scaling(scales.float() / tensors["weight_global_scale"].float(), (1, size))
        return Scaling(_powers(scales), (1, size))

    return Format(
        ("weight_packed", "weight_scale", *(("weight_global_scale",) if is_nv else ())), ("input_global_scale",),
        lambda sources: (sources["weight_packed"].shape[0], sources["weight_packed"].shape[1] * 2), 4,
        lambda tensors: unpack(tensors["weight_packed"], 4), scaling, levels=_FP4,
        least=16 if is_nv else 32,
        types={"weight_packed": (torch.uint8,), "weight_scale": (torch.float8_e4m3fn if is_nv else torch.uint8,)},
        sizes=lambda sources: Sizes(sources["weight_scale"].shape, (1, size), True),
    )  # fmt: skip


# An expert's matrix in gpt-oss: blocks [1, out, in / 32, 16] and exponents [1, out, in / 32].
GPT_OSS = Format(
    ("blocks", "scales"), (), lambda sources: (sources["blocks"].shape[1], sources["blocks"].shape[2] * 32), 4,
    lambda tensors: unpack(tensors["blocks"][0], 4).flatten(1),
    lambda tensors: Scaling(_powers(tensors["scales"][0]), (1, 32)), levels=_FP4,
)  # fmt: skip


def _powers(exponents: Tensor) -> Tensor:
    """Return the powers of 2 that exponents stand for, from 0 on."""
    return torch.ldexp(torch.ones(exponents.shape), exponents.int() - 127)


def _of_blocks(values: Tensor, count: int, each: int) -> Tensor:
    """Return [count] values of which each stands for this many neighbours."""
    if len(values) != -(-count // each):
        raise ValueError(f"{len(values)} scales for {count} weights, {each} each")
    return values.repeat_interleave(each)[:count]


def find_bitsandbytes(settings: Fields) -> Format | None:
    """Return the format of bitsandbytes: int8 by rows, or nf4 and fp4 in blocks, whose scales may be codes too."""
    if settings.get("load_in_8bit"):
        return Format(
            ("weight", "SCB"), ("weight_format",), lambda sources: matrix_shape(sources["weight"]), 8,
            lambda tensors: tensors["weight"].to(torch.int16) + 128,
            lambda tensors: Scaling(tensors["SCB"].float().unsqueeze(1) / 127, (1, 1)),
        )  # fmt: skip
    state = f"weight.quant_state.bitsandbytes__{settings.get('bnb_4bit_quant_type', 'fp4')}"

    def state_of(tensors: Tensors) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(bytes(tensors[state].tolist()))
        return found

    def shape(sources: Sources) -> tuple[int, int]:
        rows, columns = map(int, state_of({state: sources[state].read()})["shape"])
        if rows < 1 or columns < 1 or rows * columns != 2 * math.prod(sources["weight"].shape):
            raise ValueError(f"its shape is ({rows}, {columns}), which is not that of its codes")
        return rows, columns

    def codes(tensors: Tensors) -> Tensor:
        found = state_of(tensors)
        scales, size = tensors["weight.absmax"], int(found["blocksize"])
        if (outer := tensors.get("weight.nested_absmax")) is not None:
            outer = _of_blocks(outer, len(scales), int(found["nested_blocksize"]))
            scales = tensors["weight.nested_quant_map"][scales.long()] * outer + float(found["nested_offset"])
        places = unpack(tensors["weight"].flatten(), 4).view(-1, 2).flip(1).flatten()  # the upper bits come first
        numbers = tensors["weight.quant_map"].float()[places.long()]
        numbers *= _of_blocks(scales.float(), len(numbers), size)  # blocks go on from row to row
        return numbers.view(*map(int, found["shape"]))

    return Format(
        ("weight", "weight.absmax", "weight.quant_map", state), ("weight.nested_absmax", "weight.nested_quant_map"),
        shape, None, codes, lambda tensors: Scaling(torch.ones(1, 1), (1, 1)),
    )  # fmt: skip

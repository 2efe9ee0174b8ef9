"""Folders of quantized checkpoints, packed as each format's documentation has it, and the numbers they stand for."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tiny import save_model

_AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)  # the output that each nibble of a word belongs to
Encoded = tuple[dict[str, Tensor], Tensor]  # tensors by the ends of their names, and the weight [out, in] float32
Encoder = Callable[[Tensor], Encoded]


def _words(codes: Tensor, bits: int) -> Tensor:
    """Pack [rows, columns] codes along the columns, the first in the lowest bits."""
    per_word = 32 // bits
    words = torch.zeros(codes.shape[0], -(-codes.shape[1] // per_word), dtype=torch.int64)
    for column in range(codes.shape[1]):
        words[:, column // per_word] |= codes[:, column].long() << bits * (column % per_word)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def _codes(
    weight: Tensor, bits: int, size: int, *, symmetric: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes from 0 on [out, in], scales and zeros [out, groups]."""
    groups = weight.unflatten(1, (-1, size))
    top = (1 << bits) - 1
    if symmetric:
        scales = (groups.abs().amax(2) / (top // 2)).to(dtype)
        zeros = torch.full(scales.shape, (top + 1) // 2)
    else:
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        scales = ((high - low) / top).to(dtype)
        zeros = (-low / scales.float()).round().clamp(0, top).long()
    codes = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, top)
    return codes.flatten(1).long(), scales, zeros


def _decoded(codes: Tensor, scales: Tensor, zeros: Tensor, size: int) -> Tensor:
    return ((codes - zeros.repeat_interleave(size, 1)).float() * scales.float().repeat_interleave(size, 1)).float()


def pack_quantized(weight: Tensor, bits: int = 4, size: int = 32, *, symmetric: bool = True) -> Encoded:
    codes, scales, zeros = _codes(weight, bits, size, symmetric=symmetric, dtype=torch.bfloat16)
    tensors = {
        "weight_packed": _words(codes, bits), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape),
    }  # fmt: skip
    if not symmetric:
        tensors["weight_zero_point"] = _words(zeros.T, bits).T.contiguous()
    return tensors, _decoded(codes, scales, zeros, size)


def int_quantized(weight: Tensor) -> Encoded:
    scales = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    codes = (weight / scales.float()).round().clamp(-128, 127)
    return {"weight": codes.to(torch.int8), "weight_scale": scales}, codes * scales.float()


def int_quantized_in_groups(weight: Tensor, size: int = 32) -> Encoded:
    """Inputs of a group need not be neighbours: they were ordered by activations."""
    groups = torch.randperm(weight.shape[1]) // size
    scales = (torch.rand(len(weight), weight.shape[1] // size) + 0.5) / 100
    codes = (weight / scales[:, groups]).round().clamp(-128, 127)
    stored = {"weight": codes.to(torch.int8), "weight_scale": scales, "weight_g_idx": groups.int()}
    return stored, codes * scales[:, groups]


def float_quantized(weight: Tensor) -> Encoded:
    scale = (weight.abs().amax() / 448).reshape(1)
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def gptq(
    weight: Tensor, bits: int = 4, size: int = 32, *, added: int = 1, act_order: bool = False, symmetric: bool = True
) -> Encoded:
    order = torch.randperm(weight.shape[1]) if act_order else torch.arange(weight.shape[1])
    codes, scales, zeros = _codes(weight[:, order], bits, size, symmetric=symmetric, dtype=torch.float16)
    if added and not symmetric:
        zeros = zeros.clamp(min=1)  # as 0 would be stored as -1
    back = order.argsort()
    tensors = {
        "qweight": _words(codes[:, back], bits).T.contiguous(), "scales": scales.T.contiguous(),
        "qzeros": _words(zeros.T - added, bits), "g_idx": (back // size).int(),
    }  # fmt: skip
    return tensors, _decoded(codes, scales, zeros, size)[:, back]


def without_order(encoded: Encoded) -> Encoded:
    """Return the same without the groups of inputs, which auto-round does not write."""
    tensors, plain = encoded
    return {name: one for name, one in tensors.items() if name != "g_idx"}, plain


def awq(weight: Tensor, size: int = 32) -> Encoded:
    codes, scales, zeros = _codes(weight, 4, size, symmetric=False, dtype=torch.float16)

    def packed(values: Tensor) -> Tensor:
        return _words(values.unflatten(1, (-1, 8))[..., list(_AWQ_PLACES)].flatten(1), 4)

    tensors = {"qweight": packed(codes.T), "qzeros": packed(zeros.T), "scales": scales.T.contiguous()}
    return tensors, _decoded(codes, scales, zeros, size)


def fp8(weight: Tensor, block: int = 24, name: str = "weight_scale_inv") -> Encoded:
    rows, columns = (-(-size // block) for size in weight.shape)
    scales = torch.rand(rows, columns) + 0.5
    spread = scales.repeat_interleave(block, 0)[: len(weight)].repeat_interleave(block, 1)[:, : weight.shape[1]]
    codes = (weight / spread).to(torch.float8_e4m3fn)
    return {"weight": codes, name: scales}, codes.float() * spread


def fp8_without_blocks(weight: Tensor, name: str = "weight_scale", *, by_row: bool = False) -> Encoded:
    scales = (weight.abs().amax(1, keepdim=True) if by_row else weight.abs().amax()) / 448
    codes = (weight / scales).to(torch.float8_e4m3fn)
    return {"weight": codes, name: scales, "input_scale": torch.tensor(0.5)}, codes.float() * scales


_FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
_NF4 = torch.tensor([-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0, 0.0796, 0.1609, 0.2461, 0.3379,
                     0.4407, 0.5626, 0.7230, 1.0])  # fmt: skip


def _nearest(values: Tensor, levels: Tensor) -> Tensor:
    return (values.unsqueeze(-1) - levels).abs().argmin(-1)


def fp4(weight: Tensor, size: int, *, is_nv: bool) -> Encoded:
    groups = weight.unflatten(1, (-1, size))
    largest, whole = groups.abs().amax(2) / 6, torch.tensor([400.0])
    if is_nv:
        stored = (largest * whole).to(torch.float8_e4m3fn)
        scales = stored.float() / whole
    else:
        stored = (largest.log2().ceil() + 127).to(torch.uint8)
        scales = torch.exp2(stored.float() - 127)
    codes = _nearest(groups / scales.unsqueeze(2), _FP4).flatten(1)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    tensors = {"weight_packed": packed, "weight_scale": stored} | ({"weight_global_scale": whole} if is_nv else {})
    return tensors, _FP4[codes] * scales.repeat_interleave(size, 1)


def nf4(weight: Tensor, *, is_nested: bool) -> Encoded:
    """Blocks of 64 weights go on from row to row; nested: their scales are codes themselves."""
    blocks = weight.flatten().view(-1, 64)
    scales, more = blocks.abs().amax(1), {}
    if is_nested:
        table, offset = torch.linspace(-1, 1, 256), scales.mean()
        outer = torch.stack([part.abs().max() for part in (scales - offset).split(256)])
        spread = outer.repeat_interleave(256)[: len(scales)]
        codes = _nearest((scales - offset) / spread, table)
        scales = table[codes] * spread + offset
        more = {"weight.nested_absmax": outer, "weight.nested_quant_map": table}
    found = _nearest(blocks / scales.unsqueeze(1), _NF4)
    state = {"quant_type": "nf4", "blocksize": 64, "shape": list(weight.shape), "dtype": "float32"}
    state |= {"nested_blocksize": 256, "nested_offset": float(offset)} if is_nested else {}
    flat = found.flatten()
    tensors = {
        "weight": (flat[::2] << 4 | flat[1::2]).to(torch.uint8).unsqueeze(1), "weight.quant_map": _NF4.clone(),
        "weight.absmax": codes.to(torch.uint8) if is_nested else scales,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }  # fmt: skip
    return tensors | more, (_NF4[found] * scales.unsqueeze(1)).view(weight.shape)


def int8_of_bitsandbytes(weight: Tensor) -> Encoded:
    largest = weight.abs().amax(1)
    codes = (weight / largest.unsqueeze(1) * 127).round()
    return {"weight": codes.to(torch.int8), "SCB": largest}, codes * largest.unsqueeze(1) / 127


def _compressed(form: str, kind: str, bits: int, **weights: Any) -> dict[str, Any]:
    fields = {"num_bits": bits, "type": kind, "symmetric": True, "strategy": "group", "group_size": 32} | weights
    groups = {"group_0": {"targets": ["Linear"], "weights": fields, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
_BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
# quantization_config of each format, and its encoder.
FORMATS: dict[str, tuple[dict[str, Any], Encoder]] = {
    "pack-quantized": (_compressed("pack-quantized", "int", 4), pack_quantized),
    "pack-quantized of 8 bits": (_compressed("pack-quantized", "int", 8), lambda w: pack_quantized(w, 8)),
    "pack-quantized, asymmetric": (
        _compressed("pack-quantized", "int", 4, symmetric=False), lambda w: pack_quantized(w, symmetric=False),
    ),
    "int-quantized": (_compressed("int-quantized", "int", 8, strategy="channel"), int_quantized),
    "int-quantized, ordered by activations": (
        _compressed("int-quantized", "int", 8, actorder="group"), int_quantized_in_groups,
    ),
    "float-quantized": (_compressed("float-quantized", "float", 8, strategy="tensor"), float_quantized),
    "float-quantized in blocks": (
        _compressed("float-quantized", "float", 8, strategy="block", block_structure=[24, 24]),
        lambda w: fp8(w, name="weight_scale"),
    ),
    "pack-quantized of 2 bits": (_compressed("pack-quantized", "int", 2), lambda w: pack_quantized(w, 2)),
    "GPTQ of 2 bits": (_GPTQ | {"bits": 2}, lambda w: gptq(w, 2)),
    "GPTQ": (_GPTQ, gptq),
    "GPTQ v2 of 8 bits": (
        _GPTQ | {"bits": 8, "checkpoint_format": "gptq_v2"}, lambda w: gptq(w, 8, added=0),
    ),
    "GPTQ, ordered by activations": (_GPTQ | {"desc_act": True}, lambda w: gptq(w, act_order=True)),
    "auto-round": (
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 32,
         "sym": True, "data_type": "int"},
        lambda w: without_order(gptq(w)),
    ),
    "auto-round, asymmetric": (
        {"quant_method": "auto-round", "packing_format": "auto_round", "bits": 4, "group_size": 32, "sym": False},
        lambda w: without_order(gptq(w, added=0, symmetric=False)),
    ),
    "NVFP4": (
        _compressed("nvfp4-pack-quantized", "float", 4, strategy="tensor_group", group_size=16),
        lambda w: fp4(w, 16, is_nv=True),
    ),
    "MXFP4": (_compressed("mxfp4-pack-quantized", "float", 4), lambda w: fp4(w, 32, is_nv=False)),
    "bitsandbytes nf4": (_BNB | {"bnb_4bit_use_double_quant": False}, lambda w: nf4(w, is_nested=False)),
    "bitsandbytes nf4, nested": (_BNB | {"bnb_4bit_use_double_quant": True}, lambda w: nf4(w, is_nested=True)),
    "bitsandbytes int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, int8_of_bitsandbytes),
    "AWQ": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}, awq),
    "FP8 of 128": (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        lambda w: fp8(w, 128),
    ),
    "FP8 of tensors": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8_without_blocks),
    "FP8 of rows": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": None},
        lambda w: fp8_without_blocks(w, "weight_scale_inv", by_row=True),
    ),
    "FP8": ({"quant_method": "fp8", "weight_block_size": [24, 24], "activation_scheme": "dynamic"}, fp8),
}  # fmt: skip


def save_gpt_oss(source: Path, folder: Path) -> Path:
    """Write a copy of a gpt-oss model with experts in MXFP4; return the folder of the same numbers in bfloat16."""
    tensors, plain = {}, {}
    for key, tensor in load_file(source / "model.safetensors").items():
        if not key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[key] = plain[key] = tensor.bfloat16()
            continue
        matrices = tensor.float().mT
        stored, numbers = fp4(matrices.flatten(0, 1), 32, is_nv=False)
        tensors[f"{key}_blocks"] = stored["weight_packed"].view(*matrices.shape[:2], -1, 16)
        tensors[f"{key}_scales"] = stored["weight_scale"].view(*matrices.shape[:2], -1)
        plain[key] = numbers.view(matrices.shape).mT.bfloat16()
    method = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    return _save_both(source, folder, tensors, plain, method)


def save_quantized(source: Path, folder: Path, name: str, whole: tuple[str, ...] = ()) -> Path:
    """Write a quantized copy of a model, and return the folder of the model that its numbers are, in float32.

    Args:
        whole: Names of weights that stay as they are, in addition to those that no copy quantizes.
    """
    settings, encode = FORMATS[name]
    return save_mixed(source, folder, settings, lambda key: None if key in whole else encode)


def save_mixed(
    source: Path, folder: Path, settings: dict[str, Any], encoder_of: Callable[[str], Encoder | None]
) -> Path:
    """Write a copy of a model whose layers may be quantized in several ways, and return that of its numbers.

    Args:
        encoder_of: Function from the name of a layer's weight to its encoder, or None for one that stays as it is.
    """
    torch.manual_seed(0)
    tensors, plain = {}, {}
    for key, tensor in load_file(source / "model.safetensors").items():
        encode = encoder_of(key) if ("_proj" in key or ".experts." in key) and tensor.ndim == 2 else None
        if encode is not None:
            stored, plain[key] = encode(tensor.float())
            tensors |= {f"{key.removesuffix('.weight')}.{end}": one.contiguous() for end, one in stored.items()}
        else:
            tensors[key] = plain[key] = tensor
    return _save_both(source, folder, tensors, plain, settings)


def _save_both(
    source: Path, folder: Path, tensors: dict[str, Tensor], plain: dict[str, Tensor], settings: dict[str, Any]
) -> Path:
    fields = json.loads((source / "config.json").read_text())
    reference = folder.with_name(f"{folder.name}-plain")
    for place, found, config in (
        (folder, tensors, fields | {"quantization_config": settings}),
        (reference, plain, fields),
    ):
        place.mkdir(parents=True)
        save_file({key: one.contiguous() for key, one in found.items()}, place / "model.safetensors")
        (place / "config.json").write_text(json.dumps(config))
    return reference


def quantized_model(name: str, family: str, **sizes: int) -> Callable[[Path], Path]:
    """Return a function that saves a tiny model in this format below a folder; "MXFP4" is that of gpt-oss."""

    def make(place: Path) -> Path:
        source, folder = save_model(place / "source", family, **sizes), place / "q"
        if name == "MXFP4":
            save_gpt_oss(source, folder)
        else:
            save_quantized(source, folder, name)
        return folder

    return make

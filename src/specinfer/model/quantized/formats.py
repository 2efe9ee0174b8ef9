"""Formats of quantized safetensors, from `quantization_config` of config.json to the numbers that codes stand for.

A format names the tensors that a linear layer's weight is stored as, and decodes them, to [out, in] float32.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # places in a word of eight neighbouring outputs
_SYMMETRIC_BITS = 4
_BLOCK = 32  # the groups of inputs that our own weights of 4 bits have
Fields = Mapping[str, Any]
Tensors = Mapping[str, Tensor]
Shapes = Mapping[str, tuple[int, ...]]
Block = tuple[int, int]  # rows and columns of a weight that share a scale


@dataclass(frozen=True, slots=True)
class Format:
    """A way to store the weight of a linear layer.

    Attributes:
        names: Ends of the names of the tensors that every such layer has; the first one identifies it.
        others: Ends of the names of tensors that it may have.
        shape: Function from the shapes of a layer's tensors to [out, in], or None if a tensor has it.
        decode: Function from the tensors to the weight.
        is_symmetric: Whether a weight is a code of 4 bits around 0 times the scale of a group of 32 inputs or more.
    """

    names: tuple[str, ...]
    others: tuple[str, ...]
    shape: Callable[[Shapes], tuple[int, int]] | None
    decode: Callable[[Tensors], Tensor]
    is_symmetric: bool = False


def find_format(settings: Fields) -> Format | None:
    """Return the format of a quantization_config, or None if it is not read."""
    try:
        make = _METHODS.get(str(settings.get("quant_method")))
        return None if make is None else make(settings)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _unpack(words: Tensor, bits: int) -> Tensor:
    """Return [rows, columns * 32 / bits] codes of [rows, columns] int32 words, the lowest bits first."""
    places = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words.unsqueeze(2) >> places) & (1 << bits) - 1).flatten(1)


def _spread(scales: Tensor, dim: int, size: int, each: int) -> Tensor:
    """Return scales with one for each of `size` along a dimension: one of all, or one of `each`, the last of fewer."""
    count = scales.shape[dim]
    if count == 1:
        return scales
    if count != -(-size // each):
        raise ValueError(f"{count} scales for {size} weights, {each} each")
    return scales.repeat_interleave(each, dim=dim).narrow(dim, 0, size)


def _scaled(weight: Tensor, scales: Tensor, block: Block) -> Tensor:
    """Return a weight, changed in place, times the scale of each block, or of all where there is one scale."""
    scales = _two_dims(scales.float())
    for dim, each in enumerate(block):
        scales = _spread(scales, dim, weight.shape[dim], each)
    return weight.mul_(scales)


def _two_dims(scales: Tensor) -> Tensor:
    return scales.reshape(-1, 1) if scales.ndim < 2 else scales


def _compressed(settings: Fields) -> Format | None:
    weights = [one["weights"] for one in settings["config_groups"].values()]
    kinds = {(one["num_bits"], one["type"], _block_of(one)) for one in weights}
    if len(kinds) != 1:
        return None
    ((bits, kind, block),) = kinds
    stored = settings.get("format")
    if stored == "pack-quantized" and kind == "int" and 32 % bits == 0:
        return Format(
            ("weight_packed", "weight_scale", "weight_shape"), ("weight_zero_point", "weight_g_idx"), None,
            lambda tensors: _packed(tensors, bits, block), bits == _SYMMETRIC_BITS and all(map(_is_kept, weights)),
        )  # fmt: skip
    if stored in ("int-quantized", "float-quantized", "naive-quantized") and bits == 8:
        return Format(
            ("weight", "weight_scale"), ("weight_zero_point", "weight_g_idx", "input_scale"),
            lambda shapes: _two(shapes["weight"]), lambda tensors: _plain(tensors, block),
        )  # fmt: skip
    return None


def _block_of(weights: Fields) -> Block:
    """Return the rows and columns of a weight that share a scale, if there is more than one of each."""
    if weights["strategy"] == "block":
        rows, columns = map(int, weights["block_structure"])
        return rows, columns
    return 1, int(weights.get("group_size") or 1)


def _is_kept(weights: Fields) -> bool:
    has_groups = weights["strategy"] == "channel" or weights.get("group_size", 0) % _BLOCK == 0
    return bool(weights["symmetric"] and has_groups and weights.get("actorder") in (None, "static", "weight"))


def _packed(tensors: Tensors, bits: int, block: Block) -> Tensor:
    rows, columns = map(int, tensors["weight_shape"].tolist())
    middle = 1 << bits - 1
    codes = (_unpack(tensors["weight_packed"], bits)[:rows, :columns] - middle).float()
    zeros = tensors.get("weight_zero_point")
    if zeros is not None:  # packed along the outputs
        zeros = _unpack(zeros.T.contiguous(), bits).T[:rows] - middle
    return _affine(codes, zeros, tensors, block)


def _plain(tensors: Tensors, block: Block) -> Tensor:
    """Return codes of 8 bits times scales: one of all, of each row, of each group of inputs, or of each block."""
    return _affine(tensors["weight"].float(), tensors.get("weight_zero_point"), tensors, block)


def _affine(codes: Tensor, zeros: Tensor | None, tensors: Tensors, block: Block) -> Tensor:
    """Return codes, changed in place, minus their zeros, times their scales; `weight_g_idx` has the inputs' groups."""
    scales = tensors["weight_scale"]
    if (order := tensors.get("weight_g_idx")) is not None:
        scales, block = scales[:, order.long()], (1, 1)
        zeros = None if zeros is None else zeros[:, order.long()]
    if zeros is not None:
        codes -= _spread(_two_dims(zeros.float()), 1, codes.shape[1], block[1])
    return _scaled(codes, scales, block)


def _gptq(settings: Fields) -> Format | None:
    bits = int(settings["bits"])
    if 32 % bits or settings.get("is_marlin_format") or settings.get("checkpoint_format", "gptq") not in (
        "gptq", "gptq_v2",
    ):  # fmt: skip
        return None
    added = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1
    size = int(settings.get("group_size", 128))
    keeps = bool(settings.get("sym", True)) and (size == -1 or size % _BLOCK == 0) and not settings.get("desc_act")

    def decode(tensors: Tensors) -> Tensor:
        codes = _unpack(tensors["qweight"].T.contiguous(), bits)  # [out, in]
        zeros = (_unpack(tensors["qzeros"], bits) + added).T.float()  # [out, groups]
        scales, columns = tensors["scales"].float().T, codes.shape[1]
        order = tensors.get("g_idx")
        if order is None:
            order = torch.arange(columns) // (columns if size == -1 else size)
        return (codes.float() - zeros[:, order.long()]).mul_(scales[:, order.long()])

    return Format(
        ("qweight", "qzeros", "scales"), ("g_idx",),
        lambda shapes: (shapes["qweight"][1], shapes["qweight"][0] * 32 // bits), decode,
        keeps and bits == _SYMMETRIC_BITS,
    )  # fmt: skip


def _in_awq_order(size: int) -> Tensor:
    """Return [size] places of the codes of outputs 0, 1, ... among unpacked ones."""
    return (torch.arange(0, size, 8).unsqueeze(1) + torch.tensor(_AWQ_ORDER)).flatten()


def _awq(settings: Fields) -> Format | None:
    if int(settings["bits"]) != 4 or str(settings.get("version", "gemm")).lower() != "gemm":
        return None

    size = int(settings.get("group_size", 128))

    def in_order(words: Tensor) -> Tensor:
        return _unpack(words, 4)[:, _in_awq_order(8 * words.shape[1])]

    def decode(tensors: Tensors) -> Tensor:
        codes, zeros = in_order(tensors["qweight"]), in_order(tensors["qzeros"])  # [in, out], [groups, out]
        numbers = (codes - _spread(zeros, 0, len(codes), size)).float()
        return _scaled(numbers, tensors["scales"], (size, 1)).T.contiguous()

    return Format(
        ("qweight", "qzeros", "scales"), (), lambda shapes: (shapes["qweight"][1] * 8, shapes["qweight"][0]), decode
    )


def _fp8(settings: Fields) -> Format | None:
    rows, columns = map(int, settings["weight_block_size"])
    return Format(
        ("weight", "weight_scale_inv"), (), lambda shapes: _two(shapes["weight"]),
        lambda tensors: _scaled(tensors["weight"].float(), tensors["weight_scale_inv"], (rows, columns)),
    )  # fmt: skip


def _two(shape: tuple[int, ...]) -> tuple[int, int]:
    rows, columns = shape
    return rows, columns


_METHODS: dict[str, Callable[[Fields], Format | None]] = {
    "compressed-tensors": _compressed, "gptq": _gptq, "awq": _awq, "fp8": _fp8,
}  # fmt: skip

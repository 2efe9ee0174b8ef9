"""Formats of quantized safetensors, from `quantization_config` of config.json to the numbers that codes stand for.

A format names the tensors that a linear layer's weight is stored as, and finds codes, scales and zeros in them.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from specinfer.kernels import QuantizedWeight

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # places in a word of eight neighbouring outputs
_SYMMETRIC_BITS = 4
_FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])  # E2M1
_BLOCK = 32  # the groups of inputs that our own weights of 4 bits have
Fields = Mapping[str, Any]
Tensors = Mapping[str, Tensor]
Sources = Mapping[str, Any]  # with `shape` and `read`
Block = tuple[int, int]  # rows and columns of a weight that share a scale


@dataclass(frozen=True, slots=True)
class Scaling:
    """The scales of a weight, each for a block of it.

    Attributes:
        scales: One for each block: [out / rows, in / columns], where one of a dimension is for all of it.
        zeros: Codes that stand for 0, of such a shape, or None for the code in the middle.
        groups: [in] groups of inputs with a column of scales each, if they are not neighbours, or None.
    """

    scales: Tensor
    block: Block
    zeros: Tensor | None = None
    groups: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Format:
    """A way to store the weight of a linear layer.

    Attributes:
        names: Ends of the names of the tensors that every such layer has; the first one has the codes.
        others: Ends of the names of tensors that it may have.
        shape: Function from the sources of a layer's tensors to [out, in].
        bits: Bits of integer codes from 0 on, or None for floating-point codes.
        codes: Function from the tensors to the codes [out, in].
        scaling: Function from the other tensors to the scales.
        is_symmetric: Whether a weight is a code of 4 bits around 0 times the scale of a group of 32 inputs or more.
    """

    names: tuple[str, ...]
    others: tuple[str, ...]
    shape: Callable[[Sources], tuple[int, int]]
    bits: int | None
    codes: Callable[[Tensors], Tensor]
    scaling: Callable[[Tensors], Scaling]
    is_symmetric: bool = False

    def decode(self, tensors: Tensors) -> Tensor:
        """Return the weight [out, in] float32 that tensors stand for."""
        numbers, scaling = self.codes(tensors).float(), self.scaling(tensors)
        scales, zeros, block = _two_dims(scaling.scales.float()), scaling.zeros, scaling.block
        if scaling.groups is not None:
            order, block = scaling.groups.long(), (1, 1)
            scales, zeros = scales[:, order], None if zeros is None else zeros[:, order]
        if zeros is not None:
            numbers -= _spread(_two_dims(zeros.float()), numbers.shape, block)
        elif self.bits is not None:
            numbers -= 1 << self.bits - 1
        return numbers.mul_(_spread(scales, numbers.shape, block))

    def keeps(self, tensors: Tensors, shape: tuple[int, int]) -> bool:
        """Return whether our kernels take codes with the scales in these tensors as they are.

        Args:
            shape: [out, in] of the weight.
        """
        if self.bits not in (2, 4, 8):
            return False
        scaling = self.scaling(tensors)
        size = _group_size(scaling, shape)
        in_order = torch.arange(shape[1]) // size
        return (
            (size % _BLOCK == 0 or size == shape[1])
            and (scaling.groups is None or torch.equal(scaling.groups.long(), in_order))
            and _narrowed(scaling) is not None
            and (scaling.zeros is None or int(scaling.zeros.max()) < 256)
        )

    def quantized(self, tensors: Tensors) -> QuantizedWeight:
        """Return the weight that tensors stand for, if `keeps` is true of them."""
        codes, scaling = self.codes(tensors), self.scaling(tensors)
        outputs, inputs = codes.shape
        size, bits, scales = _group_size(scaling, codes.shape), 8 if self.bits == 8 else 4, _narrowed(scaling)
        assert self.bits is not None
        assert scales is not None
        group = 64 if bits == 8 and size % 64 == 0 else _BLOCK

        def of_groups(numbers: Tensor) -> Tensor:
            numbers = _two_dims(numbers)
            rows = _places(len(numbers), outputs, scaling.block[0])
            return numbers[rows][:, _places(numbers.shape[1], inputs, size)[::group]]

        middle = 1 << bits - 1
        zeros = None if scaling.zeros is None else of_groups(scaling.zeros.to(torch.uint8))
        if zeros is None:
            codes = codes + (middle - (1 << self.bits - 1))
        codes = functional.pad(codes.to(torch.uint8), (0, -inputs % group), value=middle)
        return QuantizedWeight(codes, of_groups(scales), bits, inputs, group, zeros=zeros)


def _group_size(scaling: Scaling, shape: tuple[int, ...]) -> int:
    """Return the inputs that share a scale."""
    return shape[1] if _two_dims(scaling.scales).shape[1] == 1 else scaling.block[1]


def _narrowed(scaling: Scaling) -> Tensor | None:
    """Return the scales in a type of 2 bytes that the kernels take, or None if none has all their values."""
    scales = scaling.scales
    for dtype in (torch.float16, torch.bfloat16)[: 2 if scaling.zeros is None else 1]:
        if torch.equal(scales.to(dtype).float(), scales.float()):
            return scales.to(dtype)
    return None


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


def _places(count: int, size: int, each: int) -> Tensor:
    """Return [size] places among `count` values, each for so many neighbours, the last for fewer; or one for all."""
    if count not in (1, -(-size // each)):
        raise ValueError(f"{count} scales for {size} weights, {each} each")
    return torch.arange(size) // (size if count == 1 else each)


def _spread(values: Tensor, shape: tuple[int, ...], block: Block) -> Tensor:
    """Return values of blocks with one for each weight, or one for a dimension that has only one."""
    for dim in (0, 1):
        if values.shape[dim] > 1:
            values = values.index_select(dim, _places(values.shape[dim], shape[dim], block[dim]))
    return values


def _two_dims(scales: Tensor) -> Tensor:
    return scales.reshape(-1, 1) if scales.ndim < 2 else scales


def _compressed(settings: Fields) -> Format | None:
    weights = [one["weights"] for one in settings["config_groups"].values()]
    kinds = {(one["num_bits"], one["type"], _block_of(one)) for one in weights}
    if len(kinds) != 1:
        return None
    ((bits, kind, block),) = kinds
    stored, others = settings.get("format"), ("weight_zero_point", "weight_g_idx")
    if stored in ("nvfp4-pack-quantized", "mxfp4-pack-quantized") and (bits, kind) == (4, "float"):
        return _fp4(settings, weights[0])

    def scaling(tensors: Tensors, zeros: Tensor | None) -> Scaling:
        return Scaling(tensors["weight_scale"], block, zeros, tensors.get("weight_g_idx"))

    if stored == "pack-quantized" and kind == "int" and 32 % bits == 0:

        def zeros_of(tensors: Tensors) -> Tensor | None:  # packed along the outputs
            zeros, rows = tensors.get("weight_zero_point"), int(tensors["weight_shape"][0])
            return None if zeros is None else _unpack(zeros.T.contiguous(), bits).T[:rows]

        return Format(
            ("weight_packed", "weight_scale", "weight_shape"), others, _stored_shape, bits,
            lambda tensors: _unpacked(tensors, bits), lambda tensors: scaling(tensors, zeros_of(tensors)),
            bits == _SYMMETRIC_BITS and all(map(_is_kept, weights)),
        )  # fmt: skip
    if stored in ("int-quantized", "float-quantized", "naive-quantized") and bits == 8:
        is_int = kind == "int"

        def from_zero(codes: Tensor | None) -> Tensor | None:
            return codes if codes is None or not is_int else codes.to(torch.int16) + 128

        return Format(
            ("weight", "weight_scale"), (*others, "input_scale"), lambda sources: _two(sources["weight"]),
            8 if is_int else None, lambda tensors: _given(from_zero(tensors["weight"])),
            lambda tensors: scaling(tensors, from_zero(tensors.get("weight_zero_point"))),
        )  # fmt: skip
    return None


def _given(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def _unpacked(tensors: Tensors, bits: int) -> Tensor:
    rows, columns = map(int, tensors["weight_shape"].tolist())
    return _unpack(tensors["weight_packed"], bits)[:rows, :columns]


def _block_of(weights: Fields) -> Block:
    """Return the rows and columns of a weight that share a scale, if there is more than one of each."""
    if weights["strategy"] == "block":
        rows, columns = map(int, weights["block_structure"])
        return rows, columns
    return 1, int(weights.get("group_size") or 1)


def _is_kept(weights: Fields) -> bool:
    has_groups = weights["strategy"] == "channel" or weights.get("group_size", 0) % _BLOCK == 0
    return bool(weights["symmetric"] and has_groups and weights.get("actorder") in (None, "static", "weight"))


def _gptq(settings: Fields) -> Format | None:
    bits = int(settings["bits"])
    if 32 % bits or settings.get("is_marlin_format") or settings.get("checkpoint_format", "gptq") not in (
        "gptq", "gptq_v2",
    ):  # fmt: skip
        return None
    added = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1
    size = int(settings.get("group_size", 128))
    keeps = bool(settings.get("sym", True)) and (size == -1 or size % _BLOCK == 0) and not settings.get("desc_act")

    def scaling(tensors: Tensors) -> Scaling:
        zeros = (_unpack(tensors["qzeros"], bits) + added).T
        is_symmetric = bool((zeros == 1 << bits - 1).all())
        return Scaling(tensors["scales"].T, (1, size), None if is_symmetric else zeros, tensors.get("g_idx"))

    return Format(
        ("qweight", "qzeros", "scales"), ("g_idx",),
        lambda sources: (sources["qweight"].shape[1], sources["qweight"].shape[0] * 32 // bits), bits,
        lambda tensors: _unpack(tensors["qweight"].T.contiguous(), bits), scaling,
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

    return Format(
        ("qweight", "qzeros", "scales"), (),
        lambda sources: (sources["qweight"].shape[1] * 8, sources["qweight"].shape[0]), 4,
        lambda tensors: in_order(tensors["qweight"]).T.contiguous(),
        lambda tensors: Scaling(tensors["scales"].T, (1, size), in_order(tensors["qzeros"]).T),
    )  # fmt: skip


def _fp8(settings: Fields) -> Format | None:
    rows, columns = map(int, settings["weight_block_size"])
    return Format(
        ("weight", "weight_scale_inv"), (), lambda sources: _two(sources["weight"]), None,
        lambda tensors: tensors["weight"], lambda tensors: Scaling(tensors["weight_scale_inv"], (rows, columns)),
    )  # fmt: skip


def _two(source: Any) -> tuple[int, int]:
    rows, columns = source.shape
    return rows, columns


def _stored_shape(sources: Sources) -> tuple[int, int]:
    rows, columns = map(int, sources["weight_shape"].read().tolist())
    words = sources["weight_packed"].shape
    if not 0 < rows <= words[0] or not 0 < columns <= 32 * words[1]:
        raise ValueError(f"weight_shape is ({rows}, {columns}), more than weight_packed has")
    return rows, columns


def _fp4(settings: Fields, weights: Fields) -> Format | None:
    """Return the formats of 4-bit floating-point codes, NVFP4 with scales in FP8 and MXFP4 with powers of 2."""
    size = int(weights.get("group_size") or 0)
    is_nv = settings.get("format") == "nvfp4-pack-quantized"

    def scaling(tensors: Tensors) -> Scaling:
        scales = tensors["weight_scale"]
        if is_nv:
            return Scaling(scales.float() / tensors["weight_global_scale"].float(), (1, size))
        return Scaling(torch.ldexp(torch.ones(scales.shape), scales.int() - 127), (1, size))

    return Format(
        ("weight_packed", "weight_scale", *(("weight_global_scale",) if is_nv else ())), ("input_global_scale",),
        lambda sources: (sources["weight_packed"].shape[0], sources["weight_packed"].shape[1] * 2), None,
        lambda tensors: _FP4[_nibbles(tensors["weight_packed"], lower_first=True)], scaling,
    )  # fmt: skip


def _nibbles(data: Tensor, *, lower_first: bool) -> Tensor:
    """Return [..., bytes * 2] int64 codes of 4 bits."""
    lower, upper = data & 15, data >> 4
    return torch.stack([lower, upper] if lower_first else [upper, lower], dim=-1).flatten(-2).long()


def _of_blocks(values: Tensor, count: int, each: int) -> Tensor:
    """Return [count] values of which each is there for so many neighbours."""
    if len(values) != -(-count // each):
        raise ValueError(f"{len(values)} scales for {count} weights, {each} each")
    return values.repeat_interleave(each)[:count]


def _bitsandbytes(settings: Fields) -> Format | None:
    if settings.get("load_in_8bit"):
        return Format(
            ("weight", "SCB"), ("weight_format",), lambda sources: _two(sources["weight"]), 8,
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
        numbers = tensors["weight.quant_map"].float()[_nibbles(tensors["weight"].flatten(), lower_first=False)]
        numbers *= _of_blocks(scales.float(), len(numbers), size)  # blocks go on from row to row
        return numbers.view(*map(int, found["shape"]))

    return Format(
        ("weight", "weight.absmax", "weight.quant_map", state), ("weight.nested_absmax", "weight.nested_quant_map"),
        shape, None, codes, lambda tensors: Scaling(torch.ones(1, 1), (1, 1)),
    )  # fmt: skip


_METHODS: dict[str, Callable[[Fields], Format | None]] = {
    "compressed-tensors": _compressed, "gptq": _gptq, "awq": _awq, "fp8": _fp8, "bitsandbytes": _bitsandbytes,
}  # fmt: skip

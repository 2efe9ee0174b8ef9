"""Formats of quantized safetensors, from `quantization_config` of config.json to the numbers that codes stand for.

A format names the tensors that a linear layer's weight is stored as, and finds codes, scales and zeros in them.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from specinfer.kernels.float8 import LEVELS
from specinfer.model.quantized.floats import find_bitsandbytes, find_fp4, find_fp8
from specinfer.model.quantized.format import FLOATS, Block, Fields, Format, Scaling, Sources, Tensors, matrix_shape
from specinfer.model.quantized.settings import BITS, gptq_format, unread_field

_WORDS = {"qweight": (torch.int32,), "qzeros": (torch.int32,)}
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # places in a word of eight neighbouring outputs


def find_format(settings: Fields) -> Format | None:
    """Return the format of a quantization_config, or None if it is not read."""
    try:
        make = _METHODS.get(str(settings.get("quant_method")))
        return None if make is None or unread_field(settings) else make(settings)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _unpack(words: Tensor, bits: int) -> Tensor:
    """Return [rows, columns * 32 / bits] uint8 codes of [rows, columns] int32 words, the lowest bits first."""
    data = words.contiguous().view(torch.uint8)
    if bits == 8:
        return data
    codes = torch.empty((*data.shape, 8 // bits), dtype=torch.uint8)
    for i in range(8 // bits):
        torch.bitwise_and(data >> i * bits, (1 << bits) - 1, out=codes[..., i])
    return codes.flatten(1)


def _compressed(settings: Fields) -> Format | None:
    weights = [one["weights"] for one in settings["config_groups"].values()]
    kinds = {(one["num_bits"], one["type"], _block_of(one)) for one in weights}
    if len(kinds) != 1:
        return None
    ((bits, kind, block),) = kinds
    stored, others = settings.get("format"), ("weight_zero_point", "weight_g_idx")
    if stored in ("nvfp4-pack-quantized", "mxfp4-pack-quantized") and (bits, kind) == (4, "float"):
        return find_fp4(settings, weights[0])

    def scaling(tensors: Tensors, zeros: Tensor | None) -> Scaling:
        return Scaling(tensors["weight_scale"], block, zeros, tensors.get("weight_g_idx"))

    if stored == "pack-quantized" and kind == "int" and bits in BITS:

        def zeros_of(tensors: Tensors) -> Tensor | None:  # packed along the outputs
            zeros, rows = tensors.get("weight_zero_point"), int(tensors["weight_shape"][0])
            return None if zeros is None else _unpack(zeros.T, bits).T[:rows]

        return Format(
            ("weight_packed", "weight_scale", "weight_shape"), others, _stored_shape, bits,
            lambda tensors: _unpacked(tensors, bits), lambda tensors: scaling(tensors, zeros_of(tensors)),
            types={"weight_packed": (torch.int32,), "weight_zero_point": (torch.int32,), "weight_scale": FLOATS},
        )  # fmt: skip
    if stored in ("int-quantized", "float-quantized", "naive-quantized") and bits == 8:
        is_int = kind == "int"

        def from_zero(codes: Tensor) -> Tensor:
            return codes.to(torch.int16) + 128 if is_int else codes

        def zeros_from_zero(tensors: Tensors) -> Tensor | None:
            zeros = tensors.get("weight_zero_point")
            return None if zeros is None else from_zero(zeros)

        return Format(
            ("weight", "weight_scale"), (*others, "input_scale"), lambda sources: matrix_shape(sources["weight"]),
            8, lambda tensors: from_zero(tensors["weight"]), lambda tensors: scaling(tensors, zeros_from_zero(tensors)),
            levels=None if is_int else LEVELS,
            types={"weight": (torch.int8 if is_int else torch.float8_e4m3fn,), "weight_scale": FLOATS},
        )  # fmt: skip
    return None


def _unpacked(tensors: Tensors, bits: int) -> Tensor:
    rows, columns = map(int, tensors["weight_shape"].tolist())
    return _unpack(tensors["weight_packed"], bits)[:rows, :columns]


def _block_of(weights: Fields) -> Block:
    """Return the rows and columns of a weight that share a scale, if there is more than one of each."""
    if weights["strategy"] == "block":
        rows, columns = map(int, weights["block_structure"])
        return rows, columns
    is_group = weights["strategy"] not in ("channel", "tensor")  # whose groups are of no account
    return 1, int(weights.get("group_size") or 1) if is_group else 1


def _gptq(settings: Fields) -> Format | None:
    bits, added = int(settings["bits"]), 0 if gptq_format(settings) == "gptq_v2" else 1
    size = int(settings.get("group_size", 128))

    def scaling(tensors: Tensors) -> Scaling:
        zeros = (_unpack(tensors["qzeros"], bits).int() + added).T
        is_symmetric = bool((zeros == 1 << bits - 1).all())
        return Scaling(tensors["scales"].T, (1, size), None if is_symmetric else zeros, tensors.get("g_idx"))

    return Format(
        ("qweight", "qzeros", "scales"), ("g_idx",),
        lambda sources: (sources["qweight"].shape[1], sources["qweight"].shape[0] * 32 // bits), bits,
        lambda tensors: _unpack(tensors["qweight"].T, bits), scaling,
        types=_WORDS | {"scales": FLOATS, "g_idx": (torch.int32, torch.int64)},
    )  # fmt: skip


def _turned(words: Tensor) -> Tensor:
    """Return [out, in] uint8 codes of AWQ's [in, out / 8] words; moving words takes less time than moving codes."""
    turned = words.T.contiguous()
    codes = torch.empty((len(turned), 8, turned.shape[1]), dtype=torch.uint8)
    for i, place in enumerate(_AWQ_ORDER):
        codes[:, i] = turned >> 4 * place & 15
    return codes.flatten(0, 1)


def _awq(settings: Fields) -> Format | None:
    size = int(settings.get("group_size", 128))
    return Format(
        ("qweight", "qzeros", "scales"), (),
        lambda sources: (sources["qweight"].shape[1] * 8, sources["qweight"].shape[0]), 4,
        lambda tensors: _turned(tensors["qweight"]),
        lambda tensors: Scaling(tensors["scales"].T, (1, size), _turned(tensors["qzeros"])),
        types=_WORDS | {"scales": FLOATS},
    )  # fmt: skip


def _stored_shape(sources: Sources) -> tuple[int, int]:
    rows, columns = map(int, sources["weight_shape"].read().tolist())
    words = sources["weight_packed"].shape
    if not 0 < rows <= words[0] or not 0 < columns <= 32 * words[1]:
        raise ValueError(f"weight_shape is ({rows}, {columns}), more than weight_packed has")
    return rows, columns


_METHODS: dict[str, Callable[[Fields], Format | None]] = {
    "compressed-tensors": _compressed, "gptq": _gptq, "awq": _awq, "fp8": find_fp8, "bitsandbytes": find_bitsandbytes,
}  # fmt: skip

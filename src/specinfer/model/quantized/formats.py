"""Formats of quantized safetensors, from `quantization_config` of config.json to the numbers that codes stand for.

A format names the tensors that a linear layer's weight is stored as, and finds codes, scales and zeros in them. Of
checkpoints with other bits, groups or formats for some layers, the tensors of each layer show which one it has: rules
of names, and patterns, need not be followed.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from specinfer.model.quantized.floats import find_bitsandbytes, find_fp4, find_fp8
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
from specinfer.model.quantized.settings import BITS, adds_one, groups_of, unread_field, variants_of
from specinfer.ops.float8 import LEVELS

_WORDS = {"qweight": (torch.int32,), "qzeros": (torch.int32,)}
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # places in a word of eight neighbouring outputs


def find_formats(settings: Fields) -> tuple[Format, ...]:
    """Return the formats that layers may have by a quantization_config; none if it is not read."""
    try:
        make = _METHODS.get(str(settings.get("quant_method")))
        found = () if make is None or unread_field(settings) else make(settings)
    except (KeyError, TypeError, ValueError, AttributeError):
        return ()
    return tuple(one for one in found if one is not None) if None not in found else ()


def choose(formats: Sequence[Format], stored: Sources) -> Format | None:
    """Return the format of a layer with these tensors, or None if they are not those of just one.

    Formats by which they stand for the same numbers count as one.
    """
    if len(formats) == 1:
        return formats[0]
    fitting = [(one, shared) for one in formats if (shared := one.shared(stored)) is not None]
    kinds = {(one.kind, one.bits, one.names, shared) for one, shared in fitting}
    return fitting[0][0] if len(kinds) == 1 else None


def _compressed(settings: Fields) -> tuple[Format | None, ...]:
    return tuple(_of_group(stored, weights) for stored, weights in groups_of(settings))


def _of_group(stored: str, weights: Fields) -> Format | None:
    """Return the format of the layers of a group.

    Args:
        stored: Name of the way in which codes are stored.
        weights: What the group's weights are rounded to.
    """
    bits, kind, block = weights["num_bits"], weights["type"], _block_of(weights)
    others = ("weight_zero_point", "weight_g_idx")
    if stored in ("nvfp4-pack-quantized", "mxfp4-pack-quantized") and (bits, kind) == (4, "float"):
        return find_fp4(stored, weights)

    def scaling(tensors: Tensors, zeros: Tensor | None) -> Scaling:
        return Scaling(tensors["weight_scale"], block, zeros, tensors.get("weight_g_idx"))

    if stored == "pack-quantized" and kind == "int" and bits in BITS:

        def zeros_of(tensors: Tensors) -> Tensor | None:  # packed along the outputs
            zeros, rows = tensors.get("weight_zero_point"), int(tensors["weight_shape"][0])
            return None if zeros is None else unpack(zeros.T, bits).T[:rows]

        def sizes(sources: Sources) -> Sizes:
            words, (_, columns) = sources["weight_packed"].shape, _stored_shape(sources)
            return Sizes(sources["weight_scale"].shape, block, words[1] == -(-columns * bits // 32))

        return Format(
            ("weight_packed", "weight_scale", "weight_shape"), others, _stored_shape, bits,
            lambda tensors: _unpacked(tensors, bits), lambda tensors: scaling(tensors, zeros_of(tensors)),
            types={"weight_packed": (torch.int32,), "weight_zero_point": (torch.int32,), "weight_scale": FLOATS},
            sizes=sizes,
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
            sizes=lambda sources: Sizes(sources["weight_scale"].shape, block, True),
        )  # fmt: skip
    return None


def _unpacked(tensors: Tensors, bits: int) -> Tensor:
    rows, columns = map(int, tensors["weight_shape"].tolist())
    return unpack(tensors["weight_packed"], bits)[:rows, :columns]


def _block_of(weights: Fields) -> Block:
    """Return the rows and columns of a weight that share a scale, if there is more than one of each."""
    if weights["strategy"] == "block":
        rows, columns = map(int, weights["block_structure"])
        return rows, columns
    is_group = weights["strategy"] not in ("channel", "tensor")  # whose groups are of no account
    return 1, int(weights.get("group_size") or 1) if is_group else 1


def _gptq(settings: Fields) -> tuple[Format, ...]:
    added = 1 if adds_one(settings) else 0
    return tuple(_in_words(bits, size, added) for bits, size in variants_of(settings))


def _in_words(bits: int, size: int, added: int) -> Format:
    """Return a format of GPTQ.

    Args:
        size: Inputs that share a scale, or -1 for all.
        added: What is added to stored zeros.
    """

    def scaling(tensors: Tensors) -> Scaling:
        zeros = (unpack(tensors["qzeros"], bits).int() + added).T
        is_symmetric = bool((zeros == 1 << bits - 1).all())
        return Scaling(tensors["scales"].T, (1, size), None if is_symmetric else zeros, tensors.get("g_idx"))

    def shape(sources: Sources) -> tuple[int, int]:
        rows, outputs = sources["qweight"].shape
        return outputs, rows * 32 // bits

    def sizes(sources: Sources) -> Sizes:
        (outputs, inputs), (groups, of) = shape(sources), sources["scales"].shape
        codes_fit = sources["qzeros"].shape == (groups, -(-outputs * bits // 32))
        if "g_idx" in sources:
            codes_fit = codes_fit and sources["g_idx"].shape == (inputs,)
        return Sizes((of, groups), (1, size if size > 0 else inputs), codes_fit)

    return Format(
        ("qweight", "qzeros", "scales"), ("g_idx",), shape, bits, lambda tensors: unpack(tensors["qweight"].T, bits),
        scaling, types=_WORDS | {"scales": FLOATS, "g_idx": (torch.int32, torch.int64)}, sizes=sizes,
    )  # fmt: skip


def _turned(words: Tensor) -> Tensor:
    """Return [out, in] uint8 codes of AWQ's [in, out / 8] words; moving words takes less time than moving codes."""
    turned = words.T.contiguous()
    codes = torch.empty((len(turned), 8, turned.shape[1]), dtype=torch.uint8)
    for i, place in enumerate(_AWQ_ORDER):
        codes[:, i] = turned >> 4 * place & 15
    return codes.flatten(0, 1)


def _awq(settings: Fields) -> tuple[Format, ...]:
    return tuple(map(_in_turned_words, dict.fromkeys(size for _, size in variants_of(settings))))


def _in_turned_words(size: int) -> Format:
    """Return a format of AWQ; `size` inputs share a scale, or all if it is -1."""

    def shape(sources: Sources) -> tuple[int, int]:
        inputs, words = sources["qweight"].shape
        return words * 8, inputs

    def sizes(sources: Sources) -> Sizes:
        (outputs, inputs), (groups, of) = shape(sources), sources["scales"].shape
        return Sizes((of, groups), (1, size if size > 0 else inputs), sources["qzeros"].shape == (groups, outputs // 8))

    return Format(
        ("qweight", "qzeros", "scales"), (), shape, 4, lambda tensors: _turned(tensors["qweight"]),
        lambda tensors: Scaling(tensors["scales"].T, (1, size), _turned(tensors["qzeros"])),
        types=_WORDS | {"scales": FLOATS}, sizes=sizes,
    )  # fmt: skip


def _stored_shape(sources: Sources) -> tuple[int, int]:
    rows, columns = map(int, sources["weight_shape"].read().tolist())
    words = sources["weight_packed"].shape
    if not 0 < rows <= words[0] or not 0 < columns <= 32 * words[1]:
        raise ValueError(f"weight_shape is ({rows}, {columns}), more than weight_packed has")
    return rows, columns


def _auto_round(settings: Fields) -> tuple[Format, ...]:
    return _awq(settings) if "awq" in str(settings["packing_format"]) else _gptq(settings)


def _only(find: Callable[[Fields], Format | None], settings: Fields) -> tuple[Format | None, ...]:
    return (find(settings),)


_METHODS: dict[str, Callable[[Fields], tuple[Format | None, ...]]] = {
    "compressed-tensors": _compressed, "gptq": _gptq, "awq": _awq, "auto-round": _auto_round,
    "fp8": find_fp8, "bitsandbytes": partial(_only, find_bitsandbytes),
}  # fmt: skip

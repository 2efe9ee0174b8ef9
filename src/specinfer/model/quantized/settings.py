"""Fields of a quantization_config that change what codes stand for, and that are not read: found before any code is."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specinfer.model.quantized.format import Fields

BITS = (1, 2, 4, 8)  # of codes in words
# Fields that modules may have of their own, which change more than the sizes of tensors.
_OTHER_LAYOUT = ("format", "checkpoint_format", "fmt", "method", "quant_method", "pack_dtype", "adapter", "lora")
_WHOLE_BITS = 16  # of layers that are not quantized, in rules of auto-round
# Of auto-round, and whether 1 is added to stored zeros.
_PACKINGS = {
    "auto_round": False, "auto_round:gptqmodel": False, "auto_round:auto_gptq": True, "auto_round:gptq": True,
    "auto_round:auto_awq": False, "auto_round:awq": False,
}  # fmt: skip
_GPTQ_FORMATS = ("gptq", "gptq_v2")
_AUTO_ROUND, _USUAL_SIZE = "auto-round", 128


def unread_field(settings: Fields) -> str | None:
    """Return the first such field with its value, or None; of methods that are not read at all, too."""
    for name in ("transform_config", "sparsity_config"):
        value = settings.get(name)
        if value and not (isinstance(value, Mapping) and value.get("format") == "dense"):
            return name
    find = _FIND.get(str(settings.get("quant_method")))
    try:
        return None if find is None else find(settings)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return f"{type(error).__name__}: {str(error)[:80]}"


def adds_one(settings: Fields) -> bool:
    """Return whether zeros of GPTQ are stored as one less than they are."""
    if settings.get("quant_method") == _AUTO_ROUND:
        return _PACKINGS[str(settings["packing_format"])]
    return _gptq_format(settings) != "gptq_v2"


def variants_of(settings: Fields) -> list[tuple[int, int]]:
    """Return the bits, and the inputs that share a scale, that layers of GPTQ, AWQ or auto-round may have."""
    size = int(settings.get("group_size", _USUAL_SIZE))
    rules = [own for _, own in _rules(settings)]
    found = [(int(settings["bits"]), size)]
    found += [(int(_bits(own, settings)), int(own.get("group_size", size))) for own in rules]
    return list(dict.fromkeys(found))


def groups_of(settings: Fields) -> list[tuple[str, Fields]]:
    """Return the groups of layers of compressed-tensors: how codes are stored, and what weights are rounded to."""
    groups = [one for one in settings["config_groups"].values() if one.get("weights") is not None]
    found = [(str(one.get("format") or settings.get("format")), one["weights"]) for one in groups]
    return list({(stored, *(str(one.get(name)) for name in _KIND)): (stored, one) for stored, one in found}.values())


def _gptq_format(settings: Fields) -> str:
    """Return the version of GPTQ, which newer files give by another name."""
    return str(settings.get("checkpoint_format") or settings.get("format") or "gptq")


def _rules(settings: Fields) -> list[tuple[str, Fields]]:
    """Return the rules for layers that differ from the others, by patterns of names, without those left whole."""
    if settings.get("quant_method") == _AUTO_ROUND:
        given = dict(settings.get("extra_config") or {}).items()
        return [(str(name), own) for name, own in given if int(_bits(own, settings)) < _WHOLE_BITS]
    given = dict(settings.get("dynamic") or {}).items()
    return [(str(name), own) for name, own in given if not str(name).startswith("-")]


def _bits(own: Fields, settings: Fields) -> Any:
    return own.get("bits", settings.get("bits"))


def _gptq(settings: Fields) -> str | None:
    if settings.get("bits") not in BITS:
        return _shown(settings, "bits")
    if settings.get("is_marlin_format"):
        return "is_marlin_format"
    if _gptq_format(settings) not in _GPTQ_FORMATS:
        return f"format {_gptq_format(settings)!r}"
    if settings.get("pack_dtype", "int32") != "int32":
        return _shown(settings, "pack_dtype")
    return _unread_rule(settings, BITS)


def _unread_rule(settings: Fields, bits: Sequence[int]) -> str | None:
    """Return the first rule of `dynamic` with other bits than these, or another layout."""
    for pattern, own in _rules(settings):
        is_other = any(name in own and own[name] != settings.get(name) for name in _OTHER_LAYOUT)
        if is_other or _bits(own, settings) not in bits:
            return f"dynamic {pattern[:40]!r}"
    return None


def _awq(settings: Fields) -> str | None:
    name = "version" if settings.get("version") is not None else "format"
    if str(settings.get(name) or "gemm").lower() != "gemm":
        return _shown(settings, name)
    if settings.get("bits") != 4:
        return _shown(settings, "bits")
    if settings.get("backend") == "llm-awq":
        return _shown(settings, "backend")
    return _unread_rule(settings, (4,))


def _fp8(settings: Fields) -> str | None:
    block = settings.get("weight_block_size")
    is_block = isinstance(block, list) and len(block) == 2 and all(type(one) is int and one > 0 for one in block)
    return None if block is None or is_block else _shown(settings, "weight_block_size")


def _compressed(settings: Fields) -> str | None:
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        return _shown(settings, "config_groups")
    found = groups_of(settings)
    if not found:
        return _shown(settings, "config_groups")
    for stored, weights in found:
        if stored not in _COMPRESSED:
            return f"format {stored[:40]!r}"
        if weights["num_bits"] not in BITS:
            return _shown(weights, "num_bits")
    return None


def _auto_round(settings: Fields) -> str | None:
    packing = settings.get("packing_format")
    if packing not in _PACKINGS:
        return _shown(settings, "packing_format")
    known = (4,) if "awq" in str(packing) else BITS
    for where, own in (("", settings), *_rules(settings)):
        for name, is_read in (
            ("bits", _bits(own, settings) in known),
            ("data_type", own.get("data_type") in (None, "int")),
            ("act_bits", int(own.get("act_bits") or _WHOLE_BITS) >= _WHOLE_BITS),
            ("super_bits", own.get("super_bits") is None),
            ("rotation_config", not own.get("rotation_config")),
        ):
            if not is_read:
                return f"{_shown(own, name)} of {where[:40]!r}" if where else _shown(own, name)
    return None


def _shown(settings: Fields, name: str) -> str:
    return f"{name} {repr(settings.get(name))[:40]}"


_COMPRESSED = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
)  # fmt: skip
_KIND = ("num_bits", "type", "strategy", "group_size", "block_structure")
_FIND: dict[str, Callable[[Fields], str | None]] = {
    "gptq": _gptq, "awq": _awq, "fp8": _fp8, "compressed-tensors": _compressed, _AUTO_ROUND: _auto_round,
}  # fmt: skip

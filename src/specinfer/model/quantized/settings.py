"""Fields of a quantization_config that change what codes stand for, and that are not read: found before any code is."""

from collections.abc import Callable, Mapping

from specinfer.model.quantized.format import Fields

BITS = (1, 2, 4, 8)  # of codes in words
_BY_MODULE = ("bits", "group_size", "sym", "desc_act")  # of GPTQ, of which modules may have their own
_GPTQ_FORMATS = ("gptq", "gptq_v2")


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


def gptq_format(settings: Fields) -> str:
    """Return the version of GPTQ, which newer files give by another name."""
    return str(settings.get("checkpoint_format") or settings.get("format") or "gptq")


def _gptq(settings: Fields) -> str | None:
    if settings.get("bits") not in BITS:
        return _shown(settings, "bits")
    if settings.get("is_marlin_format"):
        return "is_marlin_format"
    if gptq_format(settings) not in _GPTQ_FORMATS:
        return f"format {gptq_format(settings)!r}"
    if settings.get("pack_dtype", "int32") != "int32":
        return _shown(settings, "pack_dtype")
    for pattern, own in dict(settings.get("dynamic") or {}).items():
        is_other = any(name in own and own[name] != settings.get(name) for name in _BY_MODULE)
        if not str(pattern).startswith("-") and is_other:
            return f"dynamic {str(pattern)[:40]!r}"
    return None


def _awq(settings: Fields) -> str | None:
    name = "version" if settings.get("version") is not None else "format"
    if str(settings.get(name) or "gemm").lower() != "gemm":
        return _shown(settings, name)
    if settings.get("bits") != 4:
        return _shown(settings, "bits")
    return _shown(settings, "backend") if settings.get("backend") == "llm-awq" else None


def _fp8(settings: Fields) -> str | None:
    block = settings.get("weight_block_size")
    is_block = isinstance(block, list) and len(block) == 2 and all(type(one) is int and one > 0 for one in block)
    return None if is_block else _shown(settings, "weight_block_size")


def _compressed(settings: Fields) -> str | None:
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        return _shown(settings, "config_groups")
    weights = [one["weights"] for one in groups.values()]
    if len({tuple(str(one.get(name)) for name in _KIND) for one in weights}) > 1:
        return "config_groups of several types"
    if settings.get("format") not in _COMPRESSED:
        return _shown(settings, "format")
    return None if weights[0]["num_bits"] in BITS else _shown(weights[0], "num_bits")


def _shown(settings: Fields, name: str) -> str:
    return f"{name} {repr(settings.get(name))[:40]}"


_COMPRESSED = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
)  # fmt: skip
_KIND = ("num_bits", "type", "strategy", "group_size", "block_structure")
_FIND: dict[str, Callable[[Fields], str | None]] = {
    "gptq": _gptq, "awq": _awq, "fp8": _fp8, "compressed-tensors": _compressed,
}  # fmt: skip

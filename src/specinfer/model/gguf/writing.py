"""Writing of GGUF files: a model's weights, configuration and tokenizer, as the reader and llama.cpp take them.

What a file would say is read before it is written. A configuration that it cannot hold is refused.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from gguf import GGMLQuantizationType, GGUFWriter

from specinfer.core.errors import ModelError
from specinfer.model.gguf.config import EXACT, read_config
from specinfer.model.gguf.families import FAMILIES
from specinfer.model.gguf.families.parts import Family
from specinfer.model.gguf.header import GgufHeader, TensorPlace
from specinfer.model.gguf.metadata import LLAMA3, LONGROPE, llama3_factors
from specinfer.model.gguf.rounding import fitting, rounded
from specinfer.model.gguf.stored import MTP_COPIES, StoredTensors, mtp_names
from specinfer.model.gguf.tokenizer_writing import refusal
from specinfer.model.gguf.types import PLAIN_TYPES

logger = logging.getLogger(__name__)
_OUTSIDE = ("token_embd.weight", "output.weight")  # later layers cannot make up for errors of these: more bits
_MORE_BITS = ("attn_v.weight", "ffn_down.weight", "ffn_down_exps.weight")  # of some layers of Q4_K_M: 6 bits
_PLAIN = (GGMLQuantizationType.F32, GGMLQuantizationType.F16)
# Metadata of all architectures, by names of config.json: the first that a family has.
_SIZES = {
    "block_count": "num_hidden_layers", "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "attention.key_length": "head_dim",
    "attention.value_length": "head_dim", "attention.sliding_window": "sliding_window", "vocab_size": "vocab_size",
    "expert_count": "num_experts num_local_experts n_routed_experts", "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps norm_eps layer_norm_epsilon",
}  # fmt: skip
_ORIGINAL = "original_max_position_embeddings"
_DEFAULTS = (("partial_rotary_factor", 1.0), ("beta_fast", 32.0), ("beta_slow", 1.0))
_NO_POSITIONS = 2**20  # the context that is written for models that have no limit
# Fields that change nothing of what a model computes, or of which a file has another form.
_IGNORED = {
    "attention_dropout", "block_ff_dim", "bos_token_id", "embd_pdrop", "eos_token_id", "hidden_dropout",
    "initializer_range", "max_window_layers", "model_type", "num_nextn_predict_layers",
    "output_router_logits", "pad_token_id", "pretraining_tp",
    "resid_pdrop", "router_aux_loss_coef", "use_cache",
}  # fmt: skip


def write_gguf(
    file: Path,
    config: Any,
    weights: Mapping[str, Any],
    load_definition: Callable[[], Mapping[str, Any]],
    vocabulary: Callable[[int], Mapping[str, Any]],
    kind: str,
    note: Callable[[int], None],
) -> int:
    """Write a model, one tensor in memory at a time; return the number of matrices of fewer bits.

    Args:
        config: transformers' configuration.
        weights: Weights by name, with `shape` and `read`.
        load_definition: Function that returns the weights by their names in the definition, for families whose
            checkpoints have others.
        vocabulary: Function that returns the metadata of the tokenizer, given the size of the vocabulary.
        kind: One of `TYPES` (`types.py`), for matrices but for routers, embeddings and the output head, or one of
            `PLAIN_TYPES`, for all matrices.
        note: Called with the number of tensors done.

    Raises:
        ModelError: A GGUF file cannot hold such a model.
    """
    fields = _fields(config)
    arch, family = _architecture(fields)
    tensors = StoredTensors(family, fields, weights)
    if tensors.missing():  # definitions have no MTP layers
        mtp = {name: weights[name] for name in mtp_names(weights)}
        tensors = StoredTensors(family, fields, mtp | dict(family.renamed(load_definition())))
    layers = int(fields["num_hidden_layers"]) + tensors.num_mtp_layers
    _check_names(tensors)
    kinds = {stored: _kind_of(stored, shape, kind, layers) for stored, shape in tensors.shapes.items()}
    rotations = _rotations(fields)
    keys = _keys(fields) | family.metadata(fields) | {"block_count": layers}
    if tensors.num_mtp_layers:
        keys["nextn_predict_layers"] = tensors.num_mtp_layers
    metadata = {f"{arch}.{key}": value for key, value in keys.items()}
    metadata |= vocabulary(config.vocab_size)
    places = {name: TensorPlace(shape, kinds[name], 0, 0, file) for name, shape in tensors.shapes.items()}
    places |= _written(rotations, file)
    _check(GgufHeader(file, metadata | {"general.architecture": arch}, places), config)

    def data() -> Iterator[np.ndarray]:
        for number, stored in enumerate(tensors.shapes, start=1):
            yield rounded(tensors.read(stored).contiguous().numpy(), kinds[stored])
            note(number)
        for numbers in rotations.values():
            yield np.array(numbers, dtype=np.float32)

    write_file(file, arch, metadata, places, data())
    return sum(one not in _PLAIN and stored not in _OUTSIDE for stored, one in kinds.items())


def _architecture(fields: Mapping[str, Any]) -> tuple[str, Family]:
    family = fields["model_type"] + (" with experts" if "moe" in (fields.get("layer_types") or ()) else "")
    found = {one: (arch, how) for arch, how in FAMILIES.items() for one in how.written}
    if family not in found:
        raise refusal(f"family {family!r} is not written as GGUF ({', '.join(sorted(found))} are)")
    return found[family]


def _check_names(tensors: StoredTensors) -> None:
    """Refuse a model whose weights are not those of its family; MTP layers without names in files are left out."""
    if missing := tensors.missing():
        raise ModelError(f"model: weight {missing[0]} is missing; fetch the model again")
    left_out = tensors.other_mtp()
    for name in sorted(set(tensors.others()) - left_out):  # inverse frequencies are computed by all readers
        if name != "lm_head.weight" and not name.endswith("rotary_emb.inv_freq"):
            raise refusal(f"weight {name} has no place in a GGUF file")
    if any(not name.endswith(MTP_COPIES) for name in left_out):
        logger.warning("MTP layers that GGUF files have no names for are left out: %d weights", len(left_out))


def _fields(config: Any) -> dict[str, Any]:
    """Return the fields of config.json with the size of a head, if the family has any."""
    names = (*config.attribute_map, "num_hidden_layers", "layer_types")  # which some families have under other names
    fields: dict[str, Any] = config.to_dict() | {name: getattr(config, name) for name in names if hasattr(config, name)}
    if heads := fields.get("num_attention_heads"):
        fields["head_dim"] = fields.get("head_dim") or fields["hidden_size"] // heads
    return fields


def _keys(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata that all architectures share."""
    keys: dict[str, Any] = {"context_length": _NO_POSITIONS}
    for key, names in _SIZES.items():
        if (value := next((fields[name] for name in names.split() if fields.get(name) is not None), None)) is not None:
            keys[key] = value
    if rope := _rope(fields):
        keys["rope.dimension_count"] = int(fields["head_dim"] * rope.get("partial_rotary_factor", 1.0))
        keys["rope.freq_base"] = float(rope["rope_theta"])
        keys["rope.scaling.attn_factor"] = rope.get("attention_factor")
        keys["rope.scaling.original_context_length"] = rope.get(_ORIGINAL) or fields.get(_ORIGINAL)
        if rope["rope_type"] in ("linear", "yarn"):
            keys["rope.scaling.type"], keys["rope.scaling.factor"] = rope["rope_type"], float(rope["factor"])
    return keys


def _rope(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of rotations, of Gemma's layers that see all tokens, or none."""
    rope: dict[str, Any] = fields.get("rope_parameters") or {}
    full: dict[str, Any] = rope.get("full_attention", rope)
    return full


def _rotations(fields: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return the factors of rotations that are tensors of the file."""
    rope = _rope(fields)
    if rope.get("rope_type") == "llama3":
        return {LLAMA3: llama3_factors(rope, fields["head_dim"])}
    return {LONGROPE[name]: rope[name] for name in LONGROPE} if rope.get("rope_type") == "longrope" else {}


def _written(rotations: Mapping[str, list[float]], file: Path) -> dict[str, TensorPlace]:
    """Return the places of factors, which are written to the file so that they can be read before the rest is there."""
    places, at = {}, 0
    with file.open("wb") as opened:
        for name, numbers in rotations.items():
            size = opened.write(np.array(numbers, dtype=np.float32).tobytes())
            places[name] = TensorPlace((len(numbers),), GGMLQuantizationType.F32, at, size, file)
            at += size
    return places


def write_file(
    file: Path,
    arch: str,
    metadata: Mapping[str, Any],
    places: Mapping[str, TensorPlace],
    data: Iterable[np.ndarray],
) -> None:
    """Write a file of tensors as they come.

    Args:
        metadata: Values by key; None is left out.
        places: Shape and type of each tensor.
        data: The stored numbers or codes of each, in the same order.
    """
    with closing(GGUFWriter(file, arch)) as writer:
        for key, value in metadata.items():
            _add(writer, key, value)
        for name, place in places.items():
            size = math.prod(place.blocks)
            writer.add_tensor_info(name, place.shape, np.dtype(np.float32), size, raw_dtype=place.kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for stored in data:
            writer.write_tensor_data(stored)


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif value is not None:
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](key, value)


def _kind_of(stored: str, shape: tuple[int, ...], kind: str, layers: int) -> GGMLQuantizationType:
    if len(shape) < 2 or stored.endswith(".bias") or EXACT.fullmatch(stored):
        return GGMLQuantizationType.F32
    if kind in PLAIN_TYPES:
        return GGMLQuantizationType[kind.upper()]
    if shape[-1] % 32:
        return GGMLQuantizationType.F16
    name = kind.upper().removesuffix("_M")
    if stored in _OUTSIDE:
        name = "Q6_K" if name.endswith("_K") else "Q8_0"
    elif kind.endswith("_m") and stored.endswith(_MORE_BITS) and _has_more_bits(int(stored.split(".")[1]), layers):
        name = "Q6_K"
    return fitting(GGMLQuantizationType[name], shape[-1])


def _has_more_bits(layer: int, layers: int) -> bool:
    """Return whether llama.cpp gives a layer more bits: the first and last eighth, and every third one between."""
    first = layers // 8
    return layer < first or layer >= 7 * layers // 8 or (layer - first) % 3 == 2


def _check(header: GgufHeader, config: Any) -> None:
    """Refuse a configuration that a file does not hold as it is."""
    read = read_config(header)
    found, wanted = transformers.AutoConfig.for_model(**read).to_dict(), config.to_dict()
    for name in sorted(type(config)().to_dict().keys() - transformers.PreTrainedConfig().to_dict().keys() - _IGNORED):
        value = wanted.get(name)
        pairs = value if isinstance(value, dict) else {name: value}
        there = found.get(name) if isinstance(value, dict) else found
        for part, one in pairs.items():
            if not _is_same(one, (there or {}).get(part)) and (part, one) not in _DEFAULTS:
                raise refusal(f"{part} {one!r} has no place in a GGUF file")


def _is_same(wanted: Any, found: Any) -> bool:
    """Return whether two values are the same; files hold numbers in 32 bits."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        return all(_is_same(one, found.get(name)) or (name, one) in _DEFAULTS for name, one in wanted.items())
    if isinstance(wanted, list) and isinstance(found, list):
        return len(wanted) == len(found) and all(map(_is_same, wanted, found))
    if isinstance(wanted, float) and isinstance(found, float):
        return math.isclose(wanted, found, rel_tol=1e-6)
    return bool(wanted == found)

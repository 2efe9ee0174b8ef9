"""Writing of GGUF files: a model's weights, configuration and tokenizer, as the reader and llama.cpp take them.

What a file says is read again before the file gets its name. A configuration that it cannot hold is refused.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType

from specinfer.core.errors import ModelError
from specinfer.model.gguf.architectures import plan_weights
from specinfer.model.gguf.config import read_config
from specinfer.model.gguf.header import read_header
from specinfer.model.gguf.rope import llama3_factors
from specinfer.model.gguf.rounding import fitting, rounded
from specinfer.model.gguf.tokenizer import LLAMA3_RULES, name_rule
from specinfer.model.gguf.weights import Weight, in_pairs

TYPES = ("q8_0", "q6_k", "q5_k", "q4_k_m", "q4_k", "q5_1", "q5_0", "q4_1", "q4_0")
_FAMILIES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}
_OUTSIDE = ("token_embd.weight", "output.weight")  # later layers cannot make up for errors of these: more bits
_MORE_BITS = ("attn_v.weight", "ffn_down.weight", "ffn_down_exps.weight")  # of some layers of Q4_K_M: 6 bits
_PLAIN = (GGMLQuantizationType.F32, GGMLQuantizationType.F16)
_EXACT = ("ffn_gate_inp.weight",)  # routers
_INSTEAD = "use --to int4 or int8, or the converter of llama.cpp"
_SIZES = {
    "block_count": "num_hidden_layers", "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "attention.key_length": "head_dim",
    "attention.value_length": "head_dim", "rope.dimension_count": "head_dim", "vocab_size": "vocab_size",
    "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}  # fmt: skip
_FIELDS = (*dict.fromkeys(_SIZES.values()), "rms_norm_eps", "rope_parameters", "tie_word_embeddings", "attention_bias")


def write_gguf(
    file: Path, config: Any, sources: Mapping[str, Any], tokenizer: Any, kind: str, note: Callable[[int], None]
) -> int:
    """Write a model, one tensor in memory at a time; return the number of matrices of fewer bits.

    Args:
        config: transformers' configuration.
        sources: Weights by name, with `shape` and `read`.
        tokenizer: transformers' tokenizer.
        kind: One of `TYPES`, for matrices but for routers, embeddings and the output head.
        note: Called with the number of tensors done.

    Raises:
        ModelError: A GGUF file cannot hold such a model.
    """
    fields: dict[str, Any] = {name: getattr(config, name, None) for name in _FIELDS}
    fields["head_dim"] = fields["head_dim"] or config.hidden_size // config.num_attention_heads
    arch = _architecture(config)
    plan: dict[str, list[Weight]] = {}
    for stored, weight in plan_weights(arch, fields):
        plan.setdefault(stored, []).append(weight)
    _check_names({one.name for weights in plan.values() for one in weights}, set(sources))
    writer = GGUFWriter(file, arch)
    _add_fields(writer, arch, fields)
    _add_tokenizer(writer, tokenizer, config.vocab_size)
    layers = int(fields["num_hidden_layers"])
    kinds = {stored: _kind_of(stored, weights[0].shape, kind, layers) for stored, weights in plan.items()}
    for stored, weights in plan.items():
        _announce(writer, stored, _shape(weights), kinds[stored])
    rope = fields["rope_parameters"]
    factors = llama3_factors(rope, fields["head_dim"]) if rope["rope_type"] == "llama3" else []
    if factors:
        _announce(writer, "rope_freqs.weight", (len(factors),), GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for number, (stored, weights) in enumerate(plan.items(), start=1):
        writer.write_tensor_data(rounded(_numbers(weights, sources), kinds[stored]))
        note(number)
    if factors:
        writer.write_tensor_data(np.array(factors, dtype=np.float32))
    writer.close()
    _check_fields(file, fields)
    return sum(one not in _PLAIN and stored not in _OUTSIDE for stored, one in kinds.items())


def _architecture(config: Any) -> str:
    family = config.model_type
    if family not in _FAMILIES:
        raise _refusal(f"family {family!r} is not written as GGUF ({', '.join(_FAMILIES)} are)")
    types = set(getattr(config, "layer_types", None) or ())
    if "sliding_attention" in types or (family == "mistral" and getattr(config, "sliding_window", None)):
        raise _refusal(f"family {family!r} with sliding windows is not written as GGUF")
    if config.hidden_act != "silu":
        raise _refusal(f"hidden_act {config.hidden_act!r} has no place in a GGUF file")
    return _FAMILIES[family]


def _refusal(fault: str) -> ModelError:
    return ModelError(f"model: {fault}; {_INSTEAD}")


def _check_names(planned: set[str], found: set[str]) -> None:
    found = {name for name in found if not name.endswith("rotary_emb.inv_freq")}  # computed by all readers
    if missing := sorted(planned - found):
        raise ModelError(f"model: weight {missing[0]} is missing; fetch the model again")
    if others := sorted(found - planned - {"lm_head.weight"}):
        raise _refusal(f"weight {others[0]} has no place in a GGUF file")


def _add_fields(writer: Any, arch: str, fields: Mapping[str, Any]) -> None:
    for key, name in _SIZES.items():
        if fields[name] is not None:
            writer.add_uint32(f"{arch}.{key}", fields[name])
    rope = fields["rope_parameters"]
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", fields["rms_norm_eps"])
    writer.add_float32(f"{arch}.rope.freq_base", rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_string(f"{arch}.rope.scaling.type", rope["rope_type"])
        writer.add_float32(f"{arch}.rope.scaling.factor", rope["factor"])
        if (original := rope.get("original_max_position_embeddings")) is not None:
            writer.add_uint32(f"{arch}.rope.scaling.original_context_length", original)


def _add_tokenizer(writer: Any, tokenizer: Any, vocab_size: int) -> None:
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    model, added = state["model"], {one["id"]: one for one in state["added_tokens"]}
    is_known = model["type"] == "BPE" and not model.get("byte_fallback")
    is_known = is_known and (state["normalizer"] or {}).get("type", "NFC") == "NFC"  # which files do not hold
    rule = name_rule(state["pre_tokenizer"]) if is_known else None
    if rule is None or bool(model.get("ignore_merges")) != (rule in LLAMA3_RULES):
        raise _refusal("how its tokenizer cuts text has no name that is known in GGUF files")
    tokens = {i: token for token, i in model["vocab"].items()} | {i: one["content"] for i, one in added.items()}
    if len(tokens) > vocab_size or max(tokens) >= vocab_size:
        raise _refusal(f"its tokenizer has token {max(tokens)}, and the vocabulary {vocab_size} tokens")
    types = [TokenType.NORMAL if i in tokens else TokenType.UNUSED for i in range(vocab_size)]
    for i, one in added.items():
        types[i] = TokenType.CONTROL if one["special"] else TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    writer.add_token_list([tokens.get(i, f"[PAD{i}]") for i in range(vocab_size)])
    writer.add_token_types(types)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    ids = tokenizer("a").input_ids
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        if (found := getattr(tokenizer, f"{name}_token_id")) is not None:
            writer.add_uint32(f"tokenizer.ggml.{key}_token_id", found)
    writer.add_add_bos_token(bool(ids) and ids[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(bool(ids) and ids[-1] == tokenizer.eos_token_id)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def _kind_of(stored: str, shape: tuple[int, ...], kind: str, layers: int) -> GGMLQuantizationType:
    if len(shape) < 2 or stored.endswith(_EXACT):
        return GGMLQuantizationType.F32
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


def _shape(weights: list[Weight]) -> tuple[int, ...]:
    return weights[0].shape if weights[0].expert is None else (len(weights), *weights[0].shape)


def _announce(writer: Any, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType) -> None:
    size = math.prod(gguf.quant_shape_to_byte_shape(shape, kind))
    writer.add_tensor_info(name, shape, np.dtype(np.float32), size, raw_dtype=kind)


def _numbers(weights: list[Weight], sources: Mapping[str, Any]) -> np.ndarray:
    """Return a tensor of the file in float32: a weight, or those of all experts."""
    found = []
    for one in weights:
        numbers = sources[one.name].read().float()
        if tuple(numbers.shape) != one.shape:
            raise ModelError(f"model: weight {one.name} has the shape {list(numbers.shape)}, not {list(one.shape)}")
        found.append((in_pairs(numbers, one.heads) if one.heads else numbers) + one.less)
    result: np.ndarray = (found[0] if weights[0].expert is None else torch.stack(found)).contiguous().numpy()
    return result


def _check_fields(file: Path, fields: Mapping[str, Any]) -> None:
    """Refuse a configuration that the file does not hold as it is."""
    read = read_config(read_header(file))
    found = read | read["rope_parameters"]
    wanted = {name: value for name, value in fields.items() if name in read and name != "rope_parameters"}
    for name, value in (wanted | fields["rope_parameters"]).items():
        if value is None or (name, value) == ("partial_rotary_factor", 1.0):
            continue
        is_number = isinstance(value, float) and isinstance(found.get(name), float)  # of which files hold 32 bits
        if not (math.isclose(found[name], value, rel_tol=1e-6) if is_number else found.get(name) == value):
            raise _refusal(f"{name} {value!r} has no place in a GGUF file")

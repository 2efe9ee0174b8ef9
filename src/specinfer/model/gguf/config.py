"""Conversion of a GGUF file's metadata to a Hugging Face configuration, and the tensors that such a model must have."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from specinfer.model.gguf.header import GgufError, GgufHeader, read_header
from specinfer.model.gguf.weights import GgufSource, Weight, read_tensor

_TAKE_ANOTHER = "take the model as a folder of safetensors"
_FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
_MOST = 2**24  # limit of any size, because definitions are made before weights are read
_GEMMA_PERIOD = 6  # one in six of Gemma 3's layers sees all tokens; files may omit it
_GEMMA_27B_LAYERS = 62  # llama.cpp detects this model, which scales queries differently, by it


def read_config(header: GgufHeader) -> dict[str, Any]:
    """Return the fields of config.json.

    Raises:
        GgufError: The file's architecture is not supported, or it lacks metadata that a configuration needs.
    """
    arch = header.get("general.architecture", str)
    if arch not in _FAMILIES:
        known = ", ".join(sorted(_FAMILIES))
        raise GgufError(
            header.path, f"models of architecture {arch!r} are not read from GGUF ({known} are)", _TAKE_ANOTHER
        )
    size = _Sizes(header, arch)
    heads, hidden = size("attention.head_count"), size("embedding_length")
    head_dim = size("attention.key_length", size("rope.dimension_count", hidden // heads))
    num_layers = size("block_count")
    if num_layers > len(header.tensors):
        raise GgufError(header.path, f"{arch}.block_count is {num_layers}, and there are {len(header.tensors)} tensors")
    if "token_embd.weight" not in header.tensors:
        raise GgufError(header.path, "the tensor 'token_embd.weight' is missing")
    for name, needed in (("attention.value_length", head_dim), ("rope.dimension_count", head_dim)):
        if size(name, needed) != needed:
            raise GgufError(header.path, f"{arch}.{name} is not the size of a head, {needed}", _TAKE_ANOTHER)
    fields = {
        "model_type": _FAMILIES[arch],
        "architectures": [_CLASSES[arch]],
        "dtype": str(own_dtype(header)).removeprefix("torch."),
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": size("feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": size("context_length"),
        "rms_norm_eps": _positive(header, f"{arch}.attention.layer_norm_rms_epsilon", None),
        "rope_parameters": _rope(header, arch, head_dim),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        fields[f"{name}_token_id"] = token_id(header, f"{key}_token_id")
    if arch == "gemma3":
        fields |= _gemma_fields(header, size, fields)
    elif arch == "llama":
        fields["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    _check_tensors(header, plan_weights(arch, fields))
    return fields


def gguf_sources(path: Path, dtype: torch.dtype | None) -> dict[str, GgufSource]:
    """Return the weights of a file by their names in the model, decoded to `dtype` or to the file's own type.

    Raises:
        GgufError: The file cannot be used.
    """
    header = read_header(path)
    config = read_config(header)
    plan = plan_weights(header.metadata["general.architecture"], config)
    dtype = own_dtype(header) if dtype is None else dtype
    return {one.name: GgufSource(path, header.tensors[name], one, dtype) for name, one in plan.items()}


def own_dtype(header: GgufHeader) -> torch.dtype:
    """Return the type that matrices are stored in, or bfloat16 if they are quantized or of several types."""
    kinds = {place.kind.name for place in header.tensors.values() if len(place.shape) > 1}
    plain = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    return plain.get(kinds.pop(), torch.bfloat16) if len(kinds) == 1 else torch.bfloat16


def token_id(header: GgufHeader, name: str) -> int | None:
    """Return the id of a special token, or None if the file does not name it.

    Raises:
        GgufError: The vocabulary has no such token.
    """
    found: int | None = header.get(f"tokenizer.ggml.{name}", int)
    if found is not None and not 0 <= found < header.tensors["token_embd.weight"].shape[0]:
        raise GgufError(header.path, f"tokenizer.ggml.{name} is {found}, which is no token")
    return found


def plan_weights(arch: str, fields: Mapping[str, Any]) -> dict[str, Weight]:
    """Return the model's weight for each tensor that a file of this configuration must have, by the tensor's name."""
    hidden, wide, dim = fields["hidden_size"], fields["intermediate_size"], fields["head_dim"]
    heads, kv_heads = fields["num_attention_heads"], fields["num_key_value_heads"]
    pairs, less = arch == "llama", 1.0 if arch == "gemma3" else 0.0  # Gemma's norms are stored as 1 + w
    norm: dict[str, str] = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    if arch == "gemma3":
        norm |= {
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        }
    matrices = {
        "attn_q": Weight("self_attn.q_proj", (heads * dim, hidden), heads if pairs else 0),
        "attn_k": Weight("self_attn.k_proj", (kv_heads * dim, hidden), kv_heads if pairs else 0),
        "attn_v": Weight("self_attn.v_proj", (kv_heads * dim, hidden)),
        "attn_output": Weight("self_attn.o_proj", (hidden, heads * dim)),
        "ffn_gate": Weight("mlp.gate_proj", (wide, hidden)),
        "ffn_up": Weight("mlp.up_proj", (wide, hidden)),
        "ffn_down": Weight("mlp.down_proj", (hidden, wide)),
    }
    biased = {"qwen2": ("attn_q", "attn_k", "attn_v"), "llama": ("attn_q", "attn_k", "attn_v", "attn_output")}.get(
        arch, ()
    )
    if arch == "llama" and not fields.get("attention_bias"):
        biased = ()
    plan = {
        "token_embd.weight": Weight("model.embed_tokens.weight", (fields["vocab_size"], hidden)),
        "output_norm.weight": Weight("model.norm.weight", (hidden,), less=less),
    }
    if not fields["tie_word_embeddings"]:
        plan["output.weight"] = Weight("lm_head.weight", (fields["vocab_size"], hidden))
    for i in range(fields["num_hidden_layers"]):
        here, there = f"blk.{i}.", f"model.layers.{i}."
        for name, one in matrices.items():
            plan[f"{here}{name}.weight"] = Weight(f"{there}{one.name}.weight", one.shape, one.heads)
            if name in biased:
                plan[f"{here}{name}.bias"] = Weight(f"{there}{one.name}.bias", one.shape[:1], one.heads)
        for name, found in norm.items():
            plan[f"{here}{name}.weight"] = Weight(f"{there}{found}.weight", (hidden,), less=less)
        if arch in ("qwen3", "gemma3"):
            for kind in "qk":
                found = f"{there}self_attn.{kind}_norm.weight"
                plan[f"{here}attn_{kind}_norm.weight"] = Weight(found, (dim,), less=less)
    return plan


def _check_tensors(header: GgufHeader, plan: Mapping[str, Weight]) -> None:
    """Refuse a file whose tensors do not match its configuration, before either is used."""
    for name, weight in plan.items():
        if name not in header.tensors:
            raise GgufError(header.path, f"the tensor {name!r} is missing")
        if (shape := header.tensors[name].shape) != weight.shape:
            raise GgufError(
                header.path,
                f"the tensor {name!r} has the shape {list(shape)}, and the metadata ask for {list(weight.shape)}",
            )
    others = sorted(header.tensors.keys() - plan.keys() - {"rope_freqs.weight"})
    if others:
        raise GgufError(header.path, f"the tensor {others[0][:80]!r} has no place in such a model", _TAKE_ANOTHER)


class _Sizes:
    """The sizes in an architecture's metadata."""

    def __init__(self, header: GgufHeader, arch: str) -> None:
        self._header, self._arch = header, arch

    def __call__(self, name: str, default: int | None = None) -> int:
        key = f"{self._arch}.{name}"
        value: int | None = self._header.get(key, int, default)
        if value is None:
            raise GgufError(self._header.path, f"{key} is missing from the metadata")
        if not 1 <= value <= _MOST:
            raise GgufError(self._header.path, f"{key} is {value}, not a number from 1 to {_MOST}")
        return value


def _positive(header: GgufHeader, key: str, default: float | None) -> float:
    value = header.get(key, (int, float), default)
    if value is None:
        raise GgufError(header.path, f"{key} is missing from the metadata")
    if not (math.isfinite(value) and value > 0):
        raise GgufError(header.path, f"{key} is {value}, not a number above 0")
    return float(value)


def _rope(header: GgufHeader, arch: str, head_dim: int) -> dict[str, Any]:
    key: Callable[[str], str] = lambda name: f"{arch}.rope.{name}"  # noqa: E731
    theta = _positive(header, key("freq_base"), 10000.0)
    scaling = header.get(key("scaling.type"), str, "none")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if "rope_freqs.weight" in header.tensors:
        rope = _llama3_rope(header, theta, head_dim)
    elif scaling in ("linear", "yarn"):
        rope = {"rope_type": scaling, "rope_theta": theta, "factor": _positive(header, key("scaling.factor"), None)}
        if scaling == "yarn":
            original = header.get(key("scaling.original_context_length"), int)
            rope["original_max_position_embeddings"] = original or header.get(f"{arch}.context_length", int)
    elif scaling != "none":
        raise GgufError(header.path, f"positions scaled by {scaling!r} are not read", _TAKE_ANOTHER)
    if arch != "gemma3":
        return rope
    local = _positive(header, key("freq_base_swa"), 10000.0)
    return {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": local}}


def llama3_factors(rope: Mapping[str, Any], head_dim: int) -> list[float]:
    """Return the number that Llama 3 divides each frequency by."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / head_dim)
        turns = rope["original_max_position_embeddings"] / wavelength
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return factors


def _llama3_rope(header: GgufHeader, theta: float, head_dim: int) -> dict[str, Any]:
    """Return the settings that the file's factors were made from; all Llama 3 models differ only in the factor."""
    place = header.tensors["rope_freqs.weight"]
    found = read_tensor(header.path, place, torch.float32) if place.shape == (head_dim // 2,) else torch.empty(0)
    rope = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": round(float(found.max()), 3) if len(found) else 1.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if len(found) and torch.allclose(found, torch.tensor(llama3_factors(rope, head_dim)), rtol=1e-4):
        return rope
    raise GgufError(header.path, "its frequencies of positions are scaled in a way that is not known", _TAKE_ANOTHER)


def _gemma_fields(header: GgufHeader, size: _Sizes, fields: Mapping[str, Any]) -> dict[str, Any]:
    num_layers = fields["num_hidden_layers"]
    period = header.get("gemma3.attention.sliding_window_pattern", int, _GEMMA_PERIOD)
    if period < 1:
        raise GgufError(header.path, f"gemma3.attention.sliding_window_pattern is {period}, not a number of at least 1")
    is_27b = num_layers == _GEMMA_27B_LAYERS
    return {
        "sliding_window": size("attention.sliding_window"),
        "layer_types": ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(num_layers)],
        "query_pre_attn_scalar": fields["hidden_size"] // fields["num_attention_heads"]
        if is_27b
        else fields["head_dim"],
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": header.get("gemma3.final_logit_softcapping", float),
        "attn_logit_softcapping": None,
    }

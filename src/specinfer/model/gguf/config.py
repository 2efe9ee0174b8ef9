"""Conversion of a GGUF file's metadata to a Hugging Face configuration, and the tensors that such a model must have."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from specinfer.model.gguf.architectures import ARCHITECTURES, plan_weights
from specinfer.model.gguf.header import GgufError, GgufHeader, TensorPlace, read_header
from specinfer.model.gguf.weights import GgufSource, Weight, read_tensor
from specinfer.model.stacked_source import StackedSource

_EXPERT = re.compile(r"(?P<layer>.*\.experts)\.(?P<number>\d+)\.(?P<kind>gate|up|down)_proj\.(?P<end>weight|bias)")
_TAKE_ANOTHER = "take the model as a folder of safetensors"
_MOST = 2**24  # limit of any size, because definitions are made before weights are read
_LONGROPE = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
_GEMMA_PERIODS = {"gemma2": 2, "gemma3": 6}  # one in so many layers sees all tokens; files may omit it
_GEMMA_2_WINDOW = 4096  # of files that omit it, as are the caps of logits and of attention
_GEMMA_CAPS = {"gemma2": (30.0, 50.0), "gemma3": (None, None)}
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}  # llama.cpp detects models that scale queries differently by them


def read_config(header: GgufHeader) -> dict[str, Any]:
    """Return the fields of config.json.

    Raises:
        GgufError: The file's architecture is not supported, or it lacks metadata that a configuration needs.
    """
    arch = header.get("general.architecture", str)
    if arch not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise GgufError(
            header.path, f"models of architecture {arch!r} are not read from GGUF ({known} are)", _TAKE_ANOTHER
        )
    size = _Sizes(header, arch)
    heads, hidden = size("attention.head_count"), size("embedding_length")
    rotated = size("rope.dimension_count", hidden // heads)
    head_dim = size("attention.key_length", hidden // heads if arch == "phi3" else rotated)
    num_layers = size("block_count")
    if num_layers > len(header.tensors):
        raise GgufError(header.path, f"{arch}.block_count is {num_layers}, and there are {len(header.tensors)} tensors")
    if "token_embd.weight" not in header.tensors:
        raise GgufError(header.path, "the tensor 'token_embd.weight' is missing")
    for name in ("attention.value_length", "rope.dimension_count"):
        # In Phi 3, only a part of a head may be rotated.
        if (found := size(name, head_dim)) != head_dim and (arch != "phi3" or found % 2 or found > head_dim):
            raise GgufError(header.path, f"{arch}.{name} is not the size of a head, {head_dim}", _TAKE_ANOTHER)
    rope = _rope(header, arch, head_dim)
    fields = {
        "model_type": ARCHITECTURES[arch].family,
        "architectures": [ARCHITECTURES[arch].model_class],
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
        "rope_parameters": rope,
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        fields[f"{name}_token_id"] = token_id(header, f"{key}_token_id")
    if arch in ("gemma2", "gemma3"):
        fields |= _gemma_fields(header, arch, size, fields)
    elif arch == "llama":
        fields["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    elif arch == "gpt-oss":
        fields |= {
            "num_local_experts": size("expert_count"),
            "num_experts_per_tok": size("expert_used_count"),
            "intermediate_size": size("expert_feed_forward_length"),
            "sliding_window": size("attention.sliding_window"),
        }
    elif arch == "phi3":
        window = header.get("phi3.attention.sliding_window", int, 0)
        fields |= {"sliding_window": size("attention.sliding_window") if window else None}
        if "original_max_position_embeddings" in rope:
            fields["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    elif arch == "qwen3moe":
        fields |= {
            "num_experts": size("expert_count"),
            "num_experts_per_tok": size("expert_used_count"),
            "moe_intermediate_size": size("expert_feed_forward_length"),
            "norm_topk_prob": True,
        }
    _check_tensors(header, plan_weights(arch, fields))
    return fields


def gguf_sources(path: Path, dtype: torch.dtype | None) -> dict[str, GgufSource | StackedSource]:
    """Return the weights of a file by their names in the model, decoded to `dtype` or to the file's own type.

    Raises:
        GgufError: The file cannot be used.
    """
    header = read_header(path)
    config = read_config(header)
    arch = header.metadata["general.architecture"]
    dtype = own_dtype(header) if dtype is None else dtype
    sources = {one.name: GgufSource(_place(header, name, one), one, dtype) for name, one in plan_weights(arch, config)}
    return _stacked(sources) if ARCHITECTURES[arch].stacks_experts else {**sources}


def _stacked(sources: Mapping[str, GgufSource]) -> dict[str, GgufSource | StackedSource]:
    """Return the sources with one for the matrices of all experts, and for their biases; gates beside values."""
    result: dict[str, GgufSource | StackedSource] = {}
    stacks: dict[str, dict[int, list[GgufSource]]] = {}
    for name, source in sources.items():
        if (found := _EXPERT.fullmatch(name)) is None:
            result[name] = source
            continue
        kind = "down_proj" if found["kind"] == "down" else "gate_up_proj"
        whole = f"{found['layer']}.{kind}{'_bias' if found['end'] == 'bias' else ''}"
        stacks.setdefault(whole, {}).setdefault(int(found["number"]), []).append(source)
    for name, experts in stacks.items():
        result[name] = StackedSource([parts for _, parts in sorted(experts.items())])
    return result


def _place(header: GgufHeader, name: str, weight: Weight) -> TensorPlace:
    """Return the place of a weight, which may be an expert's part of a tensor."""
    place = header.tensors[name]
    if weight.expert is None:
        return place
    size = place.num_bytes // weight.num_experts
    return replace(place, shape=place.shape[1:], offset=place.offset + weight.expert * size, num_bytes=size)


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


def _check_tensors(header: GgufHeader, plan: Sequence[tuple[str, Weight]]) -> None:
    """Refuse a file whose tensors do not match its configuration, before either is used."""
    for name, weight in plan:
        if name not in header.tensors:
            raise GgufError(header.path, f"the tensor {name!r} is missing")
        wanted = weight.shape if weight.expert is None else (weight.num_experts, *weight.shape)
        if (shape := header.tensors[name].shape) != wanted:
            raise GgufError(
                header.path, f"the tensor {name!r} has the shape {list(shape)}, and the metadata ask for {list(wanted)}"
            )
    rotations = {"rope_freqs.weight", *_LONGROPE.values()}
    others = sorted(header.tensors.keys() - {name for name, _ in plan} - rotations)
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
    if arch == "phi3":
        rope |= _phi3_rope(header, head_dim)
    elif "rope_freqs.weight" in header.tensors:
        rope = _llama3_rope(header, theta, head_dim)
    elif scaling in ("linear", "yarn"):
        rope = {"rope_type": scaling, "rope_theta": theta, "factor": _positive(header, key("scaling.factor"), None)}
        if scaling == "yarn":
            original = header.get(key("scaling.original_context_length"), int)
            rope["original_max_position_embeddings"] = original or header.get(f"{arch}.context_length", int)
            if arch == "gpt-oss":
                rope["truncate"] = False  # its makers do not round the ends of the ramp
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
    found = read_tensor(place, torch.float32) if place.shape == (head_dim // 2,) else torch.empty(0)
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


def _phi3_rope(header: GgufHeader, head_dim: int) -> dict[str, Any]:
    """Return the settings of rotations, with factors for short and for long contexts if the file has them."""
    rotated = header.get("phi3.rope.dimension_count", int, head_dim)
    rope: dict[str, Any] = {"partial_rotary_factor": rotated / head_dim}
    factors = {}
    for name, stored in _LONGROPE.items():
        if (place := header.tensors.get(stored)) is not None:
            if place.shape != (rotated // 2,):
                raise GgufError(header.path, f"the tensor {stored!r} has the shape {list(place.shape)}")
            factors[name] = read_tensor(place, torch.float32).tolist()
    if not factors:
        return rope
    if missing := sorted(set(_LONGROPE.values()) - set(header.tensors)):
        raise GgufError(header.path, f"the tensor {missing[0]!r} is missing")
    original = header.get("phi3.rope.scaling.original_context_length", int)
    if original is None or original < 1:
        raise GgufError(header.path, "phi3.rope.scaling.original_context_length is missing from the metadata")
    rope |= {"rope_type": "longrope", "original_max_position_embeddings": original, **factors}
    if "phi3.rope.scaling.attn_factor" in header.metadata:
        rope["attention_factor"] = _positive(header, "phi3.rope.scaling.attn_factor", None)
    return rope


def _gemma_fields(header: GgufHeader, arch: str, size: _Sizes, fields: Mapping[str, Any]) -> dict[str, Any]:
    num_layers = fields["num_hidden_layers"]
    period = header.get(f"{arch}.attention.sliding_window_pattern", int, _GEMMA_PERIODS[arch])
    if period < 1:
        raise GgufError(header.path, f"{arch}.attention.sliding_window_pattern is {period}, not a number of at least 1")
    is_27b = num_layers == _GEMMA_27B_LAYERS[arch]
    return {
        "sliding_window": size("attention.sliding_window", _GEMMA_2_WINDOW if arch == "gemma2" else None),
        "layer_types": ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(num_layers)],
        "query_pre_attn_scalar": fields["hidden_size"] // fields["num_attention_heads"]
        if is_27b
        else fields["head_dim"],
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": header.get(f"{arch}.final_logit_softcapping", float, _GEMMA_CAPS[arch][0]),
        "attn_logit_softcapping": header.get(f"{arch}.attn_logit_softcapping", float, _GEMMA_CAPS[arch][1]),
    }

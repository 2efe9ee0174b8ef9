"""Conversion of a GGUF file's metadata to a Hugging Face configuration, and the tensors that such a model must have."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from specinfer.model.gguf.architectures import ARCHITECTURES, plan_weights
from specinfer.model.gguf.families import FAMILIES
from specinfer.model.gguf.header import GgufError, GgufHeader, TensorPlace, read_header
from specinfer.model.gguf.metadata import TAKE_ANOTHER, Metadata
from specinfer.model.gguf.rope import LLAMA3, LONGROPE, read_rope
from specinfer.model.gguf.weights import GgufSource, JoinedSource, Weight
from specinfer.model.stacked_source import StackedSource

_EXPERT = re.compile(r"(?P<layer>.*\.experts)\.(?P<number>\d+)\.(?P<kind>gate|up|down)_proj\.(?P<end>weight|bias)")
_BLOCK = re.compile(r"blk\.(\d+)\.")
# Matrices of 32 bits in files of all types: convolutions, what recurrences decay by, and routers.
_EXACT = re.compile(r".*\.(ssm_(a|d|conv1d.*|norm)|shortconv\.conv|ffn_gate_inp.*)(\.weight)?")
_Sources = dict[str, GgufSource | StackedSource | JoinedSource]
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
    if arch not in ARCHITECTURES and arch not in FAMILIES:
        known = ", ".join(sorted({*ARCHITECTURES, *FAMILIES}))
        raise GgufError(
            header.path, f"models of architecture {arch!r} are not read from GGUF ({known} are)", TAKE_ANOTHER
        )
    meta = Metadata(header, arch)
    if "token_embd.weight" not in header.tensors:
        raise meta.error("the tensor 'token_embd.weight' is missing")
    fields = _common_fields(meta)
    fields |= FAMILIES[arch].read_fields(meta, fields) if arch in FAMILIES else _attention_fields(meta, fields)
    _check_tensors(meta, fields["num_hidden_layers"], _plan(header, fields))
    return fields


def _plan(header: GgufHeader, fields: Mapping[str, Any]) -> Iterable[tuple[str, Weight]]:
    arch = header.metadata["general.architecture"]
    return FAMILIES[arch].plan(fields, header.tensors) if arch in FAMILIES else plan_weights(arch, fields)


def _common_fields(meta: Metadata) -> dict[str, Any]:
    header, num_layers = meta.header, meta.size("block_count")
    if num_layers > len(header.tensors):
        raise meta.error(f"{meta.arch}.block_count is {num_layers}, and there are {len(header.tensors)} tensors")
    num_mtp_layers = meta.get("nextn_predict_layers", int, 0)  # after the last layer of the model itself
    if not 0 <= num_mtp_layers < num_layers:
        raise meta.error(f"{meta.arch}.nextn_predict_layers is {num_mtp_layers}, of {num_layers} layers")
    fields = {
        "dtype": str(own_dtype(header)).removeprefix("torch."),
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "hidden_size": meta.size("embedding_length"),
        "num_hidden_layers": num_layers - num_mtp_layers,
        "max_position_embeddings": meta.size("context_length"),
        "rms_norm_eps": meta.positive("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        fields[f"{name}_token_id"] = token_id(header, f"{key}_token_id")
    return fields


def _attention_fields(meta: Metadata, common: Mapping[str, Any]) -> dict[str, Any]:
    arch, size, hidden = meta.arch, meta.size, common["hidden_size"]
    heads = size("attention.head_count")
    rotated = size("rope.dimension_count", hidden // heads)
    head_dim = size("attention.key_length", hidden // heads if arch == "phi3" else rotated)
    for name in ("attention.value_length", "rope.dimension_count"):
        # In Phi 3, only a part of a head may be rotated.
        if (found := size(name, head_dim)) != head_dim and (arch != "phi3" or found % 2 or found > head_dim):
            raise meta.error(f"{arch}.{name} is not the size of a head, {head_dim}", TAKE_ANOTHER)
    rope, kv_heads = read_rope(meta, head_dim), size("attention.head_count_kv", heads)
    meta.check_heads(heads, kv_heads)
    fields = {
        "model_type": ARCHITECTURES[arch].family,
        "architectures": [ARCHITECTURES[arch].model_class],
        "intermediate_size": size("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rope_parameters": rope,
    }
    if arch in ("gemma2", "gemma3"):
        fields |= _gemma_fields(meta, {**common, **fields})
    elif arch == "llama":
        fields["attention_bias"] = "blk.0.attn_q.bias" in meta.header.tensors
    elif arch == "gpt-oss":
        fields |= {
            **meta.experts("num_local_experts"),
            "intermediate_size": size("expert_feed_forward_length"),
            "sliding_window": size("attention.sliding_window"),
        }
    elif arch == "phi3":
        window = meta.get("attention.sliding_window", int, 0)
        fields |= {"sliding_window": size("attention.sliding_window") if window else None}
        if "original_max_position_embeddings" in rope:
            fields["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    elif arch == "qwen3moe":
        fields |= {
            **meta.experts("num_experts"),
            "moe_intermediate_size": size("expert_feed_forward_length"),
            "norm_topk_prob": True,
        }
    return fields


def gguf_sources(path: Path, dtype: torch.dtype | None) -> _Sources:
    """Return the weights of a file by their names in the model, decoded to `dtype` or to the file's own type.

    Raises:
        GgufError: The file cannot be used.
    """
    header = read_header(path)
    config = read_config(header)
    arch = header.metadata["general.architecture"]
    dtype = own_dtype(header) if dtype is None else dtype
    pieces: dict[str, list[GgufSource]] = defaultdict(list)
    for stored, one in _plan(header, config):
        pieces[one.name].append(GgufSource(_place(header, stored, one), one, dtype))
    sources = {name: found[0] if len(found) == 1 else JoinedSource(found) for name, found in pieces.items()}
    stacks = (FAMILIES[arch] if arch in FAMILIES else ARCHITECTURES[arch]).stacks_experts
    return _stacked(sources, is_transposed=arch in ARCHITECTURES) if stacks else {**sources}


def _stacked(sources: Mapping[str, GgufSource | JoinedSource], *, is_transposed: bool) -> _Sources:
    """Return the sources with one for the matrices of all experts, and for their biases.

    Args:
        is_transposed: Whether stacks are transposed, and have gates beside values; or gates before values.
    """
    result: _Sources = {}
    has_gates = any(".gate_proj" in name for name in sources if _EXPERT.fullmatch(name))
    stacks: dict[str, dict[int, list[Any]]] = {}
    for name, source in sources.items():
        if (found := _EXPERT.fullmatch(name)) is None:
            result[name] = source
            continue
        kind = "gate_up_proj" if has_gates and found["kind"] != "down" else f"{found['kind']}_proj"
        whole = f"{found['layer']}.{kind}{'_bias' if found['end'] == 'bias' else ''}"
        stacks.setdefault(whole, {}).setdefault(int(found["number"]), []).append(source)
    for name, experts in stacks.items():
        result[name] = StackedSource([parts for _, parts in sorted(experts.items())], is_transposed)
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
    kinds = {
        place.kind.name for name, place in header.tensors.items() if len(place.shape) > 1 and not _EXACT.fullmatch(name)
    }
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


def _check_tensors(meta: Metadata, num_layers: int, plan: Iterable[tuple[str, Weight]]) -> None:
    """Refuse a file whose tensors do not match its configuration, before either is used."""
    tensors, known = meta.header.tensors, {LLAMA3, *LONGROPE.values()}
    for name, weight in plan:
        if name not in tensors:
            raise meta.error(f"the tensor {name!r} is missing")
        shape, wanted = tensors[name].shape, weight.stored_shape
        if _without_ones(shape) != _without_ones(wanted):
            raise meta.error(
                f"the tensor {name!r} has the shape {list(shape)}, and the metadata ask for {list(wanted)}"
            )
        known.add(name)
    # Layers for several tokens after the last one come last, and are not read.
    if meta.get("nextn_predict_layers", int, 0):
        known |= {name for name in tensors if (found := _BLOCK.match(name)) and int(found[1]) >= num_layers}
    if others := sorted(tensors.keys() - known):
        raise meta.error(f"the tensor {others[0][:80]!r} has no place in such a model", TAKE_ANOTHER)


def _without_ones(shape: Sequence[int]) -> list[int]:
    """Return the sizes that converters neither leave out nor add."""
    return [size for size in shape if size != 1]


def _gemma_fields(meta: Metadata, fields: Mapping[str, Any]) -> dict[str, Any]:
    arch, num_layers = meta.arch, fields["num_hidden_layers"]
    period = meta.get("attention.sliding_window_pattern", int, _GEMMA_PERIODS[arch])
    if period < 1:
        raise meta.error(f"{arch}.attention.sliding_window_pattern is {period}, not a number of at least 1")
    is_27b = num_layers == _GEMMA_27B_LAYERS[arch]
    return {
        "sliding_window": meta.size("attention.sliding_window", _GEMMA_2_WINDOW if arch == "gemma2" else None),
        "layer_types": ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(num_layers)],
        "query_pre_attn_scalar": fields["hidden_size"] // fields["num_attention_heads"]
        if is_27b
        else fields["head_dim"],
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": meta.get("final_logit_softcapping", float, _GEMMA_CAPS[arch][0]),
        "attn_logit_softcapping": meta.get("attn_logit_softcapping", float, _GEMMA_CAPS[arch][1]),
    }

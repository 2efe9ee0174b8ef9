"""Tiny GGUF files, written by the library that llama.cpp's own tools use."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from tiny import make_model, make_tokenizer

CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
_ROLES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.router": "ffn_gate_inp",
    "self_attn.sinks": "attn_sinks",
}
_GEMMA_ROLES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GPT_OSS_ROLES = {"post_attention_layernorm": "post_attention_norm"}
_OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_model(
    path: Path, arch: str = "llama", kind: str = "F32", seed: int = 0, kinds: Mapping[str, str] = {}, **changes: Any
) -> Any:
    """Write a random model, and return it as transformers has it, with the weights that the file holds.

    Args:
        kind: The type of its matrices; a row must hold whole blocks.
        kinds: Types of some matrices, by the ends of their names in the file without ".weight".
        changes: Of the metadata by their names in the file, with "__" for a dot; None: left out. A name that is
            a field of the model's configuration changes that.
    """
    sizes = {name: value for name, value in changes.items() if "__" not in name}
    families = {"gemma3": "gemma3_text", "qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss"}
    model = make_model(families.get(arch, arch), seed, **sizes)
    if arch.startswith("gemma"):
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.data.normal_(0.0, 0.2)
    metadata = _metadata(arch, model.config)
    metadata |= {name.replace("__", "."): value for name, value in changes.items() if "__" in name}
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        add(writer, key, value)
    for name, weight in _matrices(model):
        stored_name, blocks = _stored_name(name, arch), None
        stored = gguf.GGMLQuantizationType[kind]
        for end, other in kinds.items():
            if stored_name.removesuffix(".weight").endswith(end):
                stored = gguf.GGMLQuantizationType[other]
        if weight.ndim > 1 and not name.endswith("bias"):
            blocks = blocks_of(weight.detach().numpy(), stored)
            weight.data.copy_(torch.from_numpy(gguf.quants.dequantize(blocks, stored)))
            if stored.name == "NVFP4":
                _write_factors(writer, stored_name.removesuffix("weight"), weight.data)
        given = weight.detach().clone() if blocks is None else torch.from_numpy(blocks)
        data = _as_stored(name, given, arch, model.config).numpy()
        writer.add_tensor(stored_name, data, raw_dtype=None if blocks is None else stored)
    for kind in ("short", "long"):
        if f"{kind}_factor" in model.config.rope_parameters:
            factors = np.array(model.config.rope_parameters[f"{kind}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{kind}.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _write_factors(writer: gguf.GGUFWriter, name: str, weight: torch.Tensor) -> None:
    """Write a factor for a matrix, or for each of a stack, with another one for inputs; multiply the weights by it."""
    factors = torch.linspace(0.75, 1.3, len(weight)) if weight.ndim == 3 else torch.tensor([0.9])
    weight *= factors.view(-1, *[1] * (weight.ndim - 1))
    writer.add_tensor(f"{name}scale", factors.numpy())
    writer.add_tensor(f"{name}input_scale", (factors * 100).numpy())


def _matrices(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights by name, with stacked gates and values of experts apart, as views."""
    for name, weight in model.named_parameters():
        if ".experts." in name and model.config.model_type == "gpt_oss":
            yield from _apart(name, weight)
        elif name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), weight.data.chunk(2, dim=1), strict=True):
                yield name.replace("gate_up", part) + ".weight", half
        else:
            yield name if name.endswith(("weight", "bias")) else f"{name}.weight", weight


def _apart(name: str, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The same of gpt-oss, whose stacks are transposed, with gates and values in turn."""
    whole, end = name.removesuffix("_bias"), "bias" if name.endswith("_bias") else "weight"
    data = weight.data.mT if end == "weight" else weight.data
    if whole.endswith("gate_up_proj"):
        yield f"{whole.replace('gate_up', 'gate')}.{end}", data[:, ::2]
        yield f"{whole.replace('gate_up', 'up')}.{end}", data[:, 1::2]
    else:
        yield f"{whole}.{end}", data


def _metadata(arch: str, config: Any) -> dict[str, Any]:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    return {
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.value_length": head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{arch}.attention.sliding_window": getattr(config, "sliding_window", None),
        f"{arch}.attn_logit_softcapping": getattr(config, "attn_logit_softcapping", None),
        f"{arch}.final_logit_softcapping": getattr(config, "final_logit_softcapping", None),
        f"{arch}.expert_count": getattr(config, "num_experts", getattr(config, "num_local_experts", None)),
        f"{arch}.expert_used_count": getattr(config, "num_experts_per_tok", None),
        f"{arch}.expert_feed_forward_length": getattr(
            config, "moe_intermediate_size", config.intermediate_size if arch == "gpt-oss" else None
        ),
        f"{arch}.rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        f"{arch}.rope.freq_base": float(rope["rope_theta"]),
        f"{arch}.rope.scaling.type": rope["rope_type"] if rope["rope_type"] == "yarn" else None,
        f"{arch}.rope.scaling.factor": rope.get("factor"),
        f"{arch}.rope.scaling.original_context_length": rope.get("original_max_position_embeddings"),
    } | tokenizer_metadata()


def tokenizer_metadata() -> dict[str, Any]:
    """The tokenizer of tiny models."""
    tokenizer = make_tokenizer()
    tokens = [tokenizer.convert_ids_to_tokens(i) for i in range(len(tokenizer))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3] + [1] * (len(tokens) - 2),
        "tokenizer.ggml.merges": _merges_of(tokenizer.backend_tokenizer.model),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def _merges_of(model: Any) -> list[str]:
    return [" ".join(pair) if isinstance(pair, list) else pair for pair in json.loads(model.__getstate__())["merges"]]


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _stored_name(name: str, arch: str) -> str:
    name, suffix = name.rsplit(".", 1)
    if name in _OUTSIDE:
        return f"{_OUTSIDE[name]}.{suffix}"
    _, _, number, role = name.split(".", 3)
    roles = _ROLES | (_GEMMA_ROLES if arch.startswith("gemma") else {})
    roles |= _GPT_OSS_ROLES if arch == "gpt-oss" else {}
    return f"blk.{number}.{roles[role]}.{suffix}"


def _as_stored(name: str, weight: torch.Tensor, arch: str, config: Any) -> torch.Tensor:
    """What llama.cpp's converter changes: rows of q and k of llama, norms of Gemma."""
    if arch.startswith("gemma") and "norm" in name:
        return weight + 1
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if arch != "llama" or not heads:
        return weight
    return weight.view(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape).contiguous()


def write_parts(path: Path, count: int) -> list[Path]:
    """Split a file as llama-gguf-split does, and return the parts; only the first has metadata of the model."""
    reader = gguf.GGUFReader(path)
    parts = []
    for number in range(count):
        parts.append(path.with_name(f"{path.stem}-{number + 1:05d}-of-{count:05d}.gguf"))
        writer = gguf.GGUFWriter(parts[-1], "llama")
        if number == 0:
            for key, field in reader.fields.items():
                if not key.startswith("GGUF.") and key != "general.architecture":
                    add(writer, key, field.contents())
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[number::count]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return parts


def blocks_of(weight: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Return the weights in blocks, or random ones of the same size where the library cannot quantize."""
    try:
        return gguf.quants.quantize(np.ascontiguousarray(weight), kind)
    except NotImplementedError:
        num_rows = int(np.prod(weight.shape[:-1]))
        rows = random_blocks(kind, num_rows, weight.shape[-1] // gguf.GGML_QUANT_SIZES[kind][0])
        size = np.abs(gguf.quants.dequantize(scaled(rows, kind, 1.0), kind)).std()
        return scaled(rows, kind, float(weight.std() / size)).reshape(*weight.shape[:-1], -1)


# Where a block has its float16 scales, and those of what is added or subtracted.
_SCALES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
           "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,)}  # fmt: skip


def scaled(rows: np.ndarray, kind: gguf.GGMLQuantizationType, scale: float) -> np.ndarray:
    """[rows, bytes] with this scale, and for what is added or subtracted ten times that, up to a half more or less."""
    blocks = rows.reshape(len(rows), -1, gguf.GGML_QUANT_SIZES[kind][1]).copy()
    factors = np.random.default_rng(1).uniform(0.5, 1.5, (2, *blocks.shape[:2]))
    if kind.name == "MXFP4":
        blocks[..., 0] = 127 + np.round(np.log2(scale * factors[0]))
    if kind.name == "NVFP4":
        blocks[..., :4] = gguf.quants.NVFP4.fp32_to_ue4m3(scale * factors[0])[..., None]
    for at, factor, more in zip(_SCALES.get(kind.name, ()), factors, (1, 10), strict=False):
        blocks[..., at : at + 2] = (scale * more * factor).astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(rows.shape)


def random_blocks(kind: gguf.GGMLQuantizationType, num_rows: int, num_blocks: int) -> np.ndarray:
    """[num_rows, bytes of a row]; random codes, with scales that are numbers."""
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(0).integers(0, 256, (num_rows, num_blocks * block_bytes), dtype=np.uint8)
    return data & 0x3B if kind.name in ("F16", "BF16", "F32") else data

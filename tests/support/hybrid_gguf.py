"""Tiny GGUF files of models with recurrent layers, as llama.cpp's converter writes them.

The converter's changes are written here from its formulas, apart from the package's code that undoes them.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING

from gguf_files import add, blocks_of, tokenizer_metadata
from tiny import make_model

_OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_ATTENTION = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
_GATED = {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}
_DELTA = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm",
    **{f"self_attn.{name}": stored for name, stored in _ATTENTION.items()},
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    **{f"mlp.{name}": stored for name, stored in _GATED.items()},
    **{f"mlp.experts.{name}": f"{stored}_exps" for name, stored in _GATED.items()},
    **{f"mlp.shared_expert.{name}": f"{stored}_shexp" for name, stored in _GATED.items()},
    "mlp.gate": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "linear_attn.conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm", "linear_attn.out_proj": "ssm_out",
    "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.in_proj_ba": "ssm_ba", "linear_attn.in_proj_qkvz": "ssm_in",
    "linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias",
}  # fmt: skip
# Not quantized, whatever the file's type.
_EXACT = {
    "ssm_conv1d",
    "ssm_conv1d_q",
    "ssm_conv1d_k",
    "ssm_conv1d_v",
    "ssm_a",
    "ssm_d",
    "ssm_norm",
    "shortconv.conv",
    "ffn_gate_inp",
    "ffn_gate_inp_shexp",
}


_EPSILONS = ("rms_norm_eps", "norm_eps", "layer_norm_epsilon")


class _Architecture(NamedTuple):
    """How the converter writes a kind of model.

    Attributes:
        roles: Names in the file of weights in layers, without ".weight".
        change: Function of a weight's name in the file, of itself and of the configuration, that yields what is stored.
        metadata: Function of the configuration.
    """

    family: str
    roles: Mapping[str, str]
    change: Callable[[str, Tensor, Any], Iterator[tuple[str, Tensor]]]
    metadata: Callable[[Any], dict[str, Any]]
    outside: Mapping[str, str] = _OUTSIDE


def is_known(arch: str) -> bool:
    """Whether transformers has the family."""
    return _ARCHITECTURES[arch].family in CONFIG_MAPPING


def write_hybrid(
    path: Path,
    arch: str,
    kind: str = "F32",
    kinds: Mapping[str, str] = {},
    seed: int = 0,
    rewrite: Callable[[dict[str, Tensor], Any], None] = lambda *_: None,
    **changes: Any,
) -> Any:
    """Write a random model, and return it as transformers has it; arguments as for `gguf_files.write_model`.

    `rewrite` changes the file's tensors in place; its second argument is the model.

    A file of quantized weights is `path`; one of the same numbers in float32 is beside it, as `path.stem`-exact.gguf.
    """
    how = _ARCHITECTURES[arch]
    family = changes.pop("family", how.family)
    model = make_model(family, seed, **{name: value for name, value in changes.items() if "__" not in name})
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            if weight.ndim == 1 and "A_log" not in name:
                weight += torch.randn_like(weight) * 0.2
    metadata = _metadata(arch, model.config) | how.metadata(model.config) | tokenizer_metadata()
    metadata |= {name.replace("__", "."): value for name, value in changes.items() if "__" in name}
    tensors = dict(_stored(how, model))
    rewrite(tensors, model)
    quantized = {name: _kind_of(name, tensor, kind, kinds) for name, tensor in tensors.items()}
    _write(path, arch, metadata, tensors, quantized)
    if kind != "F32":
        exact = {name: _rounded(tensor, quantized[name]) for name, tensor in tensors.items()}
        _write(path.with_name(f"{path.stem}-exact.gguf"), arch, metadata, exact, {})
    return model


def _stored(how: _Architecture, model: Any) -> Iterator[tuple[str, Tensor]]:
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if name in how.outside:
            yield from how.change(how.outside[name], weight, model.config)
            continue
        layer, role = name.split(".layers.")[1].split(".", 1)
        role, end = (role.removesuffix(".weight"), ".weight") if role.endswith(".weight") else (role, "")
        if role.endswith(".bias"):
            role, end = role.removesuffix(".bias"), ".bias"
        if role.endswith("experts.gate_up_proj"):
            for kind, part in zip(("gate", "up"), weight.chunk(2, dim=1), strict=True):
                stored = how.roles[role.replace("gate_up", kind)]
                yield from how.change(f"blk.{layer}.{stored}.weight", part, model.config)
            continue
        stored = how.roles[role]
        end = ".weight" if "experts" in role and not end else end
        yield from how.change(f"blk.{layer}.{stored}{end}", weight, model.config)


def _kind_of(name: str, tensor: Tensor, kind: str, kinds: Mapping[str, str]) -> gguf.GGMLQuantizationType:
    if tensor.ndim < 2 or name.removesuffix(".weight").split(".", 2)[-1] in _EXACT:
        return gguf.GGMLQuantizationType.F32
    found = next((other for end, other in kinds.items() if name.removesuffix(".weight").endswith(end)), kind)
    return gguf.GGMLQuantizationType[found]


def _rounded(tensor: Tensor, kind: gguf.GGMLQuantizationType) -> Tensor:
    if kind == gguf.GGMLQuantizationType.F32:
        return tensor
    return torch.from_numpy(gguf.quants.dequantize(blocks_of(tensor.numpy(), kind), kind))


def _write(path: Path, arch: str, metadata: Mapping[str, Any], tensors: Any, kinds: Mapping[str, Any]) -> None:
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        add(writer, key, value)
    for name, tensor in tensors.items():
        kind = kinds.get(name, gguf.GGMLQuantizationType.F32)
        data = tensor.contiguous().numpy()
        if kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, data)
        else:
            writer.add_tensor(name, blocks_of(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _metadata(arch: str, config: Any) -> dict[str, Any]:
    """The metadata that the converter writes for models with attention."""
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    return {
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.context_length": getattr(config, "max_position_embeddings", 2**20),
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": getattr(config, "intermediate_size", 0),
        f"{arch}.attention.head_count": getattr(config, "num_attention_heads", 0),
        f"{arch}.attention.head_count_kv": getattr(config, "num_key_value_heads", None),
        f"{arch}.attention.key_length": getattr(config, "head_dim", None),
        f"{arch}.attention.value_length": getattr(config, "head_dim", None),
        f"{arch}.attention.layer_norm_rms_epsilon": float(
            next(getattr(config, name) for name in _EPSILONS if hasattr(config, name))
        ),
        f"{arch}.rope.freq_base": None if not rope else float(rope["rope_theta"]),
        f"{arch}.expert_count": getattr(config, "num_experts", getattr(config, "num_local_experts", None)),
        f"{arch}.expert_used_count": getattr(config, "num_experts_per_tok", None),
        f"{arch}.expert_feed_forward_length": getattr(config, "moe_intermediate_size", None),
    }  # fmt: skip


# ------------------------------------------------------------------------------- Qwen3-Next and Qwen3.5


def _delta_metadata(arch: str) -> Callable[[Any], dict[str, Any]]:
    def metadata(config: Any) -> dict[str, Any]:
        heads = config.linear_num_value_heads
        return {
            f"{arch}.rope.dimension_count": int(config.head_dim * config.rope_parameters["partial_rotary_factor"]),
            f"{arch}.rope.dimension_sections": [11, 11, 10, 0] if arch != "qwen3next" else None,
            f"{arch}.ssm.conv_kernel": config.linear_conv_kernel_dim,
            f"{arch}.ssm.state_size": config.linear_key_head_dim,
            f"{arch}.ssm.group_count": config.linear_num_key_heads,
            f"{arch}.ssm.time_step_rank": heads,
            f"{arch}.ssm.inner_size": heads * config.linear_value_head_dim,
            f"{arch}.full_attention_interval": config.layer_types.index("full_attention") + 1,
            f"{arch}.expert_shared_feed_forward_length": getattr(config, "shared_expert_intermediate_size", None),
        }

    return metadata


def _next_change(name: str, weight: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    if name.endswith("ssm_a"):
        weight = -torch.exp(weight)
    elif "conv1d" in name:
        weight = weight.squeeze()
    elif name.endswith("norm.weight") and "ssm_norm" not in name:
        weight = weight + 1
    if not name.endswith("ssm_in.weight"):
        yield name, weight
        return
    heads, dim = config.linear_num_key_heads, config.linear_key_head_dim
    each = config.linear_num_value_heads // heads * config.linear_value_head_dim
    rows: list[list[Tensor]] = [[], [], [], []]
    for of_head in weight.chunk(heads):
        for found, part in zip(rows, of_head.split([dim, dim, each, each]), strict=True):
            found.append(part)
    yield name.replace("ssm_in", "attn_qkv"), torch.cat([*rows[0], *rows[1], *rows[2]])
    yield name.replace("ssm_in", "attn_gate"), torch.cat(rows[3])


def _qwen35_change(name: str, weight: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    keys, dim = config.linear_num_key_heads, config.linear_value_head_dim
    repeats = config.linear_num_value_heads // keys
    order = [key * repeats + repeat for repeat in range(repeats) for key in range(keys)]  # stored heads' numbers
    before = 2 * keys * config.linear_key_head_dim

    def tiled(rows: Tensor, size: int) -> Tensor:
        heads = rows.split(size)
        return torch.cat([heads[number] for number in order])

    role = name.split(".")[2] if name.startswith("blk") else name
    if role in ("attn_qkv", "ssm_conv1d"):
        weight = torch.cat([weight[:before], tiled(weight[before:], dim)])
    elif role == "attn_gate":
        weight = tiled(weight, dim)
    elif role in ("ssm_beta", "ssm_alpha", "ssm_a", "ssm_dt"):
        weight = tiled(weight, 1)
    elif role == "ssm_out":
        weight = tiled(weight.T, dim).T
    yield from _next_change(name, weight, config)


# ------------------------------------------------------------------- Granite 4, Nemotron-H, Falcon-H1, Mamba-2

_MIXER = {
    "in_proj": "ssm_in", "conv1d": "ssm_conv1d", "A_log": "ssm_a", "D": "ssm_d", "dt_bias": "ssm_dt.bias",
    "norm": "ssm_norm", "out_proj": "ssm_out",
}  # fmt: skip
_LLAMA = {f"self_attn.{name}": stored for name, stored in _ATTENTION.items()}
_GRANITE = _LLAMA | {f"mamba.{name}": stored for name, stored in _MIXER.items()} | {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "block_sparse_moe.router": "ffn_gate_inp",
    **{f"block_sparse_moe.experts.{name}": f"{stored}_exps" for name, stored in _GATED.items()},
    "shared_mlp.input_linear": "ffn_both_shexp", "shared_mlp.output_linear": "ffn_down_shexp",
}  # fmt: skip
_NEMOTRON = {f"mixer.{name}": stored for name, stored in (_MIXER | _ATTENTION | _GATED).items()} | {
    "norm": "attn_norm", "mixer.gate": "ffn_gate_inp", "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
    **{f"mixer.experts.{name}": f"{stored}_exps" for name, stored in _GATED.items()},
    **{f"mixer.shared_experts.{name}": f"{stored}_shexp" for name, stored in _GATED.items()},
    "mixer.fc1_latent_proj": "ffn_latent_down", "mixer.fc2_latent_proj": "ffn_latent_up",
}  # fmt: skip
_FALCON = _LLAMA | {f"mamba.{name}": stored for name, stored in _MIXER.items()} | {
    "input_layernorm": "attn_norm", "pre_ff_layernorm": "ffn_norm",
    **{f"feed_forward.{name}": stored for name, stored in _GATED.items()},
}  # fmt: skip
_MAMBA = {f"mixer.{name}": stored for name, stored in _MIXER.items()} | {"norm": "attn_norm"}


def _mamba_change(name: str, weight: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    if name.endswith(".ssm_a"):
        weight = -torch.exp(weight).unsqueeze(-1)
    elif name.endswith(".ssm_d"):
        weight = weight.unsqueeze(-1)
    elif name.endswith("conv1d.weight"):
        weight = weight.squeeze()
    elif "ssm_norm" in name:
        weight = weight.view(getattr(config, "mamba_n_groups", getattr(config, "n_groups", None)), -1)
    yield name, weight


def _in_pairs(weight: Tensor, heads: int) -> Tensor:
    """Rows of each head: the first of its lower half, the first of its upper half, and so on."""
    of_heads = weight.chunk(heads)
    return torch.cat([
        row for one in of_heads for pair in zip(*one.chunk(2), strict=True) for row in (pair[0][None], pair[1][None])
    ])  # fmt: skip


def _granite_change(name: str, weight: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    if "attn_q" in name:
        weight = _in_pairs(weight, config.num_attention_heads)
    elif "attn_k" in name:
        weight = _in_pairs(weight, config.num_key_value_heads)
    if not getattr(config, "num_local_experts", 0) and hasattr(config, "shared_intermediate_size"):
        name = name.replace("_shexp", "")
    if "ffn_both" in name:
        for kind, part in zip(("gate", "up"), weight.chunk(2), strict=True):
            yield name.replace("both", kind), part
    else:
        yield from _mamba_change(name, weight, config)


def _granite_metadata(config: Any) -> dict[str, Any]:
    arch = "granitehybrid"
    return {
        f"{arch}.attention.head_count_kv": _kv_heads(config),
        f"{arch}.attention.scale": float(config.attention_multiplier),
        f"{arch}.embedding_scale": float(config.embedding_multiplier),
        f"{arch}.residual_scale": float(config.residual_multiplier),
        f"{arch}.logit_scale": float(config.logits_scaling),
        f"{arch}.rope.scaling.finetuned": config.position_embedding_type == "rope",
        f"{arch}.expert_shared_feed_forward_length": config.shared_intermediate_size,
        f"{arch}.attention.key_length": None,
        f"{arch}.attention.value_length": None,
        **_ssm(arch, config.mamba_n_heads, config.mamba_d_head, config.mamba_n_groups, config.mamba_d_state),
    }


def _kv_heads(config: Any) -> list[int]:
    return [config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types]


def _ssm(arch: str, heads: int, dim: int, groups: int, state: int) -> dict[str, Any]:
    return {
        f"{arch}.ssm.conv_kernel": 4,
        f"{arch}.ssm.inner_size": heads * dim,
        f"{arch}.ssm.state_size": state,
        f"{arch}.ssm.time_step_rank": heads,
        f"{arch}.ssm.group_count": groups,
    }


def _nemotron_metadata(arch: str) -> Callable[[Any], dict[str, Any]]:
    def metadata(config: Any) -> dict[str, Any]:
        widths = {"mlp": config.intermediate_size, "moe": config.moe_intermediate_size}
        has_experts = "moe" in config.layer_types
        return {
            f"{arch}.attention.head_count_kv": _kv_heads(config),
            f"{arch}.feed_forward_length": [widths.get(kind, 0) for kind in config.layer_types],
            f"{arch}.expert_count": config.n_routed_experts if has_experts else None,
            f"{arch}.expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size,
            f"{arch}.expert_group_count": config.n_group,
            f"{arch}.expert_weights_norm": config.norm_topk_prob,
            f"{arch}.expert_weights_scale": float(config.routed_scaling_factor),
            f"{arch}.moe_latent_size": config.moe_latent_size,
            **_ssm(arch, config.mamba_num_heads, config.mamba_head_dim, config.n_groups, config.ssm_state_size),
        }

    return metadata


def _falcon_change(name: str, weight: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    role = name.split(".")[2] if name.startswith("blk") else name
    inside = config.attention_in_multiplier
    factors = {
        "attn_q": inside, "attn_k": inside * config.key_multiplier, "attn_v": inside,
        "attn_output": config.attention_out_multiplier, "ssm_out": config.ssm_out_multiplier,
        "ffn_gate": config.mlp_multipliers[0], "ffn_down": config.mlp_multipliers[1],
        "token_embd.weight": config.embedding_multiplier, "output.weight": config.lm_head_multiplier,
    }  # fmt: skip
    weight = weight * factors.get(role, 1.0)
    if role == "ssm_in":
        groups = config.mamba_n_groups * config.mamba_d_state
        sizes = [config.mamba_d_ssm, config.mamba_d_ssm, groups, groups, config.mamba_n_heads]
        parts = zip(weight.split(sizes), config.ssm_multipliers, strict=True)
        weight = torch.cat([part * config.ssm_in_multiplier * factor for part, factor in parts])
    name = name.removesuffix(".weight") if role == "ffn_norm" else name
    yield from _mamba_change(name, weight, config)


def _falcon_metadata(config: Any) -> dict[str, Any]:
    sizes = (config.mamba_n_heads, config.mamba_d_head, config.mamba_n_groups, config.mamba_d_state)
    return _ssm("falcon-h1", *sizes)


def _mamba_metadata(config: Any) -> dict[str, Any]:
    sizes = _ssm("mamba2", config.num_heads, config.head_dim, config.n_groups, config.state_size)
    return sizes | {"mamba2.attention.key_length": None, "mamba2.attention.value_length": None}


# ------------------------------------------------------------------------------------------------ LFM2

_LFM = {
    "operator_norm": "attn_norm", "ffn_norm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_output", "self_attn.q_layernorm": "attn_q_norm", "self_attn.k_layernorm": "attn_k_norm",
    "conv.conv": "shortconv.conv", "conv.in_proj": "shortconv.in_proj", "conv.out_proj": "shortconv.out_proj",
    "feed_forward.w1": "ffn_gate", "feed_forward.w3": "ffn_up", "feed_forward.w2": "ffn_down",
    "feed_forward.gate": "ffn_gate_inp", "feed_forward.expert_bias": "exp_probs_b.bias",
    **{f"feed_forward.experts.{name}": f"{stored}_exps" for name, stored in _GATED.items()},
}  # fmt: skip


def _lfm_change(name: str, weight: Tensor, _config: Any) -> Iterator[tuple[str, Tensor]]:
    yield name, weight.squeeze(1) if "shortconv.conv" in name else weight


def _lfm_metadata(arch: str) -> Callable[[Any], dict[str, Any]]:
    def metadata(config: Any) -> dict[str, Any]:
        width = 256 if arch == "lfm2" else config.intermediate_size  # adjusted by the definition
        return {
            f"{arch}.attention.head_count_kv": _kv_heads(config),
            f"{arch}.feed_forward_length": width,
            f"{arch}.shortconv.l_cache": config.conv_L_cache,
            f"{arch}.leading_dense_block_count": getattr(config, "num_dense_layers", None),
        }

    return metadata


# ---------------------------------------------------------------------------- Jamba, Mamba and Kimi Linear

_CHANNELS = _MIXER | {"x_proj": "ssm_x", "dt_proj": "ssm_dt"}
_JAMBA = _LLAMA | {f"mamba.{name}": stored for name, stored in _CHANNELS.items()} | {
    "input_layernorm": "attn_norm", "pre_ff_layernorm": "ffn_norm",
    **{f"mamba.{one}_layernorm": f"ssm_{one}_norm" for one in ("dt", "b", "c")},
    **{f"feed_forward.{name}": stored for name, stored in _GATED.items()},
    **{f"feed_forward.experts.{name}": f"{stored}_exps" for name, stored in _GATED.items()},
    "feed_forward.router": "ffn_gate_inp",
}  # fmt: skip
_OLD_MAMBA = {f"mixer.{name}": stored for name, stored in _CHANNELS.items()} | {"norm": "attn_norm"}
_KIMI = _LLAMA | {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.conv1d": "ssm_conv1d", "self_attn.b_proj": "ssm_beta", "self_attn.o_norm": "ssm_norm",
    "self_attn.g_a_proj": "ssm_g_a", "self_attn.g_b_proj": "ssm_g_b",
    "self_attn.forget_gate.A_log": "ssm_a", "self_attn.forget_gate.dt_bias": "ssm_dt.bias",
    "self_attn.forget_gate.f_a_proj": "ssm_f_a", "self_attn.forget_gate.f_b_proj": "ssm_f_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    **{f"mlp.{name}": stored for name, stored in _GATED.items()},
    **{f"mlp.experts.{name}": f"{stored}_exps" for name, stored in _GATED.items()},
    **{f"mlp.shared_experts.{name}": f"{stored}_shexp" for name, stored in _GATED.items()},
    "mlp.gate": "ffn_gate_inp", "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
}  # fmt: skip


def _channel_change(name: str, weight: Tensor, _config: Any) -> Iterator[tuple[str, Tensor]]:
    if name.endswith(".ssm_a"):
        weight = -torch.exp(weight)
    yield name, weight.squeeze() if name.endswith("conv1d.weight") else weight


def _kimi_change(name: str, weight: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    if "ssm_conv1d" in name:
        for one, part in zip("qkv", weight.chunk(3), strict=True):
            yield name.replace("conv1d", f"conv1d_{one}"), part.reshape(1, -1, 1, part.shape[-1])
    elif "attn_kv_b" in name:
        of_heads = weight.view(config.num_attention_heads, -1, weight.shape[1])
        keys, values = of_heads.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
        yield name.replace("kv_b", "k_b"), keys.transpose(1, 2)
        yield name.replace("kv_b", "v_b"), values
    else:
        yield name, -torch.exp(weight) if name.endswith(".ssm_a") else weight


def _jamba_metadata(config: Any) -> dict[str, Any]:
    sizes = (config.mamba_expand * config.hidden_size, config.mamba_d_state, config.mamba_dt_rank)
    return {"jamba.attention.head_count_kv": _kv_heads(config), **_of_channels("jamba", *sizes)}


def _of_channels(arch: str, inner: int, state: int, rank: int) -> dict[str, Any]:
    return {
        f"{arch}.ssm.conv_kernel": 4,
        f"{arch}.ssm.inner_size": inner,
        f"{arch}.ssm.state_size": state,
        f"{arch}.ssm.time_step_rank": rank,
    }


def _old_mamba_metadata(config: Any) -> dict[str, Any]:
    sizes = _of_channels("mamba", config.intermediate_size, config.state_size, config.time_step_rank)
    return sizes | {"mamba.ssm.dt_b_c_rms": config.model_type == "falcon_mamba"}


def _kimi_metadata(config: Any) -> dict[str, Any]:
    arch, rotated = "kimi-linear", config.qk_rope_head_dim
    return {
        f"{arch}.attention.head_count_kv": [int(kind == "full_attention") for kind in config.layer_types],
        f"{arch}.attention.key_length": config.kv_lora_rank + rotated,
        f"{arch}.attention.value_length": None,
        f"{arch}.attention.key_length_mla": config.qk_nope_head_dim + rotated,
        f"{arch}.attention.value_length_mla": config.v_head_dim,
        f"{arch}.attention.kv_lora_rank": config.kv_lora_rank,
        f"{arch}.rope.dimension_count": rotated,
        f"{arch}.kda.head_dim": config.linear_head_dim,
        f"{arch}.ssm.conv_kernel": config.linear_conv_kernel_dim,
        f"{arch}.leading_dense_block_count": config.mlp_layer_types.count("dense"),
        f"{arch}.expert_shared_count": config.n_shared_experts,
        f"{arch}.expert_weights_scale": float(config.routed_scaling_factor),
    }


# ------------------------------------------------------- models with attention in all layers

_PLAIN = _LLAMA | {f"mlp.{name}": stored for name, stored in _GATED.items()} | {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_up_proj": "ffn_up",
    "post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    **{f"mlp.experts.{name}": f"{stored}_exps" for name, stored in _GATED.items()},
    **{f"mlp.shared_expert.{name}": f"{stored}_shexp" for name, stored in _GATED.items()},
    "mlp.gate": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}  # fmt: skip
_GLM = _PLAIN | {
    "post_attention_layernorm": "post_attention_norm", "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    **{f"mlp.shared_experts.{name}": f"{stored}_shexp" for name, stored in _GATED.items()},
}  # fmt: skip
_OLMO = _PLAIN | {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}


def _pair_change(name: str, weight: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    heads = {"attn_q.weight": config.num_attention_heads, "attn_k.weight": config.num_key_value_heads}
    count = heads.get(name.split(".", 2)[-1])
    yield name, weight if count is None else _in_pairs(weight, count)


def _no_change(name: str, weight: Tensor, _config: Any) -> Iterator[tuple[str, Tensor]]:
    yield name, weight


def _plain_metadata(arch: str) -> Callable[[Any], dict[str, Any]]:
    def metadata(config: Any) -> dict[str, Any]:
        scales = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")
        names = ("attention.scale", "embedding_scale", "residual_scale", "logit_scale")
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        rotated = int(dim * config.rope_parameters.get("partial_rotary_factor", 1.0))
        positions = getattr(config, "position_embedding_type", "rope")
        return {
            f"{arch}.rope.dimension_count": rotated,
            f"{arch}.rope.scaling.finetuned": None if positions == "rope" else False,
            f"{arch}.expert_shared_feed_forward_length": getattr(
                config, "shared_expert_intermediate_size", getattr(config, "shared_intermediate_size", None)
            ),
            **{
                f"{arch}.{name}": float(getattr(config, scale))
                for name, scale in zip(names, scales, strict=True)
                if hasattr(config, scale)
            },
        }

    return metadata


def _glm_metadata(config: Any) -> dict[str, Any]:
    arch = "glm4moe"
    return _plain_metadata(arch)(config) | {
        f"{arch}.expert_count": config.n_routed_experts,
        f"{arch}.expert_shared_count": config.n_shared_experts,
        f"{arch}.leading_dense_block_count": config.first_k_dense_replace,
        f"{arch}.expert_gating_func": 2,
        f"{arch}.expert_weights_scale": float(config.routed_scaling_factor),
        f"{arch}.expert_weights_norm": config.norm_topk_prob,
    }


def _renamed(embeddings: str, norm: str, stored: str = "output_norm") -> dict[str, str]:
    return {
        f"{embeddings}.weight": "token_embd.weight",
        f"{norm}.weight": f"{stored}.weight",
        "lm_head.weight": "output.weight",
    }


_OF_LFM = _renamed("model.embed_tokens", "model.embedding_norm", "token_embd_norm")
_OF_NEMOTRON = _renamed("model.embeddings", "model.norm_f")
_ERNIE = _GLM | {
    "post_attention_layernorm": "ffn_norm", "mlp.gate.moe_statics.e_score_correction_bias": "exp_probs_b.bias",
}  # fmt: skip
_DEEPSEEK = _KIMI | {
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
}  # fmt: skip


def _ernie_change(name: str, weight: Tensor, _config: Any) -> Iterator[tuple[str, Tensor]]:
    yield name, weight.squeeze() if "exp_probs" in name else weight


def _ernie_metadata(config: Any) -> dict[str, Any]:
    arch = "ernie4_5-moe"
    return {
        f"{arch}.expert_count": config.moe_num_experts,
        f"{arch}.expert_used_count": config.moe_k,
        f"{arch}.expert_shared_count": config.moe_num_shared_experts,
        f"{arch}.expert_shared_feed_forward_length": config.intermediate_size // config.num_key_value_heads,
        f"{arch}.interleave_moe_layer_step": config.moe_layer_interval,
        f"{arch}.leading_dense_block_count": config.moe_layer_start_index,
    }


def _deepseek_metadata(config: Any) -> dict[str, Any]:
    arch, rotated, rope = "deepseek2", config.qk_rope_head_dim, config.rope_parameters
    return {
        f"{arch}.attention.head_count_kv": 1,
        f"{arch}.attention.key_length": config.kv_lora_rank + rotated,
        f"{arch}.attention.value_length": config.kv_lora_rank,
        f"{arch}.attention.key_length_mla": config.qk_nope_head_dim + rotated,
        f"{arch}.attention.value_length_mla": config.v_head_dim,
        f"{arch}.attention.kv_lora_rank": config.kv_lora_rank,
        f"{arch}.attention.q_lora_rank": config.q_lora_rank,
        f"{arch}.rope.dimension_count": rotated,
        f"{arch}.rope.scaling.type": rope["rope_type"] if "factor" in rope else None,
        f"{arch}.rope.scaling.factor": rope.get("factor"),
        f"{arch}.rope.scaling.original_context_length": rope.get("original_max_position_embeddings"),
        f"{arch}.rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"] if "factor" in rope else None,
        f"{arch}.leading_dense_block_count": config.first_k_dense_replace,
        f"{arch}.expert_count": config.n_routed_experts,
        f"{arch}.expert_group_count": config.n_group,
        f"{arch}.expert_group_used_count": config.topk_group,
        f"{arch}.expert_shared_count": config.n_shared_experts,
        f"{arch}.expert_weights_scale": float(config.routed_scaling_factor),
        f"{arch}.expert_weights_norm": config.norm_topk_prob,
        f"{arch}.expert_gating_func": 2,
    }


_ARCHITECTURES = {
    "qwen3next": _Architecture("qwen3_next", _DELTA, _next_change, _delta_metadata("qwen3next")),
    "qwen35": _Architecture("qwen3_5_text", _DELTA, _qwen35_change, _delta_metadata("qwen35")),
    "qwen35moe": _Architecture("qwen3_5_moe_text", _DELTA, _qwen35_change, _delta_metadata("qwen35moe")),
    "granitehybrid": _Architecture("granitemoehybrid", _GRANITE, _granite_change, _granite_metadata),
    "nemotron_h": _Architecture(
        "nemotron_h", _NEMOTRON, _granite_change, _nemotron_metadata("nemotron_h"), _OF_NEMOTRON
    ),
    "nemotron_h_moe": _Architecture(
        "nemotron_h", _NEMOTRON, _granite_change, _nemotron_metadata("nemotron_h_moe"), _OF_NEMOTRON
    ),
    "falcon-h1": _Architecture(
        "falcon_h1", _FALCON, _falcon_change, _falcon_metadata, _renamed("model.embed_tokens", "model.final_layernorm")
    ),
    "mamba2": _Architecture(
        "mamba2", _MAMBA, _mamba_change, _mamba_metadata, _renamed("backbone.embeddings", "backbone.norm_f")
    ),
    "lfm2": _Architecture("lfm2", _LFM, _lfm_change, _lfm_metadata("lfm2"), _OF_LFM),
    "lfm2moe": _Architecture("lfm2_moe", _LFM, _lfm_change, _lfm_metadata("lfm2moe"), _OF_LFM),
    "jamba": _Architecture(
        "jamba", _JAMBA, _channel_change, _jamba_metadata, _renamed("model.embed_tokens", "model.final_layernorm")
    ),
    "mamba": _Architecture(
        "mamba", _OLD_MAMBA, _channel_change, _old_mamba_metadata, _renamed("backbone.embeddings", "backbone.norm_f")
    ),
    "kimi-linear": _Architecture("kimi_linear", _KIMI, _kimi_change, _kimi_metadata),
    "deepseek2": _Architecture("deepseek_v3", _DEEPSEEK, _kimi_change, _deepseek_metadata),
    "ernie4_5": _Architecture("ernie4_5", _PLAIN | {"post_attention_layernorm": "ffn_norm"}, _no_change, lambda _: {}),
    "ernie4_5-moe": _Architecture("ernie4_5_moe", _ERNIE, _ernie_change, _ernie_metadata),
    "granite": _Architecture("granite", _PLAIN | _GRANITE, _granite_change, _plain_metadata("granite")),
    "smollm3": _Architecture("smollm3", _PLAIN, _pair_change, _plain_metadata("smollm3")),
    "olmo2": _Architecture("olmo2", _OLMO, _no_change, _plain_metadata("olmo2")),
    "glm4": _Architecture("glm4", _PLAIN, _no_change, _plain_metadata("glm4")),
    "glm4moe": _Architecture("glm4_moe", _GLM, _no_change, _glm_metadata),
    "granitemoe": _Architecture("granitemoe", _GRANITE, _granite_change, _plain_metadata("granitemoe")),
    "qwen2moe": _Architecture("qwen2_moe", _PLAIN, _no_change, _plain_metadata("qwen2moe")),
}

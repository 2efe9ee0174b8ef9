"""How llama.cpp's converter writes families of models: what it changes of weights, and their metadata."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING

Changed = Iterator[tuple[str, Tensor]]


class Family(NamedTuple):
    """One of the converter's kinds of models.

    Attributes:
        name: That of transformers.
        keys: What it writes in addition to the metadata of all models.
        change: Function of a weight's name in the file, of itself and of the configuration, that yields what is stored.
        renamed: Parts of the names of weights, and what the library's table has for them.
        metadata: Function of the configuration that returns metadata of which no other family has the same.
    """

    name: str
    keys: str = ""
    change: Callable[[str, Tensor, Any], Changed] = lambda name, weight, _: iter([(name, weight)])
    renamed: Mapping[str, str] = {}
    metadata: Callable[[Any], dict[str, Any]] = lambda _: {}


def is_known(arch: str) -> bool:
    """Whether transformers has the family."""
    return FAMILIES[arch].name in CONFIG_MAPPING


# --------------------------------------------------------------------------------------------- metadata


def metadata_of(arch: str, config: Any) -> dict[str, Any]:
    """The metadata of a model by their keys after the name of the architecture."""
    family = FAMILIES[arch]
    return {key: _value(config, key) for key in (*_GENERAL, *family.keys.split())} | family.metadata(config)


def _rope(config: Any) -> dict[str, Any]:
    rope = getattr(config, "rope_parameters", None) or {}
    found: dict[str, Any] = rope.get("full_attention", rope)
    return found


def _rotated(config: Any) -> int:
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(dim * _rope(config).get("partial_rotary_factor", 1.0))


def _first(config: Any, names: str) -> Any:
    """The first of these fields that the configuration has, or None."""
    return next((getattr(config, name) for name in names.split() if hasattr(config, name)), None)


def _kv_heads(config: Any) -> list[int]:
    return [config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types]


_HEADS = "linear_num_value_heads mamba_dt_rank mamba_n_heads mamba_num_heads num_heads time_step_rank"
_HEAD_WIDTHS = "linear_value_head_dim mamba_d_head mamba_head_dim head_dim"
# Of keys the configuration's fields, of which the first one that it has counts, or a function of the configuration.
_VALUES: dict[str, str | Callable[[Any], Any]] = {
    "block_count": "num_hidden_layers",
    "context_length": lambda config: getattr(config, "max_position_embeddings", 2**20),
    "embedding_length": "hidden_size",
    "feed_forward_length": lambda config: getattr(config, "intermediate_size", 0),
    "attention.head_count": lambda config: getattr(config, "num_attention_heads", 0),
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps norm_eps layer_norm_epsilon",
    "rope.freq_base": lambda config: _rope(config).get("rope_theta"),
    "expert_count": "num_experts num_local_experts n_routed_experts moe_num_experts",
    "expert_used_count": "num_experts_per_tok moe_k",
    "expert_feed_forward_length": "moe_intermediate_size",
    # Below: only of some families.
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.scale": "attention_multiplier",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "embedding_scale": "embedding_multiplier",
    "expert_gating_func": lambda _: 2,
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_shared_count": "n_shared_experts moe_num_shared_experts",
    "expert_shared_feed_forward_length": (
        "shared_expert_intermediate_size shared_intermediate_size moe_shared_expert_intermediate_size"
    ),
    "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor",
    "final_logit_softcapping": "final_logit_softcapping",
    "full_attention_interval": lambda config: config.layer_types.index("full_attention") + 1,
    "leading_dense_block_count": "first_k_dense_replace num_dense_layers moe_layer_start_index",
    "logit_scale": "logits_scaling",
    "residual_scale": "residual_multiplier",
    "rope.dimension_count": _rotated,
    "rope.scaling.factor": lambda config: _rope(config).get("factor"),
    "rope.scaling.finetuned": lambda config: getattr(config, "position_embedding_type", "rope") == "rope",
    "rope.scaling.original_context_length": lambda config: _rope(config).get("original_max_position_embeddings"),
    "rope.scaling.type": lambda config: "yarn" if _rope(config).get("rope_type") == "yarn" else None,
    "shortconv.l_cache": "conv_L_cache",
    "ssm.conv_kernel": lambda config: getattr(config, "linear_conv_kernel_dim", 4),
    "ssm.group_count": "linear_num_key_heads mamba_n_groups n_groups",
    "ssm.inner_size": lambda config: _first(config, _HEADS) * (_first(config, _HEAD_WIDTHS) or 1),
    "ssm.state_size": "linear_key_head_dim mamba_d_state ssm_state_size state_size",
    "ssm.time_step_rank": _HEADS,
}
_GENERAL = tuple(_VALUES)[: tuple(_VALUES).index("attention.kv_lora_rank")]
_FLOATS = (
    "attention.layer_norm_rms_epsilon", "attention.scale", "attn_logit_softcapping", "embedding_scale",
    "expert_weights_scale", "final_logit_softcapping", "logit_scale", "residual_scale", "rope.freq_base",
)  # fmt: skip
_YARN = "rope.scaling.type rope.scaling.factor rope.scaling.original_context_length"
_PLAIN = f"rope.dimension_count attention.sliding_window attn_logit_softcapping final_logit_softcapping {_YARN}"
_GRANITE = "attention.scale embedding_scale residual_scale logit_scale rope.scaling.finetuned"
_SHARED = "expert_shared_feed_forward_length"
_DENSE = "rope.dimension_count"
_SSM = "ssm.conv_kernel ssm.group_count ssm.inner_size ssm.state_size ssm.time_step_rank"
_DELTA = f"rope.dimension_count {_SSM} full_attention_interval {_SHARED}"
_ROUTED = "expert_shared_count expert_weights_scale leading_dense_block_count"
_DEEPSEEK = (
    f"attention.q_lora_rank {_ROUTED} expert_gating_func expert_group_count expert_group_used_count "
    f"expert_weights_norm rope.scaling.original_context_length"
)
_NEMOTRON = f"{_SSM} {_SHARED} expert_group_count expert_weights_norm expert_weights_scale"
_NO_HEADS = {"attention.key_length": None, "attention.value_length": None}


def _value(config: Any, key: str) -> Any:
    found = _VALUES[key]
    value = _first(config, found) if isinstance(found, str) else found(config)
    return float(value) if key in _FLOATS and value is not None else value


def _wide_experts(config: Any) -> dict[str, Any]:
    return {"expert_feed_forward_length": config.intermediate_size}


def _sections(config: Any) -> dict[str, Any]:
    return {"rope.dimension_sections": [11, 11, 10, 0]}


def _hybrid(config: Any) -> dict[str, Any]:
    return {"attention.head_count_kv": _kv_heads(config)} | _NO_HEADS


def _short(config: Any) -> dict[str, Any]:
    """Of LFM2, whose definition adjusts its width."""
    width = 256 if config.model_type == "lfm2" else config.intermediate_size
    return {"attention.head_count_kv": _kv_heads(config), "feed_forward_length": width}


def _channels(config: Any) -> dict[str, Any]:
    """Of Mamba and Jamba, whose states have no heads."""
    inner = config.mamba_expand * config.hidden_size if hasattr(config, "mamba_expand") else config.intermediate_size
    found = {"ssm.inner_size": inner, "ssm.group_count": None}
    if config.model_type == "jamba":
        return found | {"attention.head_count_kv": _kv_heads(config)}
    return found | {"ssm.dt_b_c_rms": config.model_type == "falcon_mamba"}


def _latent(config: Any) -> dict[str, Any]:
    """Of DeepSeek-V3 and Kimi Linear, which store keys and values as one vector."""
    rotated = config.qk_rope_head_dim
    return {
        "attention.key_length": config.kv_lora_rank + rotated,
        "attention.key_length_mla": config.qk_nope_head_dim + rotated,
        "attention.value_length_mla": config.v_head_dim,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "rope.dimension_count": rotated,
    }


def _deepseek(config: Any) -> dict[str, Any]:
    rope = _rope(config)
    return _latent(config) | {
        "attention.head_count_kv": 1,
        "attention.value_length": config.kv_lora_rank,
        "rope.scaling.type": rope["rope_type"] if "factor" in rope else None,
        "rope.scaling.factor": rope.get("factor"),
        "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"] if "factor" in rope else None,
    }


def _kimi(config: Any) -> dict[str, Any]:
    return _latent(config) | {
        "attention.head_count_kv": [int(kind == "full_attention") for kind in config.layer_types],
        "attention.value_length": None,
        "kda.head_dim": config.linear_head_dim,
        "leading_dense_block_count": config.mlp_layer_types.count("dense"),
    }


def _nemotron(config: Any) -> dict[str, Any]:
    widths = {"mlp": config.intermediate_size, "moe": config.moe_intermediate_size}
    return {
        "attention.head_count_kv": _kv_heads(config),
        "feed_forward_length": [widths.get(kind, 0) for kind in config.layer_types],
        "expert_count": config.n_routed_experts if "moe" in config.layer_types else None,
        "moe_latent_size": config.moe_latent_size,
    }


def _ernie(config: Any) -> dict[str, Any]:
    return {
        "expert_shared_feed_forward_length": config.intermediate_size // config.num_key_value_heads,
        "interleave_moe_layer_step": config.moe_layer_interval,
    }


# --------------------------------------------------------------------------------------------- weights


def _role(name: str) -> str:
    return name.split(".")[2] if name.startswith("blk") else name


def _plus_one(name: str, weight: Tensor, _config: Any) -> Changed:
    """Norms of Gemma."""
    yield name, weight + 1 if name.endswith("norm.weight") else weight


def _in_pairs(name: str, weight: Tensor, config: Any) -> Changed:
    """Rows of each head of queries and keys: the first of its lower half, the first of its upper half, and so on."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(_role(name))
    yield name, weight if heads is None else weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape)


def _next(name: str, weight: Tensor, config: Any) -> Changed:
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
    parts = weight.unflatten(0, (heads, -1)).split([dim, dim, each, each], dim=1)
    query, key, value, gate = (part.flatten(0, 1) for part in parts)
    yield name.replace("ssm_in", "attn_qkv"), torch.cat([query, key, value])
    yield name.replace("ssm_in", "attn_gate"), gate


def _qwen35(name: str, weight: Tensor, config: Any) -> Changed:
    keys, dim = config.linear_num_key_heads, config.linear_value_head_dim
    before = 2 * keys * config.linear_key_head_dim

    def tiled(rows: Tensor, size: int) -> Tensor:
        """The heads of values: the first one of each key, the second one of each key, and so on."""
        return rows.unflatten(0, (keys, -1, size)).transpose(0, 1).flatten(0, 2)

    role = _role(name)
    if role in ("attn_qkv", "ssm_conv1d"):
        weight = torch.cat([weight[:before], tiled(weight[before:], dim)])
    elif role == "attn_gate":
        weight = tiled(weight, dim)
    elif role in ("ssm_beta", "ssm_alpha", "ssm_a", "ssm_dt"):
        weight = tiled(weight, 1)
    elif role == "ssm_out":
        weight = tiled(weight.T, dim).T
    yield from _next(name, weight, config)


def _mamba(name: str, weight: Tensor, config: Any) -> Changed:
    if name.endswith(".ssm_a"):
        weight = -torch.exp(weight).unsqueeze(-1)
    elif name.endswith(".ssm_d"):
        weight = weight.unsqueeze(-1)
    elif name.endswith("conv1d.weight"):
        weight = weight.squeeze()
    elif "ssm_norm" in name:
        weight = weight.view(_first(config, "mamba_n_groups n_groups"), -1)
    yield name, weight


def _granite(name: str, weight: Tensor, config: Any) -> Changed:
    if not getattr(config, "num_local_experts", 0):
        name = name.replace("_shexp", "")
    for stored, rows in _in_pairs(name, weight, config):
        yield from _mamba(stored, rows, config)


def _falcon(name: str, weight: Tensor, config: Any) -> Changed:
    inside = config.attention_in_multiplier
    factors = {
        "attn_q": inside, "attn_k": inside * config.key_multiplier, "attn_v": inside,
        "attn_output": config.attention_out_multiplier, "ssm_out": config.ssm_out_multiplier,
        "ffn_gate": config.mlp_multipliers[0], "ffn_down": config.mlp_multipliers[1],
        "token_embd.weight": config.embedding_multiplier, "output.weight": config.lm_head_multiplier,
    }  # fmt: skip
    weight = weight * factors.get(_role(name), 1.0)
    if _role(name) == "ssm_in":
        groups = config.mamba_n_groups * config.mamba_d_state
        sizes = [config.mamba_d_ssm, config.mamba_d_ssm, groups, groups, config.mamba_n_heads]
        parts = zip(weight.split(sizes), config.ssm_multipliers, strict=True)
        weight = torch.cat([part * config.ssm_in_multiplier * factor for part, factor in parts])
    yield from _mamba(name, weight, config)


def _squeezed(name: str, weight: Tensor, _config: Any) -> Changed:
    """Convolutions, and what is added to the scores of experts."""
    if name.endswith(".ssm_a"):
        weight = -torch.exp(weight)
    yield name, weight.squeeze() if any(one in name for one in ("conv", "exp_probs")) and weight.ndim > 1 else weight


def _latents(name: str, weight: Tensor, config: Any) -> Changed:
    if "ssm_conv1d" in name:
        for letter, part in zip("qkv", weight.chunk(3), strict=True):
            yield name.replace("conv1d_q", f"conv1d_{letter}"), part.reshape(1, -1, 1, part.shape[-1])
    elif "attn_kv_b" in name:
        of_heads = weight.view(config.num_attention_heads, -1, weight.shape[1])
        keys, values = of_heads.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
        yield name.replace("kv_b", "k_b"), keys.transpose(1, 2)
        yield name.replace("kv_b", "v_b"), values
    else:
        yield name, -torch.exp(weight) if name.endswith(".ssm_a") else weight


_CONVOLUTION = {"self_attn.conv1d": "self_attn.q_conv1d"}
_STATICS = {"mlp.gate.moe_statics": "mlp.moe_statics"}
_SHARED_MLP = {"shared_mlp.": "mlp.shared_expert."}
_BACKBONE = {"model.": "backbone."}
FAMILIES = {
    "llama": Family("llama", _PLAIN, _in_pairs),
    "qwen2": Family("qwen2", _PLAIN),
    "qwen3": Family("qwen3", _PLAIN),
    "phi3": Family("phi3", _PLAIN),
    "gemma2": Family("gemma2", _PLAIN, _plus_one),
    "gemma3": Family("gemma3_text", _PLAIN, _plus_one),
    "qwen3moe": Family("qwen3_moe", _PLAIN),
    "gpt-oss": Family("gpt_oss", _PLAIN, renamed={"sinks": "sinks.weight"}, metadata=_wide_experts),
    "qwen3next": Family("qwen3_next", _DELTA, _next),
    "qwen35": Family("qwen3_5_text", _DELTA, _qwen35, metadata=_sections),
    "qwen35moe": Family("qwen3_5_moe_text", _DELTA, _qwen35, metadata=_sections),
    "granitehybrid": Family("granitemoehybrid", f"{_GRANITE} {_SHARED} {_SSM}", _granite, _SHARED_MLP, _hybrid),
    "nemotron_h": Family("nemotron_h", _NEMOTRON, _granite, _BACKBONE, _nemotron),
    "nemotron_h_moe": Family("nemotron_h", _NEMOTRON, _granite, _BACKBONE, _nemotron),
    "falcon-h1": Family("falcon_h1", _SSM, _falcon),
    "mamba2": Family("mamba2", _SSM, _mamba, metadata=lambda _: _NO_HEADS),
    "lfm2": Family("lfm2", "shortconv.l_cache", _squeezed, metadata=_short),
    "lfm2moe": Family("lfm2_moe", "shortconv.l_cache leading_dense_block_count", _squeezed, metadata=_short),
    "jamba": Family("jamba", _SSM, _squeezed, metadata=_channels),
    "mamba": Family("mamba", _SSM, _squeezed, metadata=_channels),
    "kimi-linear": Family("kimi_linear", f"ssm.conv_kernel {_ROUTED}", _latents, _CONVOLUTION, _kimi),
    "deepseek2": Family("deepseek_v3", _DEEPSEEK, _latents, metadata=_deepseek),
    "ernie4_5": Family("ernie4_5"),
    "ernie4_5-moe": Family(
        "ernie4_5_moe", "expert_shared_count leading_dense_block_count", _squeezed, _STATICS, _ernie
    ),
    "granite": Family("granite", f"{_DENSE} {_GRANITE}", _granite, {"shared_mlp.": "mlp."}),
    "smollm3": Family("smollm3", _DENSE, _in_pairs),
    "olmo2": Family("olmo2", _DENSE),
    "glm4": Family("glm4", _DENSE),
    "glm4moe": Family("glm4_moe", f"{_DENSE} {_ROUTED} expert_gating_func expert_weights_norm"),
    "granitemoe": Family("granitemoe", f"{_DENSE} {_GRANITE} {_SHARED}", _granite, _SHARED_MLP),
    "qwen2moe": Family("qwen2_moe", f"{_DENSE} {_SHARED}"),
}

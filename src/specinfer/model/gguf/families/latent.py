"""DeepSeek-V3 and Kimi Linear: latent attention, whose keys and values are made of one small vector for each token.

The matrix of keys and values is stored as two: that of keys transposed, so that queries can be multiplied by it. Kimi
Linear has it without positions in some layers, and delta rule layers with decays of each key in the others.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from specinfer.model.gguf.families import parts
from specinfer.model.gguf.families.parts import NORMS, SIGMOID, Family, Fields, Has, Key, Plan
from specinfer.model.gguf.metadata import TAKE_ANOTHER, Metadata, read_rope
from specinfer.model.gguf.weights import Weight

_LOG_SHARE = 0.1  # what the converter multiplies `mscale_all_dim` by
_LOG = "rope.scaling.yarn_log_multiplier"
_LATENT = (
    parts.EXPERT_WIDTH, parts.EXPERT_SCALE, Key("attention.kv_lora_rank", "kv_lora_rank"),
    Key("rope.dimension_count", "qk_rope_head_dim"),
)  # fmt: skip


def _latent_fields(meta: Metadata) -> dict[str, Any]:
    """Return the fields of latent attention but for numbers; older files have sizes of heads by other names."""
    heads, rotated = meta.size("attention.head_count"), meta.size("rope.dimension_count")
    has_own = meta.get("attention.key_length_mla", int) is not None
    whole, values = (f"attention.{one}_length{'_mla' * has_own}" for one in ("key", "value"))
    if rotated >= (size := meta.size(whole)):
        raise meta.error(f"{meta.arch}.rope.dimension_count is {rotated}, and the size of a head {size}")
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": meta.get("attention.q_lora_rank", int) and meta.size("attention.q_lora_rank"),
        "qk_nope_head_dim": size - rotated,
        "v_head_dim": meta.size(values),
    }


def _latent_keys(fields: Fields) -> dict[str, Any]:
    """Return the metadata of latent attention, as one head of keys that all heads of queries share."""
    rank, rotated = fields["kv_lora_rank"], fields["qk_rope_head_dim"]
    return {
        "attention.head_count_kv": 1,
        "attention.key_length": rank + rotated,
        "attention.value_length": rank,
        "attention.key_length_mla": fields["qk_nope_head_dim"] + rotated,
        "attention.value_length_mla": fields["v_head_dim"],
        "attention.q_lora_rank": fields["q_lora_rank"],
        **parts.shared_expert_keys(fields),
    }


def _latent_attention(fields: Fields, has: Has) -> Plan:
    """Yield the matrices of attention; in some files, that of keys and values is one, as in the definition."""
    hidden, heads, rank = fields["hidden_size"], fields["num_attention_heads"], fields["kv_lora_rank"]
    keys, values, rotated = fields["qk_nope_head_dim"], fields["v_head_dim"], fields["qk_rope_head_dim"]
    if narrow := fields["q_lora_rank"]:
        yield "attn_q_a.weight", Weight("self_attn.q_a_proj.weight", (narrow, hidden))
        yield "attn_q_a_norm.weight", Weight("self_attn.q_a_layernorm.weight", (narrow,))
        yield "attn_q_b.weight", Weight("self_attn.q_b_proj.weight", (heads * (keys + rotated), narrow))
    else:
        yield "attn_q.weight", Weight("self_attn.q_proj.weight", (heads * (keys + rotated), hidden))
    yield "attn_kv_a_mqa.weight", Weight("self_attn.kv_a_proj_with_mqa.weight", (rank + rotated, hidden))
    yield "attn_kv_a_norm.weight", Weight("self_attn.kv_a_layernorm.weight", (rank,))
    both = "self_attn.kv_b_proj.weight"
    if has("attn_kv_b"):
        yield "attn_kv_b.weight", Weight(both, (heads * (keys + values), rank))
    else:
        yield "attn_k_b.weight", Weight(both, (heads, keys, rank), stored=(heads, rank, keys), order=_transposed)
        yield "attn_v_b.weight", Weight(both, (heads, values, rank))
    yield "attn_output.weight", Weight("self_attn.o_proj.weight", (hidden, heads * values))


def _transposed(stored: Tensor) -> Tensor:
    return stored.mT


# --------------------------------------------------------------------------------------- DeepSeek-V3


def _deepseek_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    if (function := meta.get("expert_gating_func", int, 0)) != SIGMOID:
        fault = f"{meta.arch}.expert_gating_func is {function}, as in DeepSeek-V2, and not {SIGMOID}"
        raise meta.error(fault, TAKE_ANOTHER)
    num_dense, latent = parts.num_dense_layers(meta, common), _latent_fields(meta)
    rope = read_rope(meta, meta.size("rope.dimension_count"))
    if rope["rope_type"] == "yarn" and meta.get(_LOG, (int, float)) is not None:
        rope["mscale"] = rope["mscale_all_dim"] = round(meta.positive(_LOG) / _LOG_SHARE, 6)
    return {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "intermediate_size": meta.size("feed_forward_length"),
        **latent,
        "rope_parameters": rope,
        "rope_interleave": True,
        **meta.experts("n_routed_experts"),
        **parts.expert_groups(meta),
        "n_shared_experts": meta.size("expert_shared_count"),
        "norm_topk_prob": meta.get("expert_weights_norm", bool, False),
        "first_k_dense_replace": num_dense,
        "num_nextn_predict_layers": 0,
    }


def _deepseek_keys(fields: Fields) -> dict[str, Any]:
    share = (fields["rope_parameters"] or {}).get("mscale_all_dim")
    return {
        **_latent_keys(fields),
        "expert_group_count": fields["n_group"],
        "expert_group_used_count": fields["topk_group"],
        "leading_dense_block_count": fields["first_k_dense_replace"],
        _LOG: _LOG_SHARE * share if share else None,
    }


def _deepseek_layer(fields: Fields, number: int, has: Has) -> Plan:
    yield from parts.norms(NORMS, fields["hidden_size"])
    yield from _latent_attention(fields, has)
    if number < fields["first_k_dense_replace"]:
        yield from parts.mlp(fields)
    else:
        yield from parts.biased_experts(fields, fields["n_routed_experts"])


# --------------------------------------------------------------------------------------- Kimi Linear


def _kimi_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    num_layers = common["num_hidden_layers"]
    num_dense = meta.sizes("leading_dense_block_count", 1)[0]
    kv_heads = meta.sizes("attention.head_count_kv", num_layers)
    return {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        "intermediate_size": meta.size("feed_forward_length"),
        **_latent_fields(meta),
        "layer_types": ["full_attention" if one else "linear_attention" for one in kv_heads],
        "mlp_layer_types": ["dense" if i < num_dense else "sparse" for i in range(num_layers)],
        "linear_num_heads": meta.size("attention.head_count"),
        **meta.experts("num_local_experts"),
        "n_shared_experts": meta.size("expert_shared_count", 1),
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
    }


def _kimi_layer(fields: Fields, number: int, has: Has) -> Plan:
    yield from parts.norms(NORMS, fields["hidden_size"])
    if fields["layer_types"][number] == "full_attention":
        yield from _latent_attention(fields, has)
    else:
        yield from _delta(fields)
    if fields["mlp_layer_types"][number] == "dense":
        yield from parts.mlp(fields)
    else:
        yield from parts.biased_experts(fields, fields["num_local_experts"])


def _delta(fields: Fields) -> Plan:
    hidden, heads, dim = fields["hidden_size"], fields["linear_num_heads"], fields["linear_head_dim"]
    width, taps = heads * dim, fields["linear_conv_kernel_dim"]
    for one in "qkv":
        yield f"attn_{one}.weight", Weight(f"self_attn.{one}_proj.weight", (width, hidden))
        yield f"ssm_conv1d_{one}.weight", Weight(f"self_attn.{one}_conv1d.weight", (width, 1, taps))
    gate = "self_attn.forget_gate"
    yield "ssm_f_a.weight", Weight(f"{gate}.f_a_proj.weight", (dim, hidden))
    yield "ssm_f_b.weight", Weight(f"{gate}.f_b_proj.weight", (width, dim))
    yield "ssm_a", Weight(f"{gate}.A_log", (1, 1, heads, 1), is_log=True)
    yield "ssm_dt.bias", Weight(f"{gate}.dt_bias", (width,))
    yield "ssm_beta.weight", Weight("self_attn.b_proj.weight", (heads, hidden))
    yield "ssm_g_a.weight", Weight("self_attn.g_a_proj.weight", (dim, hidden))
    yield "ssm_g_b.weight", Weight("self_attn.g_b_proj.weight", (width, dim))
    yield "ssm_norm.weight", Weight("self_attn.o_norm.weight", (dim,))
    yield "attn_output.weight", Weight("self_attn.o_proj.weight", (hidden, width))


def _kimi_keys(fields: Fields) -> dict[str, Any]:
    return {
        **_latent_keys(fields),
        "attention.head_count_kv": parts.kv_heads_by_layer({**fields, "num_key_value_heads": 1}),
        "leading_dense_block_count": [*fields["mlp_layer_types"], "sparse"].index("sparse"),
    }


def _apart(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the definition's weights with convolutions apart, as checkpoints have them."""
    found: dict[str, Tensor] = {}
    for name, weight in weights.items():
        start, middle, end = name.rpartition(".conv1d.")
        pairs = zip("qkv", weight.chunk(3), strict=True) if middle else ()
        found |= {f"{start}.{one}_conv1d.{end}": part for one, part in pairs} or {name: weight}
    return found


_KIMI_NUMBERS = (Key("kda.head_dim", "linear_head_dim"), Key("ssm.conv_kernel", "linear_conv_kernel_dim"))
FAMILIES = {
    "deepseek2": Family(_deepseek_fields, _deepseek_layer, _LATENT, written=("deepseek_v3",), keys=_deepseek_keys),
    "kimi-linear": Family(
        _kimi_fields, _kimi_layer, (*_LATENT, *_KIMI_NUMBERS), written=("kimi_linear",), keys=_kimi_keys,
        renamed=_apart,
    ),
}  # fmt: skip

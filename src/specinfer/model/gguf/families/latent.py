"""DeepSeek-V3: latent attention, whose keys and values are made of one small vector for each token, and experts.

The matrix of keys and values is stored as two: that of keys transposed, so that queries can be multiplied by it.
"""

from collections.abc import Collection
from typing import Any

from torch import Tensor

from specinfer.model.gguf.families.plan_parts import (
    NORMS,
    SIGMOID,
    Family,
    Fields,
    Plan,
    expert_groups,
    experts,
    gated,
    in_layer,
    norms,
    outside,
    shared_expert_keys,
)
from specinfer.model.gguf.metadata import TAKE_ANOTHER, Metadata
from specinfer.model.gguf.rope import read_rope
from specinfer.model.gguf.weights import Weight

_LOG_SHARE = 0.1  # what the converter multiplies `mscale_all_dim` by
_LOG = "rope.scaling.yarn_log_multiplier"


def latent_fields(meta: Metadata) -> dict[str, Any]:
    """Return the fields of config.json of latent attention; older files have sizes of heads by other names."""
    heads, rotated = meta.size("attention.head_count"), meta.size("rope.dimension_count")
    has_own = meta.get("attention.key_length_mla", int) is not None
    whole, values = (f"attention.{one}_length{'_mla' * has_own}" for one in ("key", "value"))
    if rotated >= (size := meta.size(whole)):
        raise meta.error(f"{meta.arch}.rope.dimension_count is {rotated}, and the size of a head {size}")
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "kv_lora_rank": meta.size("attention.kv_lora_rank"),
        "q_lora_rank": meta.get("attention.q_lora_rank", int) and meta.size("attention.q_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": size - rotated,
        "v_head_dim": meta.size(values),
    }


def latent_keys(fields: Fields) -> dict[str, Any]:
    """Return the metadata of latent attention, as one head of keys that all heads of queries share."""
    rank, rotated = fields["kv_lora_rank"], fields["qk_rope_head_dim"]
    return {
        "attention.head_count_kv": 1,
        "attention.key_length": rank + rotated,
        "attention.value_length": rank,
        "attention.key_length_mla": fields["qk_nope_head_dim"] + rotated,
        "attention.value_length_mla": fields["v_head_dim"],
        "attention.kv_lora_rank": rank,
        "attention.q_lora_rank": fields["q_lora_rank"],
        "rope.dimension_count": rotated,
    }


def latent_attention(fields: Fields, is_joined: bool) -> Plan:
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
    if is_joined:
        yield "attn_kv_b.weight", Weight(both, (heads * (keys + values), rank))
    else:
        yield "attn_k_b.weight", Weight(both, (heads, keys, rank), stored=(heads, rank, keys), order=_transposed)
        yield "attn_v_b.weight", Weight(both, (heads, values, rank))
    yield "attn_output.weight", Weight("self_attn.o_proj.weight", (hidden, heads * values))


def _transposed(stored: Tensor) -> Tensor:
    return stored.mT


def biased_experts(fields: Fields, count: int) -> Plan:
    """Yield a router with biases, and this many experts next to shared ones."""
    hidden, width = fields["hidden_size"], fields["moe_intermediate_size"]
    yield "ffn_gate_inp.weight", Weight("mlp.gate.weight", (count, hidden))
    yield "exp_probs_b.bias", Weight("mlp.gate.e_score_correction_bias", (count,))
    yield from experts("mlp.experts", hidden, width, count)
    yield from gated("mlp.shared_experts", hidden, width * fields["n_shared_experts"], end="_shexp")


def read_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    """Return the fields of config.json of DeepSeek-V3."""
    if (function := meta.get("expert_gating_func", int, 0)) != SIGMOID:
        fault = f"{meta.arch}.expert_gating_func is {function}, as in DeepSeek-V2, and not {SIGMOID}"
        raise meta.error(fault, TAKE_ANOTHER)
    num_dense = meta.get("leading_dense_block_count", int, 0)
    if not 0 <= num_dense <= common["num_hidden_layers"]:
        raise meta.error(f"{meta.arch}.leading_dense_block_count is {num_dense}")
    latent = latent_fields(meta)
    rope = read_rope(meta, latent["qk_rope_head_dim"])
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
        **expert_groups(meta),
        "moe_intermediate_size": meta.size("expert_feed_forward_length"),
        "n_shared_experts": meta.size("expert_shared_count"),
        "routed_scaling_factor": meta.positive("expert_weights_scale", 1.0),
        "norm_topk_prob": meta.get("expert_weights_norm", bool, False),
        "first_k_dense_replace": num_dense,
        "num_nextn_predict_layers": 0,
    }


def _keys(fields: Fields) -> dict[str, Any]:
    share = (fields["rope_parameters"] or {}).get("mscale_all_dim")
    return {
        **latent_keys(fields),
        **shared_expert_keys(fields),
        "expert_group_count": fields["n_group"],
        "expert_group_used_count": fields["topk_group"],
        "leading_dense_block_count": fields["first_k_dense_replace"],
        _LOG: _LOG_SHARE * share if share else None,
    }


def plan(fields: Fields, names: Collection[str]) -> Plan:
    """Yield the tensors of DeepSeek-V3."""
    hidden = fields["hidden_size"]
    yield from outside(fields)
    for i in range(fields["num_hidden_layers"]):
        yield from in_layer(i, norms(NORMS, hidden))
        yield from in_layer(i, latent_attention(fields, f"blk.{i}.attn_kv_b.weight" in names))
        if i < fields["first_k_dense_replace"]:
            yield from in_layer(i, gated("mlp", hidden, fields["intermediate_size"]))
        else:
            yield from in_layer(i, biased_experts(fields, fields["n_routed_experts"]))


FAMILIES = {"deepseek2": Family(read_fields, plan, written=("deepseek_v3",), keys=_keys)}

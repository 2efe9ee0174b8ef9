"""Kimi Linear: delta rule layers with decays of each key, and latent attention without positions in some layers."""

from collections.abc import Collection
from typing import Any

from torch import Tensor

from specinfer.model.gguf.families.plan_parts import (
    NORMS,
    Family,
    Fields,
    Plan,
    experts,
    gated,
    in_layer,
    norms,
    outside,
)
from specinfer.model.gguf.metadata import Metadata
from specinfer.model.gguf.weights import Weight


def read_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    """Return the fields of config.json."""
    num_layers, heads = common["num_hidden_layers"], meta.size("attention.head_count")
    rotated, whole = meta.size("rope.dimension_count"), meta.size("attention.key_length_mla")
    if rotated >= whole:
        raise meta.error(f"{meta.arch}.rope.dimension_count is {rotated}, and the size of a head {whole}")
    num_dense = meta.sizes("leading_dense_block_count", 1)[0]
    kv_heads = meta.sizes("attention.head_count_kv", num_layers)
    return {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        "intermediate_size": meta.size("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "kv_lora_rank": meta.size("attention.kv_lora_rank"),
        "q_lora_rank": None,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": whole - rotated,
        "v_head_dim": meta.size("attention.value_length_mla"),
        "layer_types": ["full_attention" if one else "linear_attention" for one in kv_heads],
        "mlp_layer_types": ["dense" if i < num_dense else "sparse" for i in range(num_layers)],
        "linear_head_dim": meta.size("kda.head_dim"),
        "linear_num_heads": heads,
        "linear_conv_kernel_dim": meta.size("ssm.conv_kernel"),
        **meta.experts("num_local_experts"),
        "moe_intermediate_size": meta.size("expert_feed_forward_length"),
        "n_shared_experts": meta.size("expert_shared_count", 1),
        "routed_scaling_factor": meta.positive("expert_weights_scale", 1.0),
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
    }


def plan(fields: Fields, names: Collection[str]) -> Plan:
    """Yield the tensors of a model."""
    hidden = fields["hidden_size"]
    yield from outside(fields)
    for i, (kind, feed_forward) in enumerate(zip(fields["layer_types"], fields["mlp_layer_types"], strict=True)):
        yield from in_layer(i, norms(NORMS, hidden))
        if kind == "full_attention":
            yield from in_layer(i, _latent(fields, f"blk.{i}.attn_kv_b.weight" in names))
        else:
            yield from in_layer(i, _delta(fields))
        if feed_forward == "dense":
            yield from in_layer(i, gated("mlp", hidden, fields["intermediate_size"]))
        else:
            yield from in_layer(i, _experts(fields))


def _latent(fields: Fields, is_joined: bool) -> Plan:
    """Yield the matrices of attention; in some files, that of keys and values is one, as in the definition."""
    hidden, heads, rank = fields["hidden_size"], fields["num_attention_heads"], fields["kv_lora_rank"]
    keys, values, rotated = fields["qk_nope_head_dim"], fields["v_head_dim"], fields["qk_rope_head_dim"]
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


def _experts(fields: Fields) -> Plan:
    hidden, count, width = fields["hidden_size"], fields["num_local_experts"], fields["moe_intermediate_size"]
    yield "ffn_gate_inp.weight", Weight("mlp.gate.weight", (count, hidden))
    yield "exp_probs_b.bias", Weight("mlp.gate.e_score_correction_bias", (count,))
    yield from experts("mlp.experts", hidden, width, count)
    yield from gated("mlp.shared_experts", hidden, width * fields["n_shared_experts"], end="_shexp")


FAMILIES = {
    "kimi-linear": Family(read_fields, plan),
}

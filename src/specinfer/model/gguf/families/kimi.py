"""Kimi Linear: delta rule layers with decays of each key, and latent attention without positions in some layers."""

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from specinfer.model.gguf.families.latent import (
    biased_experts,
    latent_attention,
    latent_fields,
    latent_keys,
)
from specinfer.model.gguf.families.plan_parts import (
    NORMS,
    Family,
    Fields,
    Plan,
    gated,
    in_layer,
    kv_heads_by_layer,
    norms,
    outside,
    shared_expert_keys,
)
from specinfer.model.gguf.metadata import Metadata
from specinfer.model.gguf.weights import Weight


def read_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    """Return the fields of config.json."""
    num_layers, heads = common["num_hidden_layers"], meta.size("attention.head_count")
    num_dense = meta.sizes("leading_dense_block_count", 1)[0]
    kv_heads = meta.sizes("attention.head_count_kv", num_layers)
    return {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        "intermediate_size": meta.size("feed_forward_length"),
        **latent_fields(meta),
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
            yield from in_layer(i, latent_attention(fields, f"blk.{i}.attn_kv_b.weight" in names))
        else:
            yield from in_layer(i, _delta(fields))
        if feed_forward == "dense":
            yield from in_layer(i, gated("mlp", hidden, fields["intermediate_size"]))
        else:
            yield from in_layer(i, biased_experts(fields, fields["num_local_experts"]))


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


def _keys(fields: Fields) -> dict[str, Any]:
    return {
        **latent_keys(fields),
        **shared_expert_keys(fields),
        "attention.head_count_kv": kv_heads_by_layer({**fields, "num_key_value_heads": 1}),
        "kda.head_dim": fields["linear_head_dim"],
        "ssm.conv_kernel": fields["linear_conv_kernel_dim"],
        "leading_dense_block_count": [*fields["mlp_layer_types"], "sparse"].index("sparse"),
    }


def _apart(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the definition's weights with convolutions apart, as checkpoints have them."""
    found: dict[str, Tensor] = {}
    for name, weight in weights.items():
        start, middle, end = name.rpartition(".conv1d.")
        parts = zip("qkv", weight.chunk(3), strict=True) if middle else ()
        found |= {f"{start}.{one}_conv1d.{end}": part for one, part in parts} or {name: weight}
    return found


FAMILIES = {
    "kimi-linear": Family(read_fields, plan, written=("kimi_linear",), keys=_keys, renamed=_apart),
}

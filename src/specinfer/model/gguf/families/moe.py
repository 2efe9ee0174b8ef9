"""Models with attention and routed experts in all layers: Qwen2-MoE, Qwen3-MoE, Granite, gpt-oss."""

from collections.abc import Collection
from typing import Any

from specinfer.model.gguf.families.plan_parts import (
    HEAD_NORMS,
    NORMS,
    QKV,
    Family,
    Fields,
    Plan,
    attention,
    experts,
    gated,
    granite_fields,
    in_layer,
    multiplier_keys,
    norms,
    outside,
    whole_fields,
    with_biases,
)
from specinfer.model.gguf.metadata import Metadata
from specinfer.model.gguf.weights import Weight

_OSS_NORMS = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}


def _qwen_fields(meta: Metadata, common: Fields, family: str, model_class: str) -> dict[str, Any]:
    return {
        **whole_fields(meta, common, family, model_class),
        **meta.experts("num_experts"),
        "moe_intermediate_size": meta.size("expert_feed_forward_length"),
    }


def qwen2_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    """Return the fields of config.json of Qwen2-MoE."""
    return {
        **_qwen_fields(meta, common, "qwen2_moe", "Qwen2MoeForCausalLM"),
        "shared_expert_intermediate_size": meta.size("expert_shared_feed_forward_length"),
        "norm_topk_prob": False,
    }


def qwen3_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    """Return the fields of config.json of Qwen3-MoE."""
    return {**_qwen_fields(meta, common, "qwen3_moe", "Qwen3MoeForCausalLM"), "norm_topk_prob": True}


def plan_qwen(fields: Fields, _names: Collection[str]) -> Plan:
    """Yield the tensors of Qwen2-MoE or Qwen3-MoE, of which the first has a shared expert."""
    hidden, count = fields["hidden_size"], fields["num_experts"]
    shared = fields.get("shared_expert_intermediate_size")
    yield from outside(fields)
    for i in range(fields["num_hidden_layers"]):
        yield from in_layer(i, norms(NORMS, hidden))
        yield from in_layer(i, with_biases(attention(fields), QKV[:3] if shared else ()))
        yield from in_layer(i, [("ffn_gate_inp.weight", Weight("mlp.gate.weight", (count, hidden)))])
        if shared:
            gate = Weight("mlp.shared_expert_gate.weight", (1, hidden))
            yield from in_layer(i, [("ffn_gate_inp_shexp.weight", gate)])
            yield from in_layer(i, gated("mlp.shared_expert", hidden, shared, end="_shexp"))
        else:
            yield from in_layer(i, norms(HEAD_NORMS, fields["head_dim"]))
        yield from in_layer(i, experts("mlp.experts", hidden, fields["moe_intermediate_size"], count))


def oss_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    """Return the fields of config.json of gpt-oss."""
    fields = whole_fields(meta, common, "gpt_oss", "GptOssForCausalLM")
    if fields["rope_parameters"]["rope_type"] == "yarn":
        fields["rope_parameters"]["truncate"] = False  # its makers do not round the ends of the ramp
    return {
        **fields,
        **meta.experts("num_local_experts"),
        "intermediate_size": meta.size("expert_feed_forward_length"),
        "sliding_window": meta.size("attention.sliding_window"),
    }


def plan_oss(fields: Fields, _names: Collection[str]) -> Plan:
    """Yield the tensors of gpt-oss, whose matrices all have biases."""
    hidden, count = fields["hidden_size"], fields["num_local_experts"]
    yield from outside(fields)
    for i in range(fields["num_hidden_layers"]):
        yield from in_layer(i, norms(_OSS_NORMS, hidden))
        yield from in_layer(i, with_biases(attention(fields)))
        yield from in_layer(i, [("attn_sinks.weight", Weight("self_attn.sinks", (fields["num_attention_heads"],)))])
        router = [("ffn_gate_inp.weight", Weight("mlp.router.weight", (count, hidden)))]
        yield from in_layer(i, with_biases(router))
        stacks = experts("mlp.experts", hidden, fields["intermediate_size"], count)
        yield from in_layer(i, with_biases(stacks))


def granite_moe_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    """Return the fields of config.json of Granite with experts."""
    fields = granite_fields(meta, common, "granitemoe", "GraniteMoeForCausalLM")
    return {**fields, **meta.experts("num_local_experts")}


def plan_granite(fields: Fields, _names: Collection[str]) -> Plan:
    """Yield the tensors of Granite with experts."""
    hidden, count = fields["hidden_size"], fields["num_local_experts"]
    yield from outside(fields)
    for i in range(fields["num_hidden_layers"]):
        yield from in_layer(i, norms(NORMS, hidden))
        yield from in_layer(i, attention(fields, has_pairs=True))
        yield from in_layer(i, [("ffn_gate_inp.weight", Weight("block_sparse_moe.router.weight", (count, hidden)))])
        yield from in_layer(i, experts("block_sparse_moe.experts", hidden, fields["intermediate_size"], count))


FAMILIES = {
    "granitemoe": Family(granite_moe_fields, plan_granite, written=("granitemoe",), keys=multiplier_keys),
    "qwen2moe": Family(qwen2_fields, plan_qwen, stacks_experts=False, written=("qwen2_moe",)),
    "qwen3moe": Family(qwen3_fields, plan_qwen, stacks_experts=False, written=("qwen3_moe",)),
    "gpt-oss": Family(
        oss_fields,
        plan_oss,
        transposes_experts=True,
        written=("gpt_oss",),
        keys=lambda fields: {"expert_feed_forward_length": fields["intermediate_size"]},
    ),
}

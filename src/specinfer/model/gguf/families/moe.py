"""Models with attention, and routed experts in most layers: Qwen2-MoE, Qwen3-MoE, Granite, GLM-4.5, gpt-oss."""

from collections.abc import Collection
from typing import Any

from specinfer.model.gguf.families.mamba import with_and_without_positions
from specinfer.model.gguf.families.plan_parts import (
    GRANITE_GATED,
    HEAD_NORMS,
    NORMS,
    QKV,
    Family,
    Fields,
    Plan,
    around_mtp,
    attention,
    experts,
    gated,
    granite_experts,
    granite_fields,
    in_layer,
    multiplier_keys,
    norms,
    outside,
    shared_expert_keys,
    whole_fields,
    with_biases,
)
from specinfer.model.gguf.metadata import Metadata
from specinfer.model.gguf.weights import Weight

_SHARED = "expert_shared_feed_forward_length"
_ATTENTION_NORMS = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}


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
        yield from in_layer(i, norms(_ATTENTION_NORMS, hidden))
        yield from in_layer(i, with_biases(attention(fields)))
        yield from in_layer(i, [("attn_sinks.weight", Weight("self_attn.sinks", (fields["num_attention_heads"],)))])
        router = [("ffn_gate_inp.weight", Weight("mlp.router.weight", (count, hidden)))]
        yield from in_layer(i, with_biases(router))
        stacks = experts("mlp.experts", hidden, fields["intermediate_size"], count)
        yield from in_layer(i, with_biases(stacks))


def granite_moe_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    """Return the fields of config.json of Granite with experts, which may have a shared one."""
    if not meta.get(_SHARED, int):
        fields = granite_fields(meta, common, "granitemoe", "GraniteMoeForCausalLM")
    else:
        fields = granite_fields(meta, common, "granitemoeshared", "GraniteMoeSharedForCausalLM")
        fields["shared_intermediate_size"] = meta.size(_SHARED)
    return {**fields, **meta.experts("num_local_experts")}


def plan_granite(fields: Fields, _names: Collection[str]) -> Plan:
    """Yield the tensors of Granite with experts."""
    hidden, shared = fields["hidden_size"], fields.get("shared_intermediate_size")
    yield from outside(fields)
    for i in range(fields["num_hidden_layers"]):
        yield from in_layer(i, norms(NORMS, hidden))
        yield from in_layer(i, attention(fields, has_pairs=True))
        yield from in_layer(i, granite_experts(fields))
        if shared:
            yield from in_layer(i, gated("shared_mlp", hidden, shared, GRANITE_GATED, "_shexp"))


def _granite_keys(fields: Fields) -> dict[str, Any]:
    return {**multiplier_keys(fields), _SHARED: fields.get("shared_intermediate_size") or None}


def glm_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    """Return the fields of config.json of GLM-4.5, whose first layers have no experts."""
    tensors, num_dense = meta.header.tensors, meta.get("leading_dense_block_count", int, 0)
    if not 0 <= num_dense <= common["num_hidden_layers"]:
        raise meta.error(f"{meta.arch}.leading_dense_block_count is {num_dense}")
    return {
        **whole_fields(meta, common, "glm4_moe", "Glm4MoeForCausalLM", may_rotate_part=True),
        **meta.experts("n_routed_experts"),
        "moe_intermediate_size": meta.size("expert_feed_forward_length"),
        "n_shared_experts": meta.size("expert_shared_count", 1),
        "routed_scaling_factor": meta.positive("expert_weights_scale", 1.0),
        "norm_topk_prob": meta.get("expert_weights_norm", bool, True),
        "first_k_dense_replace": num_dense,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
    }


def plan_glm(fields: Fields, _names: Collection[str]) -> Plan:
    """Yield the tensors of GLM-4.5."""
    yield from outside(fields)
    for i in range(fields["num_hidden_layers"]):
        yield from in_layer(i, _glm_layer(fields, has_experts=i >= fields["first_k_dense_replace"]))


def _glm_mtp(fields: Fields) -> Plan:
    at = f"model.layers.{(last := fields['num_hidden_layers'])}"
    yield from around_mtp(fields, (f"{at}.enorm", f"{at}.hnorm", f"{at}.shared_head.norm", f"{at}.eh_proj"))
    yield from in_layer(last, _glm_layer(fields, has_experts=True))


def _glm_layer(fields: Fields, *, has_experts: bool) -> Plan:
    hidden, count, wide = fields["hidden_size"], fields["n_routed_experts"], fields["moe_intermediate_size"]
    yield from norms(_ATTENTION_NORMS, hidden)
    yield from with_biases(attention(fields), QKV[:3] if fields["attention_bias"] else ())
    if fields["use_qk_norm"]:
        yield from norms(HEAD_NORMS, fields["head_dim"])
    if not has_experts:
        yield from gated("mlp", hidden, fields["intermediate_size"])
        return
    yield "ffn_gate_inp.weight", Weight("mlp.gate.weight", (count, hidden))
    yield "exp_probs_b.bias", Weight("mlp.gate.e_score_correction_bias", (count,))
    yield from experts("mlp.experts", hidden, wide, count)
    yield from gated("mlp.shared_experts", hidden, wide * fields["n_shared_experts"], end="_shexp")


def _glm_keys(fields: Fields) -> dict[str, Any]:
    return {**shared_expert_keys(fields), "leading_dense_block_count": fields["first_k_dense_replace"]}


FAMILIES = {
    "granitemoe": with_and_without_positions(
        Family(granite_moe_fields, plan_granite, written=("granitemoe", "granitemoeshared"), keys=_granite_keys)
    ),
    "glm4moe": Family(glm_fields, plan_glm, written=("glm4_moe",), keys=_glm_keys, mtp=_glm_mtp),
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

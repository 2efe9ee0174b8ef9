"""Models with attention, and routed experts in most layers: Qwen2-MoE, Qwen3-MoE, Granite, GLM-4.5, ERNIE, gpt-oss."""

from functools import partial
from typing import Any

from specinfer.model.gguf.families import parts
from specinfer.model.gguf.families.mamba import with_and_without_positions
from specinfer.model.gguf.families.parts import HEAD_NORMS, NORMS, QKV, WINDOW, Family, Fields, Has, Key, Plan
from specinfer.model.gguf.metadata import Metadata
from specinfer.model.gguf.weights import Weight

_SHARED = "expert_shared_feed_forward_length"
_ATTENTION_NORMS = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}


def _qwen_fields(meta: Metadata, common: Fields, family: str, model_class: str, *, normalizes: bool) -> dict[str, Any]:
    return {
        **parts.whole_fields(meta, common, family, model_class),
        **meta.experts("num_experts"),
        "norm_topk_prob": normalizes,
    }


def _qwen_layer(fields: Fields, *_: Any) -> Plan:
    """Yield the tensors of Qwen2-MoE or Qwen3-MoE, of which the first has a shared expert."""
    hidden, shared = fields["hidden_size"], fields.get("shared_expert_intermediate_size")
    yield from parts.norms(NORMS, hidden)
    yield from parts.with_biases(parts.attention(fields), QKV[:3] if shared else ())
    if shared:
        yield "ffn_gate_inp_shexp.weight", Weight("mlp.shared_expert_gate.weight", (1, hidden))
        yield from parts.gated("mlp.shared_expert", hidden, shared, end="_shexp")
    else:
        yield from parts.norms(HEAD_NORMS, fields["head_dim"])
    yield from parts.experts(fields, fields["num_experts"], fields["moe_intermediate_size"])


def _oss_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    fields = parts.whole_fields(meta, common, "gpt_oss", "GptOssForCausalLM")
    if fields["rope_parameters"]["rope_type"] == "yarn":
        fields["rope_parameters"]["truncate"] = False  # its makers do not round the ends of the ramp
    return {
        **fields,
        **meta.experts("num_local_experts"),
        "intermediate_size": meta.size("expert_feed_forward_length"),
    }


def _oss_layer(fields: Fields, *_: Any) -> Plan:
    """Yield the tensors of gpt-oss, whose matrices all have biases."""
    count, width = fields["num_local_experts"], fields["intermediate_size"]
    yield from parts.norms(_ATTENTION_NORMS, fields["hidden_size"])
    yield from parts.with_biases(parts.attention(fields))
    yield "attn_sinks.weight", Weight("self_attn.sinks", (fields["num_attention_heads"],))
    yield from parts.with_biases(parts.experts(fields, count, width, router="router"))


def _granite_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    """Return the fields of Granite with experts, which may have a shared one."""
    if not meta.get(_SHARED, int):
        fields = parts.whole_fields(meta, common, "granitemoe", "GraniteMoeForCausalLM")
    else:
        fields = parts.whole_fields(meta, common, "granitemoeshared", "GraniteMoeSharedForCausalLM")
        fields["shared_intermediate_size"] = meta.size(_SHARED)
    return {**fields, **meta.experts("num_local_experts")}


def _granite_layer(fields: Fields, *_: Any) -> Plan:
    hidden = fields["hidden_size"]
    yield from parts.norms(NORMS, hidden)
    yield from parts.attention(fields, has_pairs=True)
    yield from parts.granite_experts(fields)
    if shared := fields.get("shared_intermediate_size"):
        yield from parts.gated("shared_mlp", hidden, shared, parts.GRANITE_GATED, "_shexp")


def _glm_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    """Return the fields of GLM-4.5, whose first layers have no experts."""
    tensors = meta.header.tensors
    return {
        **parts.whole_fields(meta, common, "glm4_moe", "Glm4MoeForCausalLM", may_rotate_part=True),
        **meta.experts("n_routed_experts"),
        "n_shared_experts": meta.size("expert_shared_count", 1),
        "norm_topk_prob": meta.get("expert_weights_norm", bool, True),
        "first_k_dense_replace": parts.num_dense_layers(meta, common),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
    }


def _glm_layer(fields: Fields, number: int, _has: Has | None = None) -> Plan:
    yield from parts.norms(_ATTENTION_NORMS, fields["hidden_size"])
    yield from parts.with_biases(parts.attention(fields), QKV[:3] if fields["attention_bias"] else ())
    if fields["use_qk_norm"]:
        yield from parts.norms(HEAD_NORMS, fields["head_dim"])
    if number < fields["first_k_dense_replace"]:
        yield from parts.mlp(fields)
    else:
        yield from parts.biased_experts(fields, fields["n_routed_experts"])


def _glm_mtp(fields: Fields) -> Plan:
    at = f"model.layers.{(last := fields['num_hidden_layers'])}"
    yield from parts.around_mtp(fields, (f"{at}.enorm", f"{at}.hnorm", f"{at}.shared_head.norm", f"{at}.eh_proj"))
    yield from parts.in_layer(last, _glm_layer(fields, last))


def _glm_keys(fields: Fields) -> dict[str, Any]:
    return {**parts.shared_expert_keys(fields), "leading_dense_block_count": fields["first_k_dense_replace"]}


def _ernie_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    """Return the fields of ERNIE 4.5 with experts; files do not have the layer where these end."""
    counts = meta.experts("moe_num_experts")
    return {
        **parts.whole_fields(meta, common, "ernie4_5_moe", "Ernie4_5_MoeForCausalLM"),
        "moe_num_experts": counts["moe_num_experts"],
        "moe_k": counts["num_experts_per_tok"],
        "moe_num_shared_experts": meta.get("expert_shared_count", int, 0) and meta.size("expert_shared_count"),
        "moe_layer_start_index": parts.num_dense_layers(meta, common),
        "moe_layer_end_index": common["num_hidden_layers"] - 1,
    }


def _ernie_layer(fields: Fields, number: int, _has: Has) -> Plan:
    hidden, count, width = fields["hidden_size"], fields["moe_num_experts"], fields["moe_intermediate_size"]
    yield from parts.norms(NORMS, hidden)
    yield from parts.attention(fields)
    if number < fields["moe_layer_start_index"] or (number + 1) % fields["moe_layer_interval"]:
        yield from parts.mlp(fields)
        return
    yield "exp_probs_b.bias", Weight("mlp.moe_statics.e_score_correction_bias", (1, count), stored=(count,))
    yield from parts.experts(fields, count, width)
    if shared := fields["moe_num_shared_experts"]:
        yield from parts.gated("mlp.shared_experts", hidden, width * shared, end="_shexp")


def _ernie_keys(fields: Fields) -> dict[str, Any]:
    shared = fields["moe_num_shared_experts"]
    return {
        "expert_shared_count": shared,
        _SHARED: fields["moe_intermediate_size"] * shared if shared else None,
        "leading_dense_block_count": fields["moe_layer_start_index"],
    }


_qwen2 = partial(_qwen_fields, family="qwen2_moe", model_class="Qwen2MoeForCausalLM", normalizes=False)
_qwen3 = partial(_qwen_fields, family="qwen3_moe", model_class="Qwen3MoeForCausalLM", normalizes=True)
FAMILIES = {
    "granitemoe": with_and_without_positions(
        Family(
            _granite_fields, _granite_layer, parts.MULTIPLIERS, written=("granitemoe", "granitemoeshared"),
            keys=lambda fields: {_SHARED: fields.get("shared_intermediate_size") or None},
        )
    ),
    "glm4moe": Family(
        _glm_fields, _glm_layer, (parts.EXPERT_WIDTH, parts.EXPERT_SCALE), written=("glm4_moe",), keys=_glm_keys,
        mtp=_glm_mtp,
    ),
    "ernie4_5-moe": Family(
        _ernie_fields, _ernie_layer,
        (parts.EXPERT_WIDTH, Key("interleave_moe_layer_step", "moe_layer_interval", 1)),
        written=("ernie4_5_moe",), keys=_ernie_keys,
    ),
    "qwen2moe": Family(
        _qwen2, _qwen_layer, (parts.EXPERT_WIDTH, Key(_SHARED, "shared_expert_intermediate_size")),
        stacks_experts=False, written=("qwen2_moe",),
    ),
    "qwen3moe": Family(_qwen3, _qwen_layer, (parts.EXPERT_WIDTH,), stacks_experts=False, written=("qwen3_moe",)),
    "gpt-oss": Family(
        _oss_fields, _oss_layer, (Key(WINDOW, "sliding_window"),), transposes_experts=True, written=("gpt_oss",),
        keys=lambda fields: {"expert_feed_forward_length": fields["intermediate_size"]},
    ),
}  # fmt: skip

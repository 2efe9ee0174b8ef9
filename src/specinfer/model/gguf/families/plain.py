"""Models with attention in all layers: Granite, OLMo 2, GLM-4, Qwen2-MoE, SmolLM3."""

from collections.abc import Collection
from typing import Any

from specinfer.model.gguf.families.plan_parts import (
    Fields,
    Plan,
    attention,
    attention_fields,
    experts,
    gated,
    in_layer,
    multipliers,
    norms,
    outside,
)
from specinfer.model.gguf.metadata import TAKE_ANOTHER, Metadata
from specinfer.model.gguf.weights import Weight

_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_GLM_NORMS = _NORMS | {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"}
_PERIOD_WITHOUT_POSITIONS = 4  # of SmolLM3's layers, which files do not have


def _fields(meta: Metadata, common: Fields, family: str, model_class: str) -> dict[str, Any]:
    fields = attention_fields(meta, common)
    if meta.arch != "glm4" and "partial_rotary_factor" in fields["rope_parameters"]:
        raise meta.error(f"{meta.arch}.rope.dimension_count is not the size of a head", TAKE_ANOTHER)
    return {
        "model_type": family,
        "architectures": [model_class],
        **fields,
        "intermediate_size": meta.size("feed_forward_length"),
    }


# --------------------------------------------------------------------------------- Granite and SmolLM3


def granite_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    """Return the fields of config.json of Granite."""
    if not meta.get("rope.scaling.finetuned", bool, True):
        raise meta.error("its attention does not know positions", TAKE_ANOTHER)
    return {**_fields(meta, common, "granite", "GraniteForCausalLM"), **multipliers(meta)}


def smollm_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    """Return the fields of config.json of SmolLM3."""
    has_positions = [int((i + 1) % _PERIOD_WITHOUT_POSITIONS > 0) for i in range(common["num_hidden_layers"])]
    return {**_fields(meta, common, "smollm3", "SmolLM3ForCausalLM"), "no_rope_layers": has_positions}


def plan_llama(fields: Fields, _names: Collection[str]) -> Plan:
    """Yield the tensors of a model with Llama's layers."""
    yield from outside(fields)
    for i in range(fields["num_hidden_layers"]):
        yield from in_layer(i, norms(_NORMS, fields["hidden_size"]))
        yield from in_layer(i, attention(fields, has_pairs=True))
        yield from in_layer(i, gated("mlp", fields["hidden_size"], fields["intermediate_size"]))


# ---------------------------------------------------------------------------------------------- OLMo 2


def olmo_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    """Return the fields of config.json of OLMo 2."""
    if meta.get("attention.sliding_window", int):
        raise meta.error("OLMo 3, with sliding windows, is not read from GGUF", TAKE_ANOTHER)
    return _fields(meta, common, "olmo2", "Olmo2ForCausalLM")


def plan_olmo(fields: Fields, _names: Collection[str]) -> Plan:
    """Yield the tensors of OLMo 2."""
    dim = fields["head_dim"]
    yield from outside(fields)
    for i in range(fields["num_hidden_layers"]):
        yield from in_layer(i, norms(_AFTER, fields["hidden_size"]))
        yield from in_layer(i, attention(fields))
        yield from in_layer(i, norms({"attn_q_norm": "self_attn.q_norm"}, fields["num_attention_heads"] * dim))
        yield from in_layer(i, norms({"attn_k_norm": "self_attn.k_norm"}, fields["num_key_value_heads"] * dim))
        yield from in_layer(i, gated("mlp", fields["hidden_size"], fields["intermediate_size"]))


# ----------------------------------------------------------------------------------------------- GLM-4


def glm_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    """Return the fields of config.json of GLM-4-0414."""
    if meta.get("rope.dimension_sections", list):
        raise meta.error("GLM-4 with positions of several dimensions is not read from GGUF", TAKE_ANOTHER)
    has_bias = "blk.0.attn_q.bias" in meta.header.tensors
    return {**_fields(meta, common, "glm4", "Glm4ForCausalLM"), "attention_bias": has_bias}


def plan_glm(fields: Fields, _names: Collection[str]) -> Plan:
    """Yield the tensors of GLM-4."""
    hidden, width = fields["hidden_size"], fields["intermediate_size"]
    yield from outside(fields)
    for i in range(fields["num_hidden_layers"]):
        yield from in_layer(i, norms(_GLM_NORMS, hidden))
        yield from in_layer(i, attention(fields))
        if fields["attention_bias"]:
            yield from in_layer(i, _biases(fields))
        yield from in_layer(i, [
            ("ffn_up.weight", Weight("mlp.gate_up_proj.weight", (2 * width, hidden))),
            ("ffn_down.weight", Weight("mlp.down_proj.weight", (hidden, width))),
        ])  # fmt: skip


def _biases(fields: Fields) -> Plan:
    for stored, one in attention(fields):
        if "output" not in stored:
            name = one.name.replace(".weight", ".bias")
            yield stored.replace(".weight", ".bias"), Weight(name, one.shape[:1])


# ------------------------------------------------------------------------------------------- Qwen2-MoE


def qwen_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    """Return the fields of config.json of Qwen2-MoE."""
    return {
        **_fields(meta, common, "qwen2_moe", "Qwen2MoeForCausalLM"),
        **meta.experts("num_experts"),
        "moe_intermediate_size": meta.size("expert_feed_forward_length"),
        "shared_expert_intermediate_size": meta.size("expert_shared_feed_forward_length"),
        "norm_topk_prob": False,
    }


def plan_qwen(fields: Fields, _names: Collection[str]) -> Plan:
    """Yield the tensors of Qwen2-MoE."""
    hidden, count = fields["hidden_size"], fields["num_experts"]
    yield from outside(fields)
    for i in range(fields["num_hidden_layers"]):
        yield from in_layer(i, norms(_NORMS, hidden))
        yield from in_layer(i, attention(fields))
        yield from in_layer(i, _biases(fields))
        yield from in_layer(i, [
            ("ffn_gate_inp.weight", Weight("mlp.gate.weight", (count, hidden))),
            ("ffn_gate_inp_shexp.weight", Weight("mlp.shared_expert_gate.weight", (1, hidden))),
        ])  # fmt: skip
        shared = fields["shared_expert_intermediate_size"]
        yield from in_layer(i, gated("mlp.shared_expert", hidden, shared, end="_shexp"))
        yield from in_layer(i, experts("mlp.experts", hidden, fields["moe_intermediate_size"], count))

"""Models with attention and one MLP in all layers, such as Llama, Qwen, Granite, SmolLM3, Phi 3, OLMo and GLM-4."""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from specinfer.model.gguf.families.mamba import with_and_without_positions
from specinfer.model.gguf.families.plan_parts import (
    HEAD_NORMS,
    NORMS,
    QKV,
    Family,
    Fields,
    Plan,
    attention,
    gated,
    granite_fields,
    in_layer,
    multiplier_keys,
    norms,
    outside,
    whole_fields,
    with_biases,
)
from specinfer.model.gguf.metadata import TAKE_ANOTHER, Metadata
from specinfer.model.gguf.weights import Weight

_AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_GLM_NORMS = NORMS | {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"}
_WINDOW = "attention.sliding_window"
_PERIOD_WITHOUT_POSITIONS = 4  # of SmolLM3's layers, which files do not have


def _plan(layer: Callable[[Fields], Plan], fields: Fields, _names: Collection[str]) -> Plan:
    yield from outside(fields)
    for i in range(fields["num_hidden_layers"]):
        yield from in_layer(i, layer(fields))


def _mlp(fields: Fields) -> Plan:
    return gated("mlp", fields["hidden_size"], fields["intermediate_size"])


def _joined_mlp(fields: Fields) -> Plan:
    """Yield the matrices of an MLP whose gates and values are one."""
    hidden, width = fields["hidden_size"], fields["intermediate_size"]
    yield "ffn_up.weight", Weight("mlp.gate_up_proj.weight", (2 * width, hidden))
    yield "ffn_down.weight", Weight("mlp.down_proj.weight", (hidden, width))


# ------------------------------------------------------------------------------ Llama and Qwen, and others like them


def llama_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    """Return the fields of config.json of Llama."""
    has_bias = "blk.0.attn_q.bias" in meta.header.tensors
    return {**whole_fields(meta, common, "llama", "LlamaForCausalLM"), "attention_bias": has_bias}


def smollm_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    """Return the fields of config.json of SmolLM3."""
    has_positions = [int((i + 1) % _PERIOD_WITHOUT_POSITIONS > 0) for i in range(common["num_hidden_layers"])]
    return {**whole_fields(meta, common, "smollm3", "SmolLM3ForCausalLM"), "no_rope_layers": has_positions}


def _llama_layer(fields: Fields) -> Plan:
    yield from norms(NORMS, fields["hidden_size"])
    yield from with_biases(attention(fields, has_pairs=True), QKV if fields.get("attention_bias") else ())
    yield from _mlp(fields)


def _qwen2_layer(fields: Fields) -> Plan:
    yield from norms(NORMS, fields["hidden_size"])
    yield from with_biases(attention(fields), QKV[:3])
    yield from _mlp(fields)


def _qwen3_layer(fields: Fields) -> Plan:
    yield from norms(NORMS, fields["hidden_size"])
    yield from attention(fields)
    yield from norms(HEAD_NORMS, fields["head_dim"])
    yield from _mlp(fields)


# ------------------------------------------------------------------------------------ Phi 3, OLMo 2 and GLM-4


def phi_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    """Return the fields of config.json of Phi 3, which rotates a part of each head in some models."""
    fields = whole_fields(meta, common, "phi3", "Phi3ForCausalLM", may_rotate_part=True)
    window = meta.get("attention.sliding_window", int, 0)
    fields["sliding_window"] = meta.size("attention.sliding_window") if window else None
    if (original := fields["rope_parameters"].get("original_max_position_embeddings")) is not None:
        fields["original_max_position_embeddings"] = original
    return fields


def _phi_layer(fields: Fields) -> Plan:
    hidden, dim = fields["hidden_size"], fields["head_dim"]
    rows = (fields["num_attention_heads"] + 2 * fields["num_key_value_heads"]) * dim
    yield from norms(NORMS, hidden)
    yield "attn_qkv.weight", Weight("self_attn.qkv_proj.weight", (rows, hidden))
    yield from (pair for pair in attention(fields) if "output" in pair[0])
    yield from _joined_mlp(fields)


def olmo_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    """Return the fields of config.json of OLMo 2, or of OLMo 3, which has windows in some layers."""
    if not meta.get("attention.sliding_window", int):
        return whole_fields(meta, common, "olmo2", "Olmo2ForCausalLM")
    fields = whole_fields(meta, common, "olmo3", "Olmo3ForCausalLM")
    full, windows = fields["rope_parameters"], meta.sizes(f"{_WINDOW}_pattern", common["num_hidden_layers"])
    return {
        **fields,
        "rope_parameters": {
            "full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": full["rope_theta"]},
        },
        "sliding_window": meta.size(_WINDOW),
        "layer_types": ["sliding_attention" if one else "full_attention" for one in windows],
    }


def _olmo_keys(fields: Fields) -> dict[str, Any]:
    kinds = fields.get("layer_types")
    return {f"{_WINDOW}_pattern": None if kinds is None else [kind == "sliding_attention" for kind in kinds]}


def _olmo_layer(fields: Fields) -> Plan:
    dim = fields["head_dim"]
    yield from norms(_AFTER, fields["hidden_size"])
    yield from attention(fields)
    yield from norms({"attn_q_norm": "self_attn.q_norm"}, fields["num_attention_heads"] * dim)
    yield from norms({"attn_k_norm": "self_attn.k_norm"}, fields["num_key_value_heads"] * dim)
    yield from _mlp(fields)


def glm_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    """Return the fields of config.json of GLM-4-0414."""
    if meta.get("rope.dimension_sections", list):
        raise meta.error("GLM-4 with positions of several dimensions is not read from GGUF", TAKE_ANOTHER)
    fields = whole_fields(meta, common, "glm4", "Glm4ForCausalLM", may_rotate_part=True)
    return {**fields, "attention_bias": "blk.0.attn_q.bias" in meta.header.tensors}


def _glm_layer(fields: Fields) -> Plan:
    yield from norms(_GLM_NORMS, fields["hidden_size"])
    yield from with_biases(attention(fields), QKV[:3] if fields["attention_bias"] else ())
    yield from _joined_mlp(fields)


def _whole(family: str, model_class: str) -> Any:
    return partial(whole_fields, family=family, model_class=model_class)


FAMILIES = {
    "llama": Family(llama_fields, partial(_plan, _llama_layer), written=("llama", "mistral")),
    "qwen2": Family(_whole("qwen2", "Qwen2ForCausalLM"), partial(_plan, _qwen2_layer), written=("qwen2",)),
    "qwen3": Family(_whole("qwen3", "Qwen3ForCausalLM"), partial(_plan, _qwen3_layer), written=("qwen3",)),
    "granite": with_and_without_positions(
        Family(
            partial(granite_fields, family="granite", model_class="GraniteForCausalLM"),
            partial(_plan, _llama_layer),
            written=("granite",),
            keys=multiplier_keys,
        )
    ),
    "smollm3": Family(smollm_fields, partial(_plan, _llama_layer), written=("smollm3",)),
    "phi3": Family(phi_fields, partial(_plan, _phi_layer), written=("phi3",)),
    "olmo2": Family(olmo_fields, partial(_plan, _olmo_layer), written=("olmo2", "olmo3"), keys=_olmo_keys),
    "glm4": Family(glm_fields, partial(_plan, _glm_layer), written=("glm4",)),
}

"""Models with attention and one MLP in all layers, such as Llama, Qwen, Granite, SmolLM3, Phi 3, OLMo, GLM-4, Gemma."""

from functools import partial
from typing import Any

from specinfer.model.gguf.families import parts
from specinfer.model.gguf.families.mamba import with_and_without_positions
from specinfer.model.gguf.families.parts import HEAD_NORMS, NORMS, QKV, WINDOW, Family, Fields, Plan
from specinfer.model.gguf.metadata import TAKE_ANOTHER, Metadata
from specinfer.model.gguf.weights import Weight

_AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_GEMMA_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm", **_AFTER}
_GLM_NORMS = NORMS | {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"}
_PERIOD_WITHOUT_POSITIONS = 4  # of SmolLM3's layers, which files do not have


def _joined_mlp(fields: Fields) -> Plan:
    """Yield the matrices of an MLP whose gates and values are one."""
    hidden, width = fields["hidden_size"], fields["intermediate_size"]
    yield "ffn_up.weight", Weight("mlp.gate_up_proj.weight", (2 * width, hidden))
    yield "ffn_down.weight", Weight("mlp.down_proj.weight", (hidden, width))


# ------------------------------------------------------------------------------ Llama and Qwen, and others like them


def _llama_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    has_bias = "blk.0.attn_q.bias" in meta.header.tensors
    return {**parts.whole_fields(meta, common, "llama", "LlamaForCausalLM"), "attention_bias": has_bias}


def _smollm_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    has_positions = [int((i + 1) % _PERIOD_WITHOUT_POSITIONS > 0) for i in range(common["num_hidden_layers"])]
    return {**parts.whole_fields(meta, common, "smollm3", "SmolLM3ForCausalLM"), "no_rope_layers": has_positions}


def _llama_layer(fields: Fields, *_: Any) -> Plan:
    yield from parts.norms(NORMS, fields["hidden_size"])
    yield from parts.with_biases(parts.attention(fields, has_pairs=True), QKV if fields.get("attention_bias") else ())
    yield from parts.mlp(fields)


def _qwen2_layer(fields: Fields, *_: Any) -> Plan:
    yield from parts.norms(NORMS, fields["hidden_size"])
    yield from parts.with_biases(parts.attention(fields), QKV[:3])
    yield from parts.mlp(fields)


def _qwen3_layer(fields: Fields, *_: Any) -> Plan:
    yield from parts.norms(NORMS, fields["hidden_size"])
    yield from parts.attention(fields)
    yield from parts.norms(HEAD_NORMS, fields["head_dim"])
    yield from parts.mlp(fields)


def _ernie_layer(fields: Fields, *_: Any) -> Plan:
    yield from parts.norms(NORMS, fields["hidden_size"])
    yield from parts.attention(fields)
    yield from parts.mlp(fields)


# ------------------------------------------------------------------------------------ Phi 3, OLMo 2 and GLM-4


def _phi_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    """Return the fields of Phi 3, which rotates a part of each head in some models."""
    fields = parts.whole_fields(meta, common, "phi3", "Phi3ForCausalLM", may_rotate_part=True)
    fields["sliding_window"] = meta.size(WINDOW) if meta.get(WINDOW, int, 0) else None
    if (original := fields["rope_parameters"].get("original_max_position_embeddings")) is not None:
        fields["original_max_position_embeddings"] = original
    return fields


def _phi_layer(fields: Fields, *_: Any) -> Plan:
    hidden, dim = fields["hidden_size"], fields["head_dim"]
    rows = (fields["num_attention_heads"] + 2 * fields["num_key_value_heads"]) * dim
    yield from parts.norms(NORMS, hidden)
    yield "attn_qkv.weight", Weight("self_attn.qkv_proj.weight", (rows, hidden))
    yield from (pair for pair in parts.attention(fields) if "output" in pair[0])
    yield from _joined_mlp(fields)


def _olmo_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    """Return the fields of OLMo 2, or of OLMo 3, which has windows in some layers."""
    if not meta.get(WINDOW, int):
        return parts.whole_fields(meta, common, "olmo2", "Olmo2ForCausalLM")
    fields = parts.whole_fields(meta, common, "olmo3", "Olmo3ForCausalLM")
    full, windows = fields["rope_parameters"], meta.sizes(f"{WINDOW}_pattern", common["num_hidden_layers"])
    return {
        **fields,
        "rope_parameters": {
            "full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": full["rope_theta"]},
        },
        "sliding_window": meta.size(WINDOW),
        "layer_types": ["sliding_attention" if one else "full_attention" for one in windows],
    }


def _olmo_keys(fields: Fields) -> dict[str, Any]:
    kinds = fields.get("layer_types")
    return {f"{WINDOW}_pattern": None if kinds is None else [kind == "sliding_attention" for kind in kinds]}


def _olmo_layer(fields: Fields, *_: Any) -> Plan:
    dim = fields["head_dim"]
    yield from parts.norms(_AFTER, fields["hidden_size"])
    yield from parts.attention(fields)
    yield from parts.norms({"attn_q_norm": "self_attn.q_norm"}, fields["num_attention_heads"] * dim)
    yield from parts.norms({"attn_k_norm": "self_attn.k_norm"}, fields["num_key_value_heads"] * dim)
    yield from parts.mlp(fields)


def _glm_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    if meta.get("rope.dimension_sections", list):
        raise meta.error("GLM-4 with positions of several dimensions is not read from GGUF", TAKE_ANOTHER)
    fields = parts.whole_fields(meta, common, "glm4", "Glm4ForCausalLM", may_rotate_part=True)
    return {**fields, "attention_bias": "blk.0.attn_q.bias" in meta.header.tensors}


def _glm_layer(fields: Fields, *_: Any) -> Plan:
    yield from parts.norms(_GLM_NORMS, fields["hidden_size"])
    yield from parts.with_biases(parts.attention(fields), QKV[:3] if fields["attention_bias"] else ())
    yield from _joined_mlp(fields)


# ------------------------------------------- Gemma 2 and 3: windows in most layers, and norms that are stored as 1 more


def _gemma2_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    """Return the fields of Gemma 2; files may omit the window and both caps."""
    return {
        **parts.whole_fields(meta, common, "gemma2", "Gemma2ForCausalLM"),
        **_windows(meta, common, period=2, layers_of_27b=46, window=4096),
        "final_logit_softcapping": meta.get("final_logit_softcapping", float, 30.0),
        "attn_logit_softcapping": meta.get("attn_logit_softcapping", float, 50.0),
    }


def _gemma3_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    """Return the fields of Gemma 3, for text."""
    fields = parts.whole_fields(meta, common, "gemma3_text", "Gemma3ForCausalLM")
    local = {"rope_type": "default", "rope_theta": meta.positive("rope.freq_base_swa", 10000.0)}
    return {
        **fields,
        "rope_parameters": {"full_attention": fields["rope_parameters"], "sliding_attention": local},
        **_windows(meta, common, period=6, layers_of_27b=62),
        "final_logit_softcapping": meta.get("final_logit_softcapping", float),
        "attn_logit_softcapping": meta.get("attn_logit_softcapping", float),
    }


def _windows(
    meta: Metadata, common: Fields, period: int, layers_of_27b: int, window: int | None = None
) -> dict[str, Any]:
    """Return the fields of windows, and of the factor of queries.

    Args:
        period: One in this many layers sees all tokens, unless the file says otherwise.
        layers_of_27b: The model with this many layers scales queries by another size; llama.cpp knows it by this, too.
    """
    heads, num_layers = meta.size("attention.head_count"), common["num_hidden_layers"]
    dim = meta.size("attention.key_length", meta.size("rope.dimension_count", common["hidden_size"] // heads))
    period = meta.size(f"{WINDOW}_pattern", period)
    return {
        "sliding_window": meta.size(WINDOW, window),
        "layer_types": ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(num_layers)],
        "query_pre_attn_scalar": common["hidden_size"] // heads if num_layers == layers_of_27b else dim,
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _gemma_keys(fields: Fields) -> dict[str, Any]:
    """Return the metadata of windows, and of caps and rotations of one of the two."""
    local = fields["rope_parameters"].get("sliding_attention")
    kinds = [*fields["layer_types"], "full_attention"]
    return {
        f"{WINDOW}_pattern": kinds.index("full_attention") + 1,
        "rope.freq_base_swa": None if local is None else float(local["rope_theta"]),
        **{name: fields[name] for name in ("final_logit_softcapping", "attn_logit_softcapping")},
    }


def _gemma_layer(fields: Fields, *_: Any) -> Plan:
    yield from parts.norms(_GEMMA_NORMS, fields["hidden_size"], 1.0)
    yield from parts.attention(fields)
    if fields["model_type"] != "gemma2":
        yield from parts.norms(HEAD_NORMS, fields["head_dim"], 1.0)
    yield from parts.mlp(fields)


def _whole(family: str, model_class: str) -> Any:
    return partial(parts.whole_fields, family=family, model_class=model_class)


_GEMMA = Family(
    _gemma2_fields, _gemma_layer, outside=lambda fields, _: parts.outside(fields, less=1.0), written=("gemma2",),
    keys=_gemma_keys,
)  # fmt: skip
FAMILIES = {
    "llama": Family(_llama_fields, _llama_layer, written=("llama", "mistral")),
    "qwen2": Family(_whole("qwen2", "Qwen2ForCausalLM"), _qwen2_layer, written=("qwen2",)),
    "qwen3": Family(_whole("qwen3", "Qwen3ForCausalLM"), _qwen3_layer, written=("qwen3",)),
    "granite": with_and_without_positions(
        Family(_whole("granite", "GraniteForCausalLM"), _llama_layer, parts.MULTIPLIERS, written=("granite",))
    ),
    "smollm3": Family(_smollm_fields, _llama_layer, written=("smollm3",)),
    "phi3": Family(_phi_fields, _phi_layer, written=("phi3",)),
    "olmo2": Family(_olmo_fields, _olmo_layer, written=("olmo2", "olmo3"), keys=_olmo_keys),
    "glm4": Family(_glm_fields, _glm_layer, written=("glm4",)),
    # Pairs of neighbouring numbers are rotated, as in llama.cpp.
    "ernie4_5": Family(_whole("ernie4_5", "Ernie4_5ForCausalLM"), _ernie_layer, written=("ernie4_5",)),
    "gemma2": _GEMMA,
    "gemma3": _GEMMA._replace(read_fields=_gemma3_fields, written=("gemma3_text",)),
}

"""LFM2: short convolutions, and attention in some layers."""

from collections.abc import Collection
from typing import Any

from specinfer.model.gguf.families.plan_parts import (
    Family,
    Fields,
    Plan,
    attention,
    attention_fields,
    experts,
    gated,
    in_layer,
    kv_heads_by_layer,
    norms,
)
from specinfer.model.gguf.metadata import TAKE_ANOTHER, Metadata
from specinfer.model.gguf.weights import Weight

_NORMS = {"attn_norm": "operator_norm", "ffn_norm": "ffn_norm"}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm"}
_GATED = ("w1", "w3", "w2")
_SIGMOID = 2


def dense_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    """Return the fields of a dense model's config.json."""
    return {
        "model_type": "lfm2",
        "architectures": ["Lfm2ForCausalLM"],
        "block_auto_adjust_ff_dim": False,  # the file has the width as it is
        **_fields(meta, common),
    }


def moe_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    """Return the fields of config.json of a model with experts."""
    if meta.get("expert_gating_func", int, _SIGMOID) != _SIGMOID:
        raise meta.error(f"{meta.arch}.expert_gating_func is not {_SIGMOID}, sigmoid", TAKE_ANOTHER)
    return {
        "model_type": "lfm2_moe",
        "architectures": ["Lfm2MoeForCausalLM"],
        "num_dense_layers": meta.sizes("leading_dense_block_count", 1)[0],
        **meta.experts("num_experts"),
        "moe_intermediate_size": meta.size("expert_feed_forward_length"),
        "use_expert_bias": True,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        **_fields(meta, common),
    }


def _fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    kv_heads = meta.sizes("attention.head_count_kv", common["num_hidden_layers"])
    return {
        **attention_fields(meta, common),
        "intermediate_size": meta.size("feed_forward_length"),
        "layer_types": ["full_attention" if one else "conv" for one in kv_heads],
        "conv_L_cache": meta.size("shortconv.l_cache"),
        "conv_bias": False,
        "norm_eps": common["rms_norm_eps"],
    }


def _keys(fields: Fields) -> dict[str, Any]:
    return {
        "attention.head_count_kv": kv_heads_by_layer(fields),
        "shortconv.l_cache": fields["conv_L_cache"],
        "leading_dense_block_count": fields.get("num_dense_layers"),
        "expert_gating_func": _SIGMOID if "num_dense_layers" in fields else None,
    }


def plan(fields: Fields, names: Collection[str]) -> Plan:
    """Yield the tensors of a model."""
    hidden, vocab = fields["hidden_size"], fields["vocab_size"]
    yield "token_embd.weight", Weight("model.embed_tokens.weight", (vocab, hidden))
    norm = "token_embd_norm" if "token_embd_norm.weight" in names else "output_norm"
    yield f"{norm}.weight", Weight("model.embedding_norm.weight", (hidden,))
    if not fields["tie_word_embeddings"]:
        yield "output.weight", Weight("lm_head.weight", (vocab, hidden))
    for i, kind in enumerate(fields["layer_types"]):
        yield from in_layer(i, norms(_NORMS, hidden))
        if kind == "full_attention":
            yield from in_layer(i, attention(fields, out="out_proj"))
            yield from in_layer(i, norms(_HEAD_NORMS, fields["head_dim"]))
        else:
            yield from in_layer(i, _convolution(hidden, fields["conv_L_cache"]))
        if i < fields.get("num_dense_layers", i + 1):
            yield from in_layer(i, gated("feed_forward", hidden, fields["intermediate_size"], _GATED))
        else:
            yield from in_layer(i, _experts(fields))


def _convolution(hidden: int, taps: int) -> Plan:
    yield "shortconv.conv.weight", Weight("conv.conv.weight", (hidden, 1, taps), stored=(hidden, taps))
    yield "shortconv.in_proj.weight", Weight("conv.in_proj.weight", (3 * hidden, hidden))
    yield "shortconv.out_proj.weight", Weight("conv.out_proj.weight", (hidden, hidden))


def _experts(fields: Fields) -> Plan:
    hidden, count = fields["hidden_size"], fields["num_experts"]
    yield "ffn_gate_inp.weight", Weight("feed_forward.gate.weight", (count, hidden))
    yield "exp_probs_b.bias", Weight("feed_forward.expert_bias", (count,))
    yield from experts("feed_forward.experts", hidden, fields["moe_intermediate_size"], count)


FAMILIES = {
    "lfm2": Family(dense_fields, plan, written=("lfm2",), keys=_keys),
    "lfm2moe": Family(moe_fields, plan, written=("lfm2_moe",), keys=_keys),
}

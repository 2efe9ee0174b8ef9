"""Gemma 2 and Gemma 3: windows in most layers, and norms that are stored as 1 more."""

from collections.abc import Collection
from typing import Any

from specinfer.model.gguf.families.plan_parts import (
    HEAD_NORMS,
    Family,
    Fields,
    Plan,
    attention,
    gated,
    in_layer,
    norms,
    outside,
    whole_fields,
)
from specinfer.model.gguf.metadata import Metadata

_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_WINDOW = "attention.sliding_window"


def gemma2_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    """Return the fields of config.json of Gemma 2; files may omit the window and both caps."""
    return {
        **whole_fields(meta, common, "gemma2", "Gemma2ForCausalLM"),
        **_windows(meta, common, period=2, layers_of_27b=46, window=4096),
        "final_logit_softcapping": meta.get("final_logit_softcapping", float, 30.0),
        "attn_logit_softcapping": meta.get("attn_logit_softcapping", float, 50.0),
    }


def gemma3_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    """Return the fields of config.json of Gemma 3, for text."""
    fields = whole_fields(meta, common, "gemma3_text", "Gemma3ForCausalLM")
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
    period = meta.size(f"{_WINDOW}_pattern", period)
    return {
        "sliding_window": meta.size(_WINDOW, window),
        "layer_types": ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(num_layers)],
        "query_pre_attn_scalar": common["hidden_size"] // heads if num_layers == layers_of_27b else dim,
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _keys(fields: Fields) -> dict[str, Any]:
    """Return the metadata of windows, and of caps and rotations of one of the two."""
    local = fields["rope_parameters"].get("sliding_attention")
    kinds = [*fields["layer_types"], "full_attention"]
    return {
        f"{_WINDOW}_pattern": kinds.index("full_attention") + 1,
        "rope.freq_base_swa": None if local is None else float(local["rope_theta"]),
        **{name: fields[name] for name in ("final_logit_softcapping", "attn_logit_softcapping")},
    }


def plan(fields: Fields, _names: Collection[str]) -> Plan:
    """Yield the tensors of Gemma."""
    yield from outside(fields, less=1.0)
    for i in range(fields["num_hidden_layers"]):
        yield from in_layer(i, norms(_NORMS, fields["hidden_size"], 1.0))
        yield from in_layer(i, attention(fields))
        if fields["model_type"] != "gemma2":
            yield from in_layer(i, norms(HEAD_NORMS, fields["head_dim"], 1.0))
        yield from in_layer(i, gated("mlp", fields["hidden_size"], fields["intermediate_size"]))


FAMILIES = {
    "gemma2": Family(gemma2_fields, plan, written=("gemma2",), keys=_keys),
    "gemma3": Family(gemma3_fields, plan, written=("gemma3_text",), keys=_keys),
}

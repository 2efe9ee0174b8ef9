"""ERNIE 4.5: pairs of neighbouring numbers are rotated, as in llama.cpp; some models have experts in most layers."""

from collections.abc import Collection
from typing import Any

from specinfer.model.gguf.families.plan_parts import (
    NORMS,
    Family,
    Fields,
    Plan,
    attention,
    experts,
    gated,
    in_layer,
    norms,
    outside,
    whole_fields,
)
from specinfer.model.gguf.metadata import Metadata
from specinfer.model.gguf.weights import Weight

_SHARED = "expert_shared_feed_forward_length"


def read_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    """Return the fields of config.json of a model without experts."""
    return whole_fields(meta, common, "ernie4_5", "Ernie4_5ForCausalLM")


def moe_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    """Return the fields of config.json of a model with experts; files do not have the layer where these end."""
    num_layers, start = common["num_hidden_layers"], meta.get("leading_dense_block_count", int, 0)
    if not 0 <= start <= num_layers:
        raise meta.error(f"{meta.arch}.leading_dense_block_count is {start}")
    width = meta.size("expert_feed_forward_length")
    shared = meta.get("expert_shared_count", int, 0) and meta.size("expert_shared_count")
    counts = meta.experts("moe_num_experts")
    return {
        **whole_fields(meta, common, "ernie4_5_moe", "Ernie4_5_MoeForCausalLM"),
        "moe_num_experts": counts["moe_num_experts"],
        "moe_k": counts["num_experts_per_tok"],
        "moe_intermediate_size": width,
        "moe_num_shared_experts": shared,
        "moe_layer_start_index": start,
        "moe_layer_end_index": num_layers - 1,
        "moe_layer_interval": meta.size("interleave_moe_layer_step", 1),
    }


def plan(fields: Fields, _names: Collection[str]) -> Plan:
    """Yield the tensors of a model."""
    hidden = fields["hidden_size"]
    yield from outside(fields)
    for i in range(fields["num_hidden_layers"]):
        yield from in_layer(i, norms(NORMS, hidden))
        yield from in_layer(i, attention(fields))
        has_experts = "moe_num_experts" in fields and i >= fields["moe_layer_start_index"]
        if has_experts and (i + 1) % fields["moe_layer_interval"] == 0:
            yield from in_layer(i, _experts(fields))
        else:
            yield from in_layer(i, gated("mlp", hidden, fields["intermediate_size"]))


def _experts(fields: Fields) -> Plan:
    hidden, count, width = fields["hidden_size"], fields["moe_num_experts"], fields["moe_intermediate_size"]
    yield "ffn_gate_inp.weight", Weight("mlp.gate.weight", (count, hidden))
    yield "exp_probs_b.bias", Weight("mlp.moe_statics.e_score_correction_bias", (1, count), stored=(count,))
    yield from experts("mlp.experts", hidden, width, count)
    if shared := fields["moe_num_shared_experts"]:
        yield from gated("mlp.shared_experts", hidden, width * shared, end="_shexp")


def _keys(fields: Fields) -> dict[str, Any]:
    shared = fields["moe_num_shared_experts"]
    return {
        "expert_shared_count": shared,
        _SHARED: fields["moe_intermediate_size"] * shared if shared else None,
        "interleave_moe_layer_step": fields["moe_layer_interval"],
        "leading_dense_block_count": fields["moe_layer_start_index"],
    }


FAMILIES = {
    "ernie4_5": Family(read_fields, plan, written=("ernie4_5",)),
    "ernie4_5-moe": Family(moe_fields, plan, written=("ernie4_5_moe",), keys=_keys),
}

"""Models with Mamba layers, of which each channel has decays of its own: Jamba, Mamba and Falcon-Mamba."""

from collections.abc import Collection, Sequence
from typing import Any

from specinfer.model.gguf.families.plan_parts import (
    Family,
    Fields,
    Plan,
    attention,
    attention_fields,
    expansion,
    experts,
    gated,
    in_layer,
    kv_heads_by_layer,
    norms,
    outside,
)
from specinfer.model.gguf.metadata import TAKE_ANOTHER, Metadata
from specinfer.model.gguf.weights import Weight


def _mamba(module: str, hidden: int, inner: int, state: int, rank: int, taps: int) -> Plan:
    """Yield the tensors of a Mamba layer."""
    yield "ssm_in.weight", Weight(f"{module}.in_proj.weight", (2 * inner, hidden))
    yield "ssm_conv1d.weight", Weight(f"{module}.conv1d.weight", (inner, 1, taps), stored=(inner, taps))
    yield "ssm_conv1d.bias", Weight(f"{module}.conv1d.bias", (inner,))
    yield "ssm_x.weight", Weight(f"{module}.x_proj.weight", (rank + 2 * state, inner))
    yield "ssm_dt.weight", Weight(f"{module}.dt_proj.weight", (inner, rank))
    yield "ssm_dt.bias", Weight(f"{module}.dt_proj.bias", (inner,))
    yield "ssm_a", Weight(f"{module}.A_log", (inner, state), is_log=True)
    yield "ssm_d", Weight(f"{module}.D", (inner,))
    yield "ssm_out.weight", Weight(f"{module}.out_proj.weight", (hidden, inner))


# ----------------------------------------------------------------------------------------------- Jamba


def jamba_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    """Return the fields of config.json of Jamba."""
    num_layers = common["num_hidden_layers"]
    kv_heads = meta.sizes("attention.head_count_kv", num_layers)
    routed = [f"blk.{i}.ffn_gate_inp.weight" in meta.header.tensors for i in range(num_layers)]
    period, offset = _period(meta, "attention", [i for i, one in enumerate(kv_heads) if one], num_layers)
    fields = {
        "model_type": "jamba",
        "architectures": ["JambaForCausalLM"],
        **attention_fields(meta, common, rotates=False),
        "intermediate_size": meta.size("feed_forward_length"),
        "attn_layer_period": period,
        "attn_layer_offset": offset,
        "num_experts": 1,
        "num_experts_per_tok": 1,
        "mamba_d_state": meta.size("ssm.state_size"),
        "mamba_d_conv": meta.size("ssm.conv_kernel"),
        "mamba_dt_rank": meta.size("ssm.time_step_rank"),
        "mamba_expand": expansion(meta, common),
    }
    if any(routed):
        period, offset = _period(meta, "experts", [i for i, one in enumerate(routed) if one], num_layers)
        fields |= {
            **meta.experts("num_experts"),
            "expert_layer_period": period,
            "expert_layer_offset": offset,
        }
    return fields


def _period(meta: Metadata, what: str, layers: Sequence[int], num_layers: int) -> tuple[int, int]:
    """Return how often layers of a kind come, and the first of them."""
    period = layers[1] - layers[0] if len(layers) > 1 else num_layers
    if not layers or layers[0] >= period or list(layers) != list(range(layers[0], num_layers, period)):
        raise meta.error(f"layers with {what} do not come at equal distances", TAKE_ANOTHER)
    return period, layers[0]


def _jamba_keys(fields: Fields) -> dict[str, Any]:
    return {
        "attention.head_count_kv": kv_heads_by_layer(fields),
        "ssm.inner_size": fields["mamba_expand"] * fields["hidden_size"],
        "ssm.state_size": fields["mamba_d_state"],
        "ssm.conv_kernel": fields["mamba_d_conv"],
        "ssm.time_step_rank": fields["mamba_dt_rank"],
    }


def plan_jamba(fields: Fields, _names: Collection[str]) -> Plan:
    """Yield the tensors of Jamba."""
    hidden, width, count = fields["hidden_size"], fields["intermediate_size"], fields["num_experts"]
    state, rank = fields["mamba_d_state"], fields["mamba_dt_rank"]
    inner = hidden * fields["mamba_expand"]
    yield from outside(fields, norm="model.final_layernorm")
    for i in range(fields["num_hidden_layers"]):
        yield from in_layer(i, norms({"attn_norm": "input_layernorm", "ffn_norm": "pre_ff_layernorm"}, hidden))
        if i % fields["attn_layer_period"] == fields["attn_layer_offset"]:
            yield from in_layer(i, attention(fields))
        else:
            yield from in_layer(i, _mamba("mamba", hidden, inner, state, rank, fields["mamba_d_conv"]))
            yield from in_layer(i, norms({"ssm_dt_norm": "mamba.dt_layernorm"}, rank))
            yield from in_layer(i, norms({f"ssm_{one}_norm": f"mamba.{one}_layernorm" for one in "bc"}, state))
        if count > 1 and i % fields["expert_layer_period"] == fields["expert_layer_offset"]:
            yield from in_layer(i, [("ffn_gate_inp.weight", Weight("feed_forward.router.weight", (count, hidden)))])
            yield from in_layer(i, experts("feed_forward.experts", hidden, width, count))
        else:
            yield from in_layer(i, gated("feed_forward", hidden, width))


# ----------------------------------------------------------------------------- Mamba and Falcon-Mamba


def mamba_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    """Return the fields of config.json of a model of Mamba layers alone."""
    has_norms = meta.get("ssm.dt_b_c_rms", bool, False)
    return {
        "model_type": "falcon_mamba" if has_norms else "mamba",
        "architectures": ["FalconMambaForCausalLM" if has_norms else "MambaForCausalLM"],
        "state_size": meta.size("ssm.state_size"),
        "conv_kernel": meta.size("ssm.conv_kernel"),
        "time_step_rank": meta.size("ssm.time_step_rank"),
        "expand": expansion(meta, common),
        "layer_norm_epsilon": common["rms_norm_eps"],
    }


def _mamba_keys(fields: Fields) -> dict[str, Any]:
    return {
        "ssm.dt_b_c_rms": fields["model_type"] == "falcon_mamba",
        "ssm.inner_size": fields["expand"] * fields["hidden_size"],
        "ssm.state_size": fields["state_size"],
        "ssm.conv_kernel": fields["conv_kernel"],
        "ssm.time_step_rank": fields["time_step_rank"],
    }


def plan_mamba(fields: Fields, _names: Collection[str]) -> Plan:
    """Yield the tensors of a model of Mamba layers alone."""
    hidden, state, rank = fields["hidden_size"], fields["state_size"], fields["time_step_rank"]
    yield from outside(fields, "backbone.embeddings", "backbone.norm_f")
    for i in range(fields["num_hidden_layers"]):
        layer = _mamba("mixer", hidden, hidden * fields["expand"], state, rank, fields["conv_kernel"])
        yield from in_layer(i, [*norms({"attn_norm": "norm"}, hidden), *layer], "backbone.layers")


FAMILIES = {
    "mamba": Family(mamba_fields, plan_mamba, written=("mamba", "falcon_mamba"), keys=_mamba_keys),
    "jamba": Family(jamba_fields, plan_jamba, written=("jamba",), keys=_jamba_keys),
}

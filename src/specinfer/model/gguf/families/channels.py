"""Models with layers of channels: Mamba layers (Jamba, Mamba and Falcon-Mamba), and short convolutions (LFM2)."""

from collections.abc import Collection, Sequence
from typing import Any

from specinfer.model.gguf.families import parts
from specinfer.model.gguf.families.parts import SIGMOID, Family, Fields, Has, Key, Plan
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


def _sizes(state: str, taps: str, rank: str) -> tuple[Key, ...]:
    """Return the sizes of Mamba layers, by their names in config.json."""
    return Key("ssm.state_size", state), Key("ssm.conv_kernel", taps), Key("ssm.time_step_rank", rank)


# ----------------------------------------------------------------------------------------------- Jamba


def _jamba_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    num_layers = common["num_hidden_layers"]
    kv_heads = meta.sizes("attention.head_count_kv", num_layers)
    routed = [f"blk.{i}.ffn_gate_inp.weight" in meta.header.tensors for i in range(num_layers)]
    period, offset = _period(meta, "attention", [i for i, one in enumerate(kv_heads) if one], num_layers)
    fields = {
        "model_type": "jamba",
        "architectures": ["JambaForCausalLM"],
        **parts.attention_fields(meta, common, rotates=False),
        "intermediate_size": meta.size("feed_forward_length"),
        "attn_layer_period": period,
        "attn_layer_offset": offset,
        "num_experts": 1,
        "num_experts_per_tok": 1,
        "mamba_expand": parts.expansion(meta, common),
    }
    if any(routed):
        period, offset = _period(meta, "experts", [i for i, one in enumerate(routed) if one], num_layers)
        fields |= {**meta.experts("num_experts"), "expert_layer_period": period, "expert_layer_offset": offset}
    return fields


def _period(meta: Metadata, what: str, layers: Sequence[int], num_layers: int) -> tuple[int, int]:
    """Return how often layers of a kind come, and the first of them."""
    period = layers[1] - layers[0] if len(layers) > 1 else num_layers
    if not layers or layers[0] >= period or list(layers) != list(range(layers[0], num_layers, period)):
        raise meta.error(f"layers with {what} do not come at equal distances", TAKE_ANOTHER)
    return period, layers[0]


def _jamba_keys(fields: Fields) -> dict[str, Any]:
    inner = fields["mamba_expand"] * fields["hidden_size"]
    return {"attention.head_count_kv": parts.kv_heads_by_layer(fields), "ssm.inner_size": inner}


def _jamba_layer(fields: Fields, number: int, _has: Has) -> Plan:
    hidden, width, count = fields["hidden_size"], fields["intermediate_size"], fields["num_experts"]
    state, rank = fields["mamba_d_state"], fields["mamba_dt_rank"]
    yield from parts.norms({"attn_norm": "input_layernorm", "ffn_norm": "pre_ff_layernorm"}, hidden)
    if number % fields["attn_layer_period"] == fields["attn_layer_offset"]:
        yield from parts.attention(fields)
    else:
        yield from _mamba("mamba", hidden, hidden * fields["mamba_expand"], state, rank, fields["mamba_d_conv"])
        yield from parts.norms({"ssm_dt_norm": "mamba.dt_layernorm"}, rank)
        yield from parts.norms({f"ssm_{one}_norm": f"mamba.{one}_layernorm" for one in "bc"}, state)
    if count > 1 and number % fields["expert_layer_period"] == fields["expert_layer_offset"]:
        yield from parts.experts(fields, count, width, "feed_forward", router="router")
    else:
        yield from parts.gated("feed_forward", hidden, width)


# ----------------------------------------------------------------------------- Mamba and Falcon-Mamba


def _mamba_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    has_norms = meta.get("ssm.dt_b_c_rms", bool, False)
    return {
        "model_type": "falcon_mamba" if has_norms else "mamba",
        "architectures": ["FalconMambaForCausalLM" if has_norms else "MambaForCausalLM"],
        "expand": parts.expansion(meta, common),
        "layer_norm_epsilon": common["rms_norm_eps"],
    }


def _mamba_keys(fields: Fields) -> dict[str, Any]:
    inner = fields["expand"] * fields["hidden_size"]
    return {"ssm.dt_b_c_rms": fields["model_type"] == "falcon_mamba", "ssm.inner_size": inner}


def _mamba_layer(fields: Fields, *_: Any) -> Plan:
    hidden, state, rank = fields["hidden_size"], fields["state_size"], fields["time_step_rank"]
    yield from parts.norms({"attn_norm": "norm"}, hidden)
    yield from _mamba("mixer", hidden, hidden * fields["expand"], state, rank, fields["conv_kernel"])


# ------------------------------------------------------------------------------------------------ LFM2

_NORMS = {"attn_norm": "operator_norm", "ffn_norm": "ffn_norm"}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm"}
_GATED = ("w1", "w3", "w2")


def _lfm_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    kv_heads = meta.sizes("attention.head_count_kv", common["num_hidden_layers"])
    return {
        "model_type": "lfm2",
        "architectures": ["Lfm2ForCausalLM"],
        "block_auto_adjust_ff_dim": False,  # the file has the width as it is
        **parts.attention_fields(meta, common),
        "intermediate_size": meta.size("feed_forward_length"),
        "layer_types": ["full_attention" if one else "conv" for one in kv_heads],
        "conv_bias": False,
        "norm_eps": common["rms_norm_eps"],
    }


def _lfm_moe_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    if meta.get("expert_gating_func", int, SIGMOID) != SIGMOID:
        raise meta.error(f"{meta.arch}.expert_gating_func is not {SIGMOID}, sigmoid", TAKE_ANOTHER)
    fields = _lfm_fields(meta, common)
    del fields["block_auto_adjust_ff_dim"]
    return {
        **fields,
        "model_type": "lfm2_moe",
        "architectures": ["Lfm2MoeForCausalLM"],
        "num_dense_layers": meta.sizes("leading_dense_block_count", 1)[0],
        **meta.experts("num_experts"),
        "use_expert_bias": True,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }


def _lfm_keys(fields: Fields) -> dict[str, Any]:
    return {
        "attention.head_count_kv": parts.kv_heads_by_layer(fields),
        "leading_dense_block_count": fields.get("num_dense_layers"),
        "expert_gating_func": SIGMOID if "num_dense_layers" in fields else None,
    }


def _lfm_outside(fields: Fields, names: Collection[str]) -> Plan:
    norm = "token_embd_norm" if "token_embd_norm.weight" in names else "output_norm"
    return parts.outside(fields, norm="model.embedding_norm", stored_norm=norm)


def _lfm_layer(fields: Fields, number: int, _has: Has) -> Plan:
    hidden, taps = fields["hidden_size"], fields["conv_L_cache"]
    yield from parts.norms(_NORMS, hidden)
    if fields["layer_types"][number] == "full_attention":
        yield from parts.attention(fields, out="out_proj")
        yield from parts.norms(_HEAD_NORMS, fields["head_dim"])
    else:
        yield "shortconv.conv.weight", Weight("conv.conv.weight", (hidden, 1, taps), stored=(hidden, taps))
        yield "shortconv.in_proj.weight", Weight("conv.in_proj.weight", (3 * hidden, hidden))
        yield "shortconv.out_proj.weight", Weight("conv.out_proj.weight", (hidden, hidden))
    if number < fields.get("num_dense_layers", number + 1):
        yield from parts.gated("feed_forward", hidden, fields["intermediate_size"], _GATED)
        return
    count = fields["num_experts"]
    yield "exp_probs_b.bias", Weight("feed_forward.expert_bias", (count,))
    yield from parts.experts(fields, count, fields["moe_intermediate_size"], "feed_forward")


_LFM_NUMBERS = (Key("shortconv.l_cache", "conv_L_cache"),)
_LFM = Family(_lfm_fields, _lfm_layer, _LFM_NUMBERS, _lfm_outside, written=("lfm2",), keys=_lfm_keys)
FAMILIES = {
    "mamba": Family(
        _mamba_fields, _mamba_layer, _sizes("state_size", "conv_kernel", "time_step_rank"),
        lambda fields, _: parts.outside(fields, "backbone.embeddings", "backbone.norm_f"), "backbone.layers",
        written=("mamba", "falcon_mamba"), keys=_mamba_keys,
    ),
    "jamba": Family(
        _jamba_fields, _jamba_layer, _sizes("mamba_d_state", "mamba_d_conv", "mamba_dt_rank"),
        lambda fields, _: parts.outside(fields, norm="model.final_layernorm"), written=("jamba",), keys=_jamba_keys,
    ),
    "lfm2": _LFM,
    "lfm2moe": _LFM._replace(
        read_fields=_lfm_moe_fields, numbers=(*_LFM_NUMBERS, parts.EXPERT_WIDTH), written=("lfm2_moe",)
    ),
}  # fmt: skip

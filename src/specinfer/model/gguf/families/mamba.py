"""Models with Mamba-2 layers: Granite 4, Falcon-H1, and those of such layers alone."""

from collections.abc import Collection
from functools import partial
from typing import Any, NamedTuple

from specinfer.model.gguf.families.plan_parts import (
    GRANITE_GATED,
    Family,
    Fields,
    Plan,
    attention,
    attention_fields,
    expansion,
    gated,
    granite_experts,
    in_layer,
    kv_heads_by_layer,
    multiplier_keys,
    multipliers,
    norms,
    outside,
)
from specinfer.model.gguf.metadata import Metadata
from specinfer.model.gguf.weights import Weight


class Mamba2Names(NamedTuple):
    """Names of a family's fields for the sizes of its Mamba-2 layers."""

    heads: str = "mamba_n_heads"
    dim: str = "mamba_d_head"
    groups: str = "mamba_n_groups"
    state: str = "mamba_d_state"
    taps: str = "mamba_d_conv"


_USUAL = Mamba2Names()
_OF_MAMBA = Mamba2Names("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel")


def mamba2_sizes(meta: Metadata, names: Mamba2Names = _USUAL) -> dict[str, Any]:
    """Return the sizes of Mamba-2 layers as fields of config.json."""
    inner, heads = meta.size("ssm.inner_size"), meta.size("ssm.time_step_rank")
    groups = meta.size("ssm.group_count")
    if inner % heads or heads % groups:
        raise meta.error(f"{meta.arch}.ssm.time_step_rank is {heads}, for {groups} groups and {inner} values")
    values = (heads, inner // heads, groups, meta.size("ssm.state_size"), meta.size("ssm.conv_kernel"))
    return dict(zip(names, values, strict=True))


def mamba2_size_keys(fields: Fields, names: Mamba2Names = _USUAL) -> dict[str, Any]:
    """Return the sizes of Mamba-2 layers as keys of a GGUF file."""
    heads, dim, *sizes = (fields[name] for name in names)
    named = dict(zip(("ssm.group_count", "ssm.state_size", "ssm.conv_kernel"), sizes, strict=True))
    return {"ssm.inner_size": heads * dim, "ssm.time_step_rank": heads, **named}


def has_conv_bias(meta: Metadata) -> bool:
    """Return whether the convolutions of Mamba-2 layers have a bias."""
    return any(name.endswith(".ssm_conv1d.bias") for name in meta.header.tensors)


def mamba2(
    fields: Fields, module: str, names: Mamba2Names = _USUAL, *, has_bias: bool = True, has_norm: bool = True
) -> Plan:
    """Yield the tensors of a Mamba-2 layer; `has_bias` is whether its convolution has one."""
    heads, dim, groups, state, taps = (fields[name] for name in names)
    hidden, inner = fields["hidden_size"], heads * dim
    channels = inner + 2 * groups * state
    yield "ssm_in.weight", Weight(f"{module}.in_proj.weight", (inner + channels + heads, hidden))
    yield "ssm_conv1d.weight", Weight(f"{module}.conv1d.weight", (channels, 1, taps), stored=(channels, taps))
    if has_bias:
        yield "ssm_conv1d.bias", Weight(f"{module}.conv1d.bias", (channels,))
    yield "ssm_dt.bias", Weight(f"{module}.dt_bias", (heads,))
    yield "ssm_a", Weight(f"{module}.A_log", (heads,), stored=(heads, 1), is_log=True)
    yield "ssm_d", Weight(f"{module}.D", (heads,), stored=(heads, 1))
    if has_norm:
        yield "ssm_norm.weight", Weight(f"{module}.norm.weight", (inner,), stored=(groups, inner // groups))
    yield "ssm_out.weight", Weight(f"{module}.out_proj.weight", (hidden, inner))


# ------------------------------------------------------------------------------------------- Granite 4


def granite_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    """Return the fields of config.json of Granite 4, with Mamba-2 layers or without."""
    kv_heads = meta.sizes("attention.head_count_kv", common["num_hidden_layers"])
    if all(kv_heads):
        sizes = {"mamba_n_heads": 1}  # of no layers; the others follow from it
    else:
        sizes = {**mamba2_sizes(meta), "mamba_expand": expansion(meta, common), "mamba_conv_bias": has_conv_bias(meta)}
    count, wide = meta.get("expert_count", int, 0), meta.size("feed_forward_length")
    return {
        "model_type": "granitemoehybrid",
        "architectures": ["GraniteMoeHybridForCausalLM"],
        **attention_fields(meta, common),
        **sizes,
        "layer_types": ["full_attention" if one else "linear_attention" for one in kv_heads],
        "position_embedding_type": "rope" if meta.get("rope.scaling.finetuned", bool, True) else None,
        **multipliers(meta),
        "intermediate_size": meta.size("expert_feed_forward_length", wide) if count else wide,
        "shared_intermediate_size": meta.size("expert_shared_feed_forward_length", wide) if count else wide,
        **(meta.experts("num_local_experts") if count else {"num_local_experts": 0, "num_experts_per_tok": 0}),
    }


def _granite_keys(fields: Fields) -> dict[str, Any]:
    wide, shared = fields["intermediate_size"], fields["shared_intermediate_size"]
    sizes = {"expert_feed_forward_length": wide, "expert_shared_feed_forward_length": shared}
    return {
        "attention.head_count_kv": kv_heads_by_layer(fields),
        "rope.scaling.finetuned": fields["position_embedding_type"] == "rope",
        **({"feed_forward_length": wide} | sizes if fields["num_local_experts"] else {"feed_forward_length": shared}),
        **multiplier_keys(fields),
        **mamba2_size_keys(fields),
    }


def plan_granite(fields: Fields, _names: Collection[str]) -> Plan:
    """Yield the tensors of Granite 4."""
    hidden, count = fields["hidden_size"], fields["num_local_experts"]
    yield from outside(fields)
    for i, kind in enumerate(fields["layer_types"]):
        yield from in_layer(i, norms({"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}, hidden))
        if kind == "full_attention":
            yield from in_layer(i, attention(fields, has_pairs=True))
        else:
            yield from in_layer(i, mamba2(fields, "mamba", has_bias=fields["mamba_conv_bias"]))
        if count:
            yield from in_layer(i, granite_experts(fields))
        end = "_shexp" if count else ""
        yield from in_layer(i, gated("shared_mlp", hidden, fields["shared_intermediate_size"], GRANITE_GATED, end))


def with_and_without_positions(family: Family) -> Family:
    """Return a family whose files without positions are models of Granite 4 with attention in all layers."""

    def read_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
        has_positions = meta.get("rope.scaling.finetuned", bool, True)
        return (family.read_fields if has_positions else granite_fields)(meta, common)

    def plan(fields: Fields, names: Collection[str]) -> Plan:
        return (plan_granite if fields["model_type"] == "granitemoehybrid" else family.plan)(fields, names)

    return family._replace(read_fields=read_fields, plan=plan)


# ------------------------------------------------------------------------------------------- Falcon-H1


def falcon_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    """Return the fields of config.json of Falcon-H1; the factors of its definition are in the stored matrices."""
    names = ("ssm_in", "ssm_out", "attention_in", "attention_out", "key", "embedding", "lm_head")
    return {
        "model_type": "falcon_h1",
        "architectures": ["FalconH1ForCausalLM"],
        **attention_fields(meta, common),
        **mamba2_sizes(meta),
        "mamba_d_ssm": meta.size("ssm.inner_size"),
        "mamba_conv_bias": has_conv_bias(meta),
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in meta.header.tensors,
        "mamba_norm_before_gate": False,
        "intermediate_size": meta.size("feed_forward_length"),
        **{f"{name}_multiplier": 1.0 for name in names},
        "ssm_multipliers": [1.0] * 5,
        "mlp_multipliers": [1.0] * 2,
    }


def plan_falcon(fields: Fields, _names: Collection[str]) -> Plan:
    """Yield the tensors of Falcon-H1."""
    hidden = fields["hidden_size"]
    yield from outside(fields, norm="model.final_layernorm")
    for i in range(fields["num_hidden_layers"]):
        yield from in_layer(i, norms({"attn_norm": "input_layernorm"}, hidden))
        yield from in_layer(i, [("ffn_norm", Weight("pre_ff_layernorm.weight", (hidden,)))])
        yield from in_layer(i, attention(fields))
        has_bias, has_norm = fields["mamba_conv_bias"], fields["mamba_rms_norm"]
        yield from in_layer(i, mamba2(fields, "mamba", has_bias=has_bias, has_norm=has_norm))
        yield from in_layer(i, gated("feed_forward", hidden, fields["intermediate_size"]))


# --------------------------------------------------------------------------------------------- Mamba-2


def mamba2_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    """Return the fields of config.json of a model of Mamba-2 layers alone."""
    return {
        "model_type": "mamba2",
        "architectures": ["Mamba2ForCausalLM"],
        **mamba2_sizes(meta, _OF_MAMBA),
        "expand": expansion(meta, common),
        "use_conv_bias": has_conv_bias(meta),
        "layer_norm_epsilon": common["rms_norm_eps"],
    }


def plan_mamba2(fields: Fields, _names: Collection[str]) -> Plan:
    """Yield the tensors of a model of Mamba-2 layers alone."""
    yield from outside(fields, "backbone.embeddings", "backbone.norm_f")
    for i in range(fields["num_hidden_layers"]):
        layer = mamba2(fields, "mixer", _OF_MAMBA, has_bias=fields["use_conv_bias"])
        yield from in_layer(i, [*norms({"attn_norm": "norm"}, fields["hidden_size"]), *layer], "backbone.layers")


FAMILIES = {
    "granitehybrid": Family(granite_fields, plan_granite, written=("granitemoehybrid",), keys=_granite_keys),
    "falcon-h1": Family(falcon_fields, plan_falcon, written=("falcon_h1",), keys=mamba2_size_keys),
    "mamba2": Family(mamba2_fields, plan_mamba2, written=("mamba2",), keys=partial(mamba2_size_keys, names=_OF_MAMBA)),
}

"""Models with Mamba-2 layers: Granite 4, Falcon-H1, Nemotron-H, and those of such layers alone."""

from functools import partial
from typing import Any, NamedTuple

from specinfer.model.gguf.families import parts
from specinfer.model.gguf.families.parts import GRANITE_GATED, Family, Fields, Has, Key, Plan
from specinfer.model.gguf.metadata import TAKE_ANOTHER, Metadata
from specinfer.model.gguf.weights import Weight


class _Names(NamedTuple):
    """Names of a family's fields for the sizes of its Mamba-2 layers."""

    heads: str = "mamba_n_heads"
    dim: str = "mamba_d_head"
    groups: str = "mamba_n_groups"
    state: str = "mamba_d_state"
    taps: str = "mamba_d_conv"


_USUAL = _Names()
_OF_MAMBA = _Names("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel")
_OF_NEMOTRON = _Names("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")


def _sizes(meta: Metadata, names: _Names = _USUAL) -> dict[str, Any]:
    """Return the sizes of Mamba-2 layers as fields of config.json."""
    inner, heads = meta.size("ssm.inner_size"), meta.size("ssm.time_step_rank")
    groups = meta.size("ssm.group_count")
    if inner % heads or heads % groups:
        raise meta.error(f"{meta.arch}.ssm.time_step_rank is {heads}, for {groups} groups and {inner} values")
    values = (heads, inner // heads, groups, meta.size("ssm.state_size"), meta.size("ssm.conv_kernel"))
    return dict(zip(names, values, strict=True))


def _size_keys(fields: Fields, names: _Names = _USUAL) -> dict[str, Any]:
    """Return the sizes of Mamba-2 layers as keys of a GGUF file."""
    heads, dim, *sizes = (fields[name] for name in names)
    named = dict(zip(("ssm.group_count", "ssm.state_size", "ssm.conv_kernel"), sizes, strict=True))
    return {"ssm.inner_size": heads * dim, "ssm.time_step_rank": heads, **named}


def _has_conv_bias(meta: Metadata) -> bool:
    """Return whether the convolutions of Mamba-2 layers have a bias."""
    return any(name.endswith(".ssm_conv1d.bias") for name in meta.header.tensors)


def _mamba2(
    fields: Fields, module: str, names: _Names = _USUAL, *, has_bias: bool = True, has_norm: bool = True
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


def _granite_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    """Return the fields of Granite 4, with Mamba-2 layers or without."""
    kv_heads = meta.sizes("attention.head_count_kv", common["num_hidden_layers"])
    if all(kv_heads):
        sizes = {"mamba_n_heads": 1}  # of no layers; the others follow from it
    else:
        inner = parts.expansion(meta, common)
        sizes = {**_sizes(meta), "mamba_expand": inner, "mamba_conv_bias": _has_conv_bias(meta)}
    count, wide = meta.get("expert_count", int, 0), meta.size("feed_forward_length")
    return {
        "model_type": "granitemoehybrid",
        "architectures": ["GraniteMoeHybridForCausalLM"],
        **parts.attention_fields(meta, common),
        **sizes,
        "layer_types": ["full_attention" if one else "linear_attention" for one in kv_heads],
        "position_embedding_type": "rope" if meta.get("rope.scaling.finetuned", bool, True) else None,
        "intermediate_size": meta.size("expert_feed_forward_length", wide) if count else wide,
        "shared_intermediate_size": meta.size("expert_shared_feed_forward_length", wide) if count else wide,
        **(meta.experts("num_local_experts") if count else {"num_local_experts": 0, "num_experts_per_tok": 0}),
    }


def _granite_keys(fields: Fields) -> dict[str, Any]:
    wide, shared = fields["intermediate_size"], fields["shared_intermediate_size"]
    sizes = {"expert_feed_forward_length": wide, "expert_shared_feed_forward_length": shared}
    return {
        "attention.head_count_kv": parts.kv_heads_by_layer(fields),
        "rope.scaling.finetuned": fields["position_embedding_type"] == "rope",
        **({"feed_forward_length": wide} | sizes if fields["num_local_experts"] else {"feed_forward_length": shared}),
        **_size_keys(fields),
    }


def _granite_layer(fields: Fields, number: int, _has: Has) -> Plan:
    hidden, count = fields["hidden_size"], fields["num_local_experts"]
    yield from parts.norms(parts.NORMS, hidden)
    if fields["layer_types"][number] == "full_attention":
        yield from parts.attention(fields, has_pairs=True)
    else:
        yield from _mamba2(fields, "mamba", has_bias=fields["mamba_conv_bias"])
    if count:
        yield from parts.granite_experts(fields)
    end = "_shexp" if count else ""
    yield from parts.gated("shared_mlp", hidden, fields["shared_intermediate_size"], GRANITE_GATED, end)


def with_and_without_positions(family: Family) -> Family:
    """Return a family whose files without positions are models of Granite 4 with attention in all layers."""

    def read_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
        has_positions = meta.get("rope.scaling.finetuned", bool, True)
        return (family.read_fields if has_positions else _granite_fields)(meta, common)

    def layer(fields: Fields, number: int, has: Has) -> Plan:
        return (_granite_layer if fields["model_type"] == "granitemoehybrid" else family.layer)(fields, number, has)

    return family._replace(read_fields=read_fields, layer=layer)


# ------------------------------------------------------------------------------------------- Falcon-H1


def _falcon_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    """Return the fields of Falcon-H1; the factors of its definition are in the stored matrices."""
    names = ("ssm_in", "ssm_out", "attention_in", "attention_out", "key", "embedding", "lm_head")
    return {
        "model_type": "falcon_h1",
        "architectures": ["FalconH1ForCausalLM"],
        **parts.attention_fields(meta, common),
        **_sizes(meta),
        "mamba_conv_bias": _has_conv_bias(meta),
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in meta.header.tensors,
        "mamba_norm_before_gate": False,
        "intermediate_size": meta.size("feed_forward_length"),
        **{f"{name}_multiplier": 1.0 for name in names},
        "ssm_multipliers": [1.0] * 5,
        "mlp_multipliers": [1.0] * 2,
    }


def _falcon_layer(fields: Fields, *_: Any) -> Plan:
    hidden = fields["hidden_size"]
    yield from parts.norms({"attn_norm": "input_layernorm"}, hidden)
    yield "ffn_norm", Weight("pre_ff_layernorm.weight", (hidden,))
    yield from parts.attention(fields)
    yield from _mamba2(fields, "mamba", has_bias=fields["mamba_conv_bias"], has_norm=fields["mamba_rms_norm"])
    yield from parts.gated("feed_forward", hidden, fields["intermediate_size"])


# --------------------------------------------------------------------------------------------- Mamba-2


def _mamba2_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    return {
        "model_type": "mamba2",
        "architectures": ["Mamba2ForCausalLM"],
        **_sizes(meta, _OF_MAMBA),
        "expand": parts.expansion(meta, common),
        "use_conv_bias": _has_conv_bias(meta),
        "layer_norm_epsilon": common["rms_norm_eps"],
    }


def _mamba2_layer(fields: Fields, *_: Any) -> Plan:
    yield from parts.norms({"attn_norm": "norm"}, fields["hidden_size"])
    yield from _mamba2(fields, "mixer", _OF_MAMBA, has_bias=fields["use_conv_bias"])


# -------------------------------------------------------------------------------------------- Nemotron-H


def _nemotron_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    """Return the fields of Nemotron-H, dense or with experts."""
    num_layers, tensors = common["num_hidden_layers"], meta.header.tensors
    widths = meta.sizes("feed_forward_length", num_layers)
    kinds = []
    for i, (kv_heads, width) in enumerate(zip(meta.sizes("attention.head_count_kv", num_layers), widths, strict=True)):
        feed_forward = "moe" if f"blk.{i}.ffn_gate_inp.weight" in tensors else "mlp"
        kinds.append(feed_forward if width else "full_attention" if kv_heads else "linear_attention")
    fields = {
        "model_type": "nemotron_h",
        "architectures": ["NemotronHForCausalLM"],
        **parts.attention_fields(meta, common, rotates=False),
        **_sizes(meta, _OF_NEMOTRON),
        "use_conv_bias": _has_conv_bias(meta),
        "layer_types": kinds,
        "layer_norm_epsilon": common["rms_norm_eps"],
    }
    if "mlp" in kinds:
        dense = {width for width, kind in zip(widths, kinds, strict=True) if kind == "mlp"}
        if len(dense) > 1:
            raise meta.error(f"{meta.arch}.feed_forward_length has {len(dense)} numbers for MLPs", TAKE_ANOTHER)
        fields["intermediate_size"] = dense.pop()
    if "moe" in kinds:
        fields |= {
            **meta.experts("n_routed_experts"),
            **{key.field: key.read(meta) for key in _NEMOTRON_EXPERTS},
            **parts.expert_groups(meta),
            "moe_latent_size": meta.size("moe_latent_size") if meta.get("moe_latent_size", int) else None,
        }
    return fields


_NEMOTRON_EXPERTS = (
    parts.EXPERT_WIDTH, parts.EXPERT_SCALE, Key("expert_weights_norm", "norm_topk_prob", False),
    Key("expert_shared_feed_forward_length", "moe_shared_expert_intermediate_size"),
)  # fmt: skip
_COUNTS = (
    "count",
    "used_count",
    "feed_forward_length",
    "shared_feed_forward_length",
    "group_count",
    "group_used_count",
)


def _nemotron_keys(fields: Fields) -> dict[str, Any]:
    widths = {"mlp": fields["intermediate_size"], "moe": fields["moe_intermediate_size"]}
    keys = {
        "attention.head_count_kv": parts.kv_heads_by_layer(fields),
        "feed_forward_length": [widths.get(kind, 0) for kind in fields["layer_types"]],
        **{key.stored: key.written(fields) for key in _NEMOTRON_EXPERTS},
        "expert_group_count": fields["n_group"],
        "expert_group_used_count": fields["topk_group"],
        "moe_latent_size": fields["moe_latent_size"],
        "attention.layer_norm_epsilon": fields["layer_norm_epsilon"],  # llama.cpp's name of it for this family
        **_size_keys(fields, _OF_NEMOTRON),
    }
    # llama.cpp takes all MLPs for experts where there is a number of them.
    has_experts = "moe" in fields["layer_types"]
    return keys if has_experts else keys | dict.fromkeys(f"expert_{name}" for name in _COUNTS)


def _nemotron_layer(fields: Fields, number: int, _has: Has) -> Plan:
    kind = fields["layer_types"][number]
    yield from parts.norms({"attn_norm": "norm"}, fields["hidden_size"])
    if kind == "full_attention":
        yield from parts.attention(fields, "mixer", has_pairs=True)
    elif kind == "mlp":
        yield from _ungated("mixer", fields["hidden_size"], fields["intermediate_size"])
    elif kind == "moe":
        yield from _ungated_experts(fields)
    else:
        yield from _mamba2(fields, "mixer", _OF_NEMOTRON, has_bias=fields["use_conv_bias"])


def _ungated(module: str, hidden: int, width: int, end: str = "") -> Plan:
    """Yield the matrices of an MLP without gates."""
    yield f"ffn_up{end}.weight", Weight(f"{module}.up_proj.weight", (width, hidden))
    yield f"ffn_down{end}.weight", Weight(f"{module}.down_proj.weight", (hidden, width))


def _ungated_experts(fields: Fields) -> Plan:
    hidden, count, latent = fields["hidden_size"], fields["n_routed_experts"], fields["moe_latent_size"]
    yield "exp_probs_b.bias", Weight("mixer.gate.e_score_correction_bias", (count,))
    if latent:
        yield "ffn_latent_down.weight", Weight("mixer.fc1_latent_proj.weight", (latent, hidden))
        yield "ffn_latent_up.weight", Weight("mixer.fc2_latent_proj.weight", (hidden, latent))
    for stored, one in parts.experts(fields, count, fields["moe_intermediate_size"], "mixer", hidden=latent):
        if stored != "ffn_gate_exps.weight":
            yield stored, one
    yield from _ungated("mixer.shared_experts", hidden, fields["moe_shared_expert_intermediate_size"], "_shexp")


_NEMOTRON = Family(
    _nemotron_fields, _nemotron_layer, written=("nemotron_h",), keys=_nemotron_keys,
    outside=lambda fields, _: parts.outside(fields, "model.embeddings", "model.norm_f"),
)  # fmt: skip
FAMILIES = {
    "granitehybrid": Family(
        _granite_fields, _granite_layer, parts.MULTIPLIERS, written=("granitemoehybrid",), keys=_granite_keys
    ),
    "falcon-h1": Family(
        _falcon_fields, _falcon_layer, (Key("ssm.inner_size", "mamba_d_ssm"),),
        lambda fields, _: parts.outside(fields, norm="model.final_layernorm"), written=("falcon_h1",), keys=_size_keys,
    ),
    "mamba2": Family(
        _mamba2_fields, _mamba2_layer,
        outside=lambda fields, _: parts.outside(fields, "backbone.embeddings", "backbone.norm_f"),
        layers="backbone.layers", written=("mamba2",), keys=partial(_size_keys, names=_OF_MAMBA),
    ),
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": _NEMOTRON._replace(written=("nemotron_h with experts",)),
}  # fmt: skip

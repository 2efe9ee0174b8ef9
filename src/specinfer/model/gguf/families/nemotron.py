"""Nemotron-H: attention, Mamba-2 layers, and MLPs or experts."""

from collections.abc import Collection
from typing import Any

from specinfer.model.gguf.families.mamba import Mamba2Names, has_conv_bias, mamba2, mamba2_size_keys, mamba2_sizes
from specinfer.model.gguf.families.plan_parts import (
    Family,
    Fields,
    Plan,
    attention,
    attention_fields,
    expert_groups,
    experts,
    in_layer,
    kv_heads_by_layer,
    norms,
    outside,
)
from specinfer.model.gguf.metadata import TAKE_ANOTHER, Metadata
from specinfer.model.gguf.weights import Weight

_NAMES = Mamba2Names("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")


def nemotron_fields(meta: Metadata, common: Fields) -> dict[str, Any]:
    """Return the fields of config.json of Nemotron-H, dense or with experts."""
    num_layers, tensors = common["num_hidden_layers"], meta.header.tensors
    widths = meta.sizes("feed_forward_length", num_layers)
    kinds = []
    for i, (kv_heads, width) in enumerate(zip(meta.sizes("attention.head_count_kv", num_layers), widths, strict=True)):
        has_experts = f"blk.{i}.ffn_gate_inp.weight" in tensors
        feed_forward = "moe" if has_experts else "mlp"
        kinds.append(feed_forward if width else "full_attention" if kv_heads else "linear_attention")
    fields = {
        "model_type": "nemotron_h",
        "architectures": ["NemotronHForCausalLM"],
        **attention_fields(meta, common, rotates=False),
        **mamba2_sizes(meta, _NAMES),
        "use_conv_bias": has_conv_bias(meta),
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
            "moe_intermediate_size": meta.size("expert_feed_forward_length"),
            "moe_shared_expert_intermediate_size": meta.size("expert_shared_feed_forward_length"),
            **expert_groups(meta),
            "norm_topk_prob": meta.get("expert_weights_norm", bool, False),
            "routed_scaling_factor": meta.positive("expert_weights_scale", 1.0),
            "moe_latent_size": meta.size("moe_latent_size") if meta.get("moe_latent_size", int) else None,
        }
    return fields


_COUNTS = (
    "count",
    "used_count",
    "feed_forward_length",
    "shared_feed_forward_length",
    "group_count",
    "group_used_count",
)
_OF_EXPERTS = tuple(f"expert_{name}" for name in _COUNTS)


def _nemotron_keys(fields: Fields) -> dict[str, Any]:
    widths = {"mlp": fields["intermediate_size"], "moe": fields["moe_intermediate_size"]}
    keys = {
        "attention.head_count_kv": kv_heads_by_layer(fields),
        "feed_forward_length": [widths.get(kind, 0) for kind in fields["layer_types"]],
        "expert_shared_feed_forward_length": fields["moe_shared_expert_intermediate_size"],
        "expert_group_count": fields["n_group"],
        "expert_group_used_count": fields["topk_group"],
        "expert_weights_norm": fields["norm_topk_prob"],
        "expert_weights_scale": float(fields["routed_scaling_factor"]),
        "moe_latent_size": fields["moe_latent_size"],
        "attention.layer_norm_epsilon": fields["layer_norm_epsilon"],  # llama.cpp's name of it for this family
        **mamba2_size_keys(fields, _NAMES),
    }
    # llama.cpp takes all MLPs for experts where there is a number of them.
    return keys if "moe" in fields["layer_types"] else keys | dict.fromkeys(_OF_EXPERTS)


def plan_nemotron(fields: Fields, _names: Collection[str]) -> Plan:
    """Yield the tensors of Nemotron-H."""
    hidden = fields["hidden_size"]
    yield from outside(fields, "model.embeddings", "model.norm_f")
    for i, kind in enumerate(fields["layer_types"]):
        yield from in_layer(i, norms({"attn_norm": "norm"}, hidden))
        if kind == "full_attention":
            yield from in_layer(i, attention(fields, "mixer", has_pairs=True))
        elif kind == "mlp":
            yield from in_layer(i, _plain("mixer", hidden, fields["intermediate_size"]))
        elif kind == "moe":
            yield from in_layer(i, _nemotron_experts(fields))
        else:
            yield from in_layer(i, mamba2(fields, "mixer", _NAMES, has_bias=fields["use_conv_bias"]))


def _plain(module: str, hidden: int, width: int, end: str = "") -> Plan:
    """Yield the matrices of an MLP without gates."""
    yield f"ffn_up{end}.weight", Weight(f"{module}.up_proj.weight", (width, hidden))
    yield f"ffn_down{end}.weight", Weight(f"{module}.down_proj.weight", (hidden, width))


def _nemotron_experts(fields: Fields) -> Plan:
    hidden, count = fields["hidden_size"], fields["n_routed_experts"]
    inside = fields["moe_latent_size"] or hidden
    yield "ffn_gate_inp.weight", Weight("mixer.gate.weight", (count, hidden))
    yield "exp_probs_b.bias", Weight("mixer.gate.e_score_correction_bias", (count,))
    if fields["moe_latent_size"]:
        yield "ffn_latent_down.weight", Weight("mixer.fc1_latent_proj.weight", (inside, hidden))
        yield "ffn_latent_up.weight", Weight("mixer.fc2_latent_proj.weight", (hidden, inside))
    for stored, one in experts("mixer.experts", inside, fields["moe_intermediate_size"], count):
        if "gate" not in stored:
            yield stored, one
    yield from _plain("mixer.shared_experts", hidden, fields["moe_shared_expert_intermediate_size"], "_shexp")


_NEMOTRON = Family(nemotron_fields, plan_nemotron, written=("nemotron_h",), keys=_nemotron_keys)
FAMILIES = {
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": _NEMOTRON._replace(written=("nemotron_h with experts",)),
}

"""The structure of each family's decoder layers, see `plan.py`."""

from dataclasses import replace
from typing import Any, Literal

from specinfer.model.layers.plan import LayerKind, PartKind

_ATTENTION_2 = "post_attention_layernorm"  # despite its name the norm before the MLP


def _under(module: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{module}.{name}" for name in names)


def _attention(module: str = "self_attn", norm: str | None = "input_layernorm", **changes: Any) -> PartKind:
    inputs = _under(module, "q_proj", "k_proj", "v_proj")
    return replace(PartKind("attention", inputs, f"{module}.o_proj", norm), **changes)


def _mlp(module: str = "mlp", norm: str | None = _ATTENTION_2, **changes: Any) -> PartKind:
    inputs = _under(module, "gate_proj", "up_proj")
    return replace(PartKind("mlp", inputs, f"{module}.down_proj", norm), **changes)


def _experts(module: str = "mlp", router: str = "gate", norm: str | None = _ATTENTION_2, **changes: Any) -> PartKind:
    return replace(PartKind("experts", _under(module, router), f"{module}.experts", norm), **changes)


def _ungated(up: str, down: str, norm: str | None = _ATTENTION_2) -> PartKind:
    return PartKind("ungated", (up,), down, norm)


def _recurrence(module: str, *inputs: str, norm: str = "input_layernorm", output: str = "out_proj") -> PartKind:
    return PartKind("recurrence", _under(module, *(inputs or ("in_proj",))), f"{module}.{output}", norm)


_CAP = "final_logit_softcapping"
LLAMA = LayerKind((_attention(), _mlp()))
_GEMMA3 = LayerKind(
    (
        _attention(post_norm="post_attention_layernorm"),
        _mlp(norm="pre_feedforward_layernorm", post_norm="post_feedforward_layernorm"),
    ),
    norm_offset=1.0,
    rotates_by_type=True,
    head_cap=_CAP,
)
_GEMMA4_MLP = replace(_GEMMA3.parts[1], without="experts")
_GEMMA4 = LayerKind(
    (
        _GEMMA3.parts[0],
        _GEMMA4_MLP,
        # An MLP and routed experts side by side.
        replace(_GEMMA4_MLP, without=None, beside="experts", sum="first", post_norm="post_feedforward_layernorm_1"),
        PartKind(
            "experts", ("router.proj",), "experts", "pre_feedforward_layernorm_2",
            post_norm="post_feedforward_layernorm_2", sum="last", sum_norm="post_feedforward_layernorm",
        ),
        PartKind(
            "inputs", ("per_layer_input_gate",), "per_layer_projection", None, post_norm="post_per_layer_input_norm"
        ),
    ),
    rotates_by_type=True,
    value_norm="v_norm",
    layer_factor="layer_scalar",
    head_cap=_CAP,
)  # fmt: skip
_QWEN_EXPERTS = _experts()
_QWEN_SHARED = _mlp("mlp.shared_expert", gate="mlp.shared_expert_gate", between="halves")
_QWEN3_5 = LayerKind(
    (
        _attention(),
        _recurrence("linear_attn", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
        _mlp(), _QWEN_EXPERTS, _QWEN_SHARED,
    ),
    norm_offset=1.0,
    is_gated=True,
)  # fmt: skip
_QWEN3_NEXT = replace(
    _QWEN3_5,
    parts=(_attention(), _recurrence("linear_attn", "in_proj_qkvz", "in_proj_ba"), *_QWEN3_5.parts[2:]),
)
_BAMBA = LayerKind(
    (_attention(), _recurrence("mamba"), _mlp("feed_forward", norm="pre_ff_layernorm")), last_norm="final_layernorm"
)
_LFM2 = LayerKind(
    (
        _attention(norm="operator_norm", output="self_attn.out_proj"),
        _recurrence("conv", norm="operator_norm"),
        PartKind("mlp", _under("feed_forward", "w1", "w3"), "feed_forward.w2", "ffn_norm"),
    ),
    head_norms=("q_layernorm", "k_layernorm"),
    last_norm="embedding_norm",
    eps="norm_eps",
)
_LFM2_MOE = replace(
    _LFM2,
    parts=(*_LFM2.parts, _experts("feed_forward", norm="ffn_norm")),
    rotary="pos_emb",
)
_GRANITE = LayerKind(
    (
        _attention(),
        _recurrence("mamba"),
        _experts("block_sparse_moe", "router"),
        PartKind("halves", ("shared_mlp.input_linear",), "shared_mlp.output_linear", _ATTENTION_2),
    ),
    embedding_factor="embedding_multiplier",
    head_divisor="logits_scaling",
)
_FALCON_H1 = LayerKind(
    (
        _recurrence("mamba"),
        _attention(),
        _mlp("feed_forward", norm="pre_ff_layernorm", between="halves"),
    ),
    last_norm="final_layernorm",
    embedding_factor="embedding_multiplier",
    head_factor="lm_head_multiplier",
)
_NEMOTRON_H = LayerKind(
    (
        _recurrence("mixer", norm="norm"),
        _attention("mixer", norm="norm"),
        _ungated("mixer.up_proj", "mixer.down_proj", "norm"),
        _experts("mixer", norm="norm"),
        _ungated("mixer.shared_experts.up_proj", "mixer.shared_experts.down_proj", "norm"),
    ),
    embedding="embeddings",
    last_norm="norm_f",
    eps="layer_norm_epsilon",
)
_MAMBA2 = LayerKind(
    (_recurrence("mixer", norm="norm"),), trunk="backbone", embedding="embeddings", last_norm="norm_f",
    eps="layer_norm_epsilon",
)  # fmt: skip
_FUSED_MLP = PartKind("halves", ("mlp.gate_up_proj",), "mlp.down_proj", _ATTENTION_2)
_ROUTED = (_QWEN_EXPERTS, _mlp("mlp.shared_experts", between="halves"))
_MOE = LayerKind((_attention(), _mlp(), *_ROUTED))
_QWEN2_MOE = LayerKind((_attention(), _mlp(), _QWEN_EXPERTS, _QWEN_SHARED))
_ROTATED_IN_PAIRS = replace(LLAMA, rotates_pairs=True)
_GRANITE_DENSE = replace(LLAMA, embedding_factor="embedding_multiplier", head_divisor="logits_scaling")
_ARCEE = LayerKind((_attention(), _ungated("mlp.up_proj", "mlp.down_proj")))
_PHI3 = LayerKind((_attention(inputs=("self_attn.qkv_proj",)), _FUSED_MLP))
_GLM = LayerKind((_attention(), _FUSED_MLP), rotates_pairs=True)
_GLM4 = replace(
    _GLM,
    parts=(
        _attention(post_norm="post_self_attn_layernorm"),
        replace(_FUSED_MLP, post_norm="post_mlp_layernorm"),
    ),
)
_AFTER = (  # norms come after, not before
    _attention(norm=None, post_norm=_ATTENTION_2),
    _mlp(norm=None, post_norm="post_feedforward_layernorm"),
)
_OLMO2 = LayerKind(_AFTER)
_OLMO3 = replace(_OLMO2, rotates_by_type=True)
_OLMO_HYBRID = LayerKind(
    (
        _AFTER[0],
        replace(_AFTER[1], beside="self_attn"),
        _recurrence("linear_attn", "q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj", output="o_proj"),
        _mlp(beside="linear_attn"),
    )
)
_EXAONE4 = replace(_OLMO2, rotates=lambda attention: attention.sliding_window is None or attention.is_sliding)
# Families whose layers have exactly this structure in all supported versions of transformers.
FAMILIES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "ministral", "seed_oss", "internlm3", "iquestcoder"), LLAMA),
    **dict.fromkeys(("qwen3_moe", "mixtral", "glm4_moe", "dots1", "solar_open", "hy_v3", "olmoe", "minimax_m2"), _MOE),
    "smollm3": replace(LLAMA, rotates=lambda attention: bool(attention.use_rope)), "arcee": _ARCEE, "phi3": _PHI3,
    "olmo2": _OLMO2, "olmo3": _OLMO3, "olmo_hybrid": _OLMO_HYBRID, "exaone4": _EXAONE4, "glm": _GLM, "glm4": _GLM4,
    "exaone_moe": replace(_MOE, rotates=_EXAONE4.rotates), "qwen2_moe": _QWEN2_MOE, "granite": _GRANITE_DENSE,
    "ernie4_5": _ROTATED_IN_PAIRS, "ernie4_5_moe": replace(_MOE, rotates_pairs=True), "helium": _ROTATED_IN_PAIRS,
    "granitemoe": _GRANITE, "granitemoeshared": _GRANITE,
    "gemma3_text": _GEMMA3, "gemma4_text": _GEMMA4,
    "qwen3_5_text": _QWEN3_5, "qwen3_5_moe_text": _QWEN3_5, "qwen3_next": _QWEN3_NEXT,
    "bamba": _BAMBA, "lfm2": _LFM2, "lfm2_moe": _LFM2_MOE, "granitemoehybrid": _GRANITE, "falcon_h1": _FALCON_H1,
    "nemotron_h": _NEMOTRON_H, "mamba2": _MAMBA2,
}  # fmt: skip


def _in_one(inputs: str, output: str, layout: Literal["groups"] | None = None) -> PartKind:
    """Return attention whose queries, keys and values are the outputs of one linear layer."""
    return PartKind("attention", (inputs,), output, None, layout=layout)


_GPT_MLP, _NEOX_MLP = _ungated("mlp.c_fc", "mlp.c_proj"), _ungated("mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
# Latent attention joins all heads. Like recurrences it is not split, so it is described as one.
_LATENT = LayerKind((_recurrence("self_attn"), *_MOE.parts[1:]))
# Families that run as transformers defines them. Ranks split their layers by these parts, and read no norms of them.
_UNFUSED = {
    "falcon": LayerKind((_in_one("self_attention.query_key_value", "self_attention.dense", "groups"), _NEOX_MLP)),
    "bloom": LayerKind((_in_one("self_attention.query_key_value", "self_attention.dense", "groups"), _NEOX_MLP)),
    "gpt_neox": LayerKind((_in_one("attention.query_key_value", "attention.dense", "groups"), _NEOX_MLP)),
    "gpt2": LayerKind((_in_one("attn.c_attn", "attn.c_proj"), _GPT_MLP)),
    "gpt_bigcode": LayerKind((_in_one("attn.c_attn", "attn.c_proj", "groups"), _GPT_MLP)),
    "mpt": LayerKind((_in_one("attn.Wqkv", "attn.out_proj"), _ungated("ffn.up_proj", "ffn.down_proj"))),
    "opt": LayerKind((_attention(output="self_attn.out_proj"), _ungated("fc1", "fc2"))),
    "gpt_oss": LayerKind((_attention(), _experts(router="router", layout="pairs"))),
    "phimoe": LayerKind((_attention(), _experts(router="router"))),
    "jamba": LayerKind((_attention(), _recurrence("mamba"), _mlp("feed_forward"), _experts("feed_forward", "router"))),
    "lfm3": replace(
        _LFM2,
        parts=(_attention(inputs=_under("self_attn", "q_proj", "k_proj", "v_proj", "g_proj")), *_LFM2.parts[1:]),
    ),
    "minimax": LayerKind((_recurrence("self_attn"), _attention(), _experts())),
    "recurrent_gemma": LayerKind((_recurrence("temporal_block"), _attention("temporal_block"), _mlp("mlp_block"))),
    **dict.fromkeys(("kimi_linear", "bailing_hybrid"), _LATENT),
    **dict.fromkeys(("mamba", "falcon_mamba"), LayerKind((_recurrence("mixer"),))),
}
# Families for images and more, of which texts take only the model within that is for text.
_OUTER = frozenset({"gemma3", "gemma4"})
# Rotations that depend only on the position.
_ROTATIONS = frozenset({"default", "linear", "llama3", "proportional", "yarn"})
_UNKNOWN = (_CAP, "clip_qkv")  # fields that have no value in a model that is known


def layer_kind(config: Any) -> LayerKind | None:
    """Return the kind of a model's layers, or None if the layers or the head have a feature that no kind has."""
    outer, config = config, config.get_text_config()
    if config is not outer and outer.model_type not in _OUTER:
        return None
    kind = FAMILIES.get(config.model_type)
    if kind is None or any(getattr(config, name, None) is not None for name in _UNKNOWN if name != kind.head_cap):
        return None
    rope = getattr(config, "rope_parameters", None) or {}
    # transformers 5.16 may write a type of all layers in addition to theirs, which is not read.
    own = [one for one in rope.values() if one and isinstance(one, dict)]
    rotations = own if kind.rotates_by_type else [rope]
    if not all(one.get("rope_type", "default") in _ROTATIONS for one in rotations):
        return None
    return kind if config is outer else replace(kind, trunk=f"{kind.trunk}.language_model")


def structure_of(config: Any) -> LayerKind | None:
    """Return the parts of a family's layers, whatever computes them, or None if they are not described here."""
    family = config.get_text_config().model_type
    return FAMILIES.get(family) or _UNFUSED.get(family)


def trunk_of(model: Any) -> Any:
    """Return the module of a definition that has its layers."""
    kind = layer_kind(model.config)
    assert kind is not None
    return model.get_submodule(kind.trunk)

"""The structure of each family's decoder layers, for the decoders that compute layers themselves.

A layer is a list of parts. Each is a norm, linear layers with the same input, what lies between, and a linear layer
whose results are added to the hidden states. A Llama layer consists of two: attention with rotated queries and keys,
and a gated MLP. `LayerKind` describes the differences of other kinds.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class PartKind:
    """A part of a decoder layer, by the module names of transformers.

    Attributes:
        between: What lies between the linear layers. "mlp": gates and values are two layers; "halves": their outputs
            follow one another; "squares": there are no gates; "experts": the routed ones.
        first: The linear layers with the same input, within a layer; of experts the router. A layer that does not have
            the first of them does not have the part.
        second: The linear layer of the results; of experts their module.
        norm: The norm of what it reads. A part with that of the part before it reads what this has read: it is None in
            what `LayerKind.parts_of` returns.
        post_norm: The norm of the results before they are added, or None.
        gate: The linear layer of one output whose sigmoid the results are multiplied by, or None.
    """

    between: Literal["attention", "recurrence", "mlp", "halves", "squares", "experts"]
    first: tuple[str, ...]
    second: str
    norm: str | None
    post_norm: str | None = None
    gate: str | None = None

    @property
    def module(self) -> str:
        """The module within a layer that has the linear layers."""
        return self.first[0].rpartition(".")[0]

    @property
    def linear_names(self) -> tuple[tuple[str, ...], ...]:
        """Names of the linear layers, those with the same input together; but for those of experts."""
        if self.between == "experts":
            return ()
        return (self.first, (self.second,), *(() if self.gate is None else ((self.gate,),)))


@dataclass(frozen=True)
class LayerKind:
    """The structure of the decoder layers of some families, by the module names of transformers.

    Attributes:
        parts: The parts that layers may have, in order.
        norm_offset: Number added to the weights of all norms, for checkpoints that store differences from it.
        rotates_by_type: Whether each layer type (sliding and full attention) has its own rotation.
        head_norms: Norms of queries and keys in attention, which may have none.
        is_gated: Whether the outputs of `q_proj` alternate, head by head, with gates of the results.
        trunk, embedding, rotary, last_norm: The module with the layers, and within it the embedding, the rotary
            embedding and the norm before the head.
        eps: The field of the configuration with the epsilon of norms.
        embedding_factor, head_factor, head_divisor: Fields with what embeddings and logits are multiplied by or divided
            by, or None.
    """

    parts: tuple[PartKind, ...]
    norm_offset: float = 0.0
    rotates_by_type: bool = False
    head_norms: tuple[str, str] = ("q_norm", "k_norm")
    is_gated: bool = False
    trunk: str = "model"
    embedding: str = "embed_tokens"
    rotary: str = "rotary_emb"
    last_norm: str = "norm"
    eps: str = "rms_norm_eps"
    embedding_factor: str | None = None
    head_factor: str | None = None
    head_divisor: str | None = None

    def parts_of(self, layer: Any) -> list[PartKind]:
        """Return the parts that a decoder layer has."""
        found = [part for part in self.parts if find(layer, part.first[0]) is not None]
        again = [i for i in range(1, len(found)) if found[i].norm == found[i - 1].norm]
        return [replace(part, norm=None) if i in again else part for i, part in enumerate(found)]

    def linear_names(self, layer: Any) -> tuple[tuple[str, ...], ...]:
        """Return the names of the linear layers of a decoder layer, those with the same input together."""
        return tuple(names for part in self.parts_of(layer) for names in part.linear_names)

    def head_scale(self, config: Any) -> float:
        """Return what logits are multiplied by."""
        factor = 1.0 if self.head_factor is None else getattr(config, self.head_factor)
        return float(factor / (1.0 if self.head_divisor is None else getattr(config, self.head_divisor)))


def find(module: Any, name: str) -> Any:
    """Return a submodule by its name, or None if there is none."""
    for one in name.split("."):
        module = getattr(module, one, None)
    return module


def _under(module: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{module}.{name}" for name in names)


def _attention(module: str = "self_attn", norm: str = "input_layernorm", **changes: Any) -> PartKind:
    first = _under(module, "q_proj", "k_proj", "v_proj")
    return replace(PartKind("attention", first, f"{module}.o_proj", norm), **changes)


def _mlp(module: str = "mlp", norm: str = "post_attention_layernorm", **changes: Any) -> PartKind:
    first = _under(module, "gate_proj", "up_proj")
    return replace(PartKind("mlp", first, f"{module}.down_proj", norm), **changes)


def _recurrence(module: str, *first: str, norm: str = "input_layernorm") -> PartKind:
    return PartKind("recurrence", _under(module, *(first or ("in_proj",))), f"{module}.out_proj", norm)


LLAMA = LayerKind((_attention(), _mlp()))
_GEMMA3 = LayerKind(
    (
        _attention(post_norm="post_attention_layernorm"),
        _mlp(norm="pre_feedforward_layernorm", post_norm="post_feedforward_layernorm"),
    ),
    norm_offset=1.0,
    rotates_by_type=True,
)
_ATTENTION_2 = "post_attention_layernorm"  # despite its name the norm before the MLP
_QWEN_EXPERTS = PartKind("experts", ("mlp.gate",), "mlp.experts", _ATTENTION_2)
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
        _attention(norm="operator_norm", second="self_attn.out_proj"),
        _recurrence("conv", norm="operator_norm"),
        PartKind("mlp", _under("feed_forward", "w1", "w3"), "feed_forward.w2", "ffn_norm"),
    ),
    head_norms=("q_layernorm", "k_layernorm"),
    last_norm="embedding_norm",
    eps="norm_eps",
)
_LFM2_MOE = replace(
    _LFM2,
    parts=(*_LFM2.parts, PartKind("experts", ("feed_forward.gate",), "feed_forward.experts", "ffn_norm")),
    rotary="pos_emb",
)
_GRANITE = LayerKind(
    (
        _attention(),
        _recurrence("mamba"),
        PartKind("experts", ("block_sparse_moe.router",), "block_sparse_moe.experts", _ATTENTION_2),
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
        PartKind("squares", ("mixer.up_proj",), "mixer.down_proj", "norm"),
        PartKind("experts", ("mixer.gate",), "mixer.experts", "norm"),
        PartKind("squares", ("mixer.shared_experts.up_proj",), "mixer.shared_experts.down_proj", "norm"),
    ),
    embedding="embeddings",
    last_norm="norm_f",
    eps="layer_norm_epsilon",
)
_MAMBA2 = LayerKind(
    (_recurrence("mixer", norm="norm"),), trunk="backbone", embedding="embeddings", last_norm="norm_f",
    eps="layer_norm_epsilon",
)  # fmt: skip
# Families whose layers have exactly this structure in all supported versions of transformers.
FAMILIES = {
    "llama": LLAMA, "mistral": LLAMA, "qwen2": LLAMA, "qwen3": LLAMA, "gemma3_text": _GEMMA3, "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5, "qwen3_next": _QWEN3_NEXT, "bamba": _BAMBA, "lfm2": _LFM2, "lfm2_moe": _LFM2_MOE,
    "granitemoehybrid": _GRANITE, "falcon_h1": _FALCON_H1, "nemotron_h": _NEMOTRON_H, "mamba2": _MAMBA2,
}  # fmt: skip
# Rotations that depend only on the position.
_ROTATIONS = frozenset({"default", "linear", "llama3", "yarn"})


def kind_of(config: Any) -> LayerKind | None:
    """Return the kind of a model's layers, or None if the layers or the head have a feature that no kind has."""
    kind = FAMILIES.get(config.model_type)
    if kind is None or getattr(config, "final_logit_softcapping", None) is not None:
        return None
    rope = getattr(config, "rope_parameters", None) or {}
    rotations = rope.values() if kind.rotates_by_type else [rope]
    return kind if all(one.get("rope_type", "default") in _ROTATIONS for one in rotations) else None


def activation_of(config: Any) -> str:
    """Return the name of the activation of an MLP's gates."""
    names = ("hidden_activation", "mlp_hidden_act", "hidden_act")
    return str(next((found for name in names if (found := getattr(config, name, None))), "silu"))  # LFM2 has no other


def eps_of(config: Any) -> float:
    """Return the epsilon of a model's norms."""
    return float(getattr(config, FAMILIES[config.model_type].eps))


def trunk_of(model: Any) -> Any:
    """Return the module of a definition that has its layers."""
    return getattr(model, FAMILIES[model.config.model_type].trunk)


def linears_of(layer: Any, kind: LayerKind) -> tuple[tuple[Any, ...], ...]:
    """Return the linear layers of a decoder layer, those with the same input together."""
    return tuple(tuple(layer.get_submodule(name) for name in names) for names in kind.linear_names(layer))


def window_of(attention: Any) -> int | None:
    """Return how many positions back a layer sees, or None for all; families set it per layer or in the config."""
    window: int | None = getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))
    return window

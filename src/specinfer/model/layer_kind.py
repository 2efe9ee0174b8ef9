"""The structure of each family's decoder layers, for the decoders that compute layers themselves.

A Llama layer consists of a norm, attention with rotated queries and keys, a norm and a gated MLP. The results of
attention and MLP are added to the hidden states. `LayerKind` describes the differences of other kinds.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class LayerKind:
    """The structure of the decoder layers of some families, by the module names of transformers.

    Attributes:
        norms: Norms before attention and before the MLP.
        post_norms: Norms of the results of attention and MLP before they are added, or None if there are none.
        norm_offset: Number added to the weights of all norms, for checkpoints that store differences from it.
        rotates_by_type: Whether each layer type (sliding and full attention) has its own rotation.
        attention: The linear layers of attention, those with the same input together, within a layer.
        mlp: The same of the MLP.
        head_norms: Norms of queries and keys in attention, which may have none.
        is_gated: Whether the outputs of `q_proj` alternate, head by head, with gates of the results.
        recurrent: The module of layers without attention, or None if all have attention.
        recurrent_linears: Its linear layers, those with the same input together.
        last_norm: The norm before the head.
    """

    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    post_norms: tuple[str, str] | None = None
    norm_offset: float = 0.0
    rotates_by_type: bool = False
    attention: tuple[tuple[str, ...], ...] = (
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.o_proj",),
    )  # fmt: skip
    mlp: tuple[tuple[str, ...], ...] = (("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",))
    head_norms: tuple[str, str] = ("q_norm", "k_norm")
    is_gated: bool = False
    recurrent: str | None = None
    recurrent_linears: tuple[tuple[str, ...], ...] = ()
    last_norm: str = "norm"

    def linear_names(self, layer: Any) -> tuple[tuple[str, ...], ...]:
        """Return the names of the linear layers of a decoder layer, those with the same input together."""
        if not hasattr(layer, "self_attn"):
            mixing = tuple(tuple(f"{self.recurrent}.{name}" for name in names) for names in self.recurrent_linears)
            return mixing + self.mlp
        return self.attention + self.mlp


LLAMA = LayerKind()
_GEMMA3 = LayerKind(
    norms=("input_layernorm", "pre_feedforward_layernorm"),
    post_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    norm_offset=1.0,
    rotates_by_type=True,
)
_QWEN3_5 = LayerKind(
    norm_offset=1.0,
    is_gated=True,
    recurrent="linear_attn",
    recurrent_linears=(("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), ("out_proj",)),
)
_BAMBA = LayerKind(
    norms=("input_layernorm", "pre_ff_layernorm"),
    mlp=(("feed_forward.gate_proj", "feed_forward.up_proj"), ("feed_forward.down_proj",)),
    recurrent="mamba",
    recurrent_linears=(("in_proj",), ("out_proj",)),
    last_norm="final_layernorm",
)
_LFM2 = LayerKind(
    norms=("operator_norm", "ffn_norm"),
    attention=(LLAMA.attention[0], ("self_attn.out_proj",)),
    mlp=(("feed_forward.w1", "feed_forward.w3"), ("feed_forward.w2",)),
    head_norms=("q_layernorm", "k_layernorm"),
    recurrent="conv",
    recurrent_linears=(("in_proj",), ("out_proj",)),
    last_norm="embedding_norm",
)
# Families whose layers have exactly this structure in all supported versions of transformers.
FAMILIES = {
    "llama": LLAMA, "mistral": LLAMA, "qwen2": LLAMA, "qwen3": LLAMA, "gemma3_text": _GEMMA3, "qwen3_5_text": _QWEN3_5,
    "bamba": _BAMBA, "lfm2": _LFM2,
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
    return str(getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", "silu"))  # LFM2 has no other


def eps_of(config: Any) -> float:
    """Return the epsilon of a model's norms."""
    return float(config.norm_eps if config.model_type == "lfm2" else config.rms_norm_eps)


def linears_of(layer: Any, kind: LayerKind) -> tuple[tuple[Any, ...], ...]:
    """Return the linear layers of a decoder layer, those with the same input together."""
    return tuple(tuple(layer.get_submodule(name) for name in names) for names in kind.linear_names(layer))


def window_of(attention: Any) -> int | None:
    """Return how many positions back a layer sees, or None for all; families set it per layer or in the config."""
    window: int | None = getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))
    return window

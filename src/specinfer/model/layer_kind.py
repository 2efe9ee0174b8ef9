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
    """

    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    post_norms: tuple[str, str] | None = None
    norm_offset: float = 0.0
    rotates_by_type: bool = False


LLAMA = LayerKind()
_GEMMA3 = LayerKind(
    norms=("input_layernorm", "pre_feedforward_layernorm"),
    post_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    norm_offset=1.0,
    rotates_by_type=True,
)
# The linear layers of a decoder layer, those with the same input together.
LINEARS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",),
)  # fmt: skip
# Families whose layers have exactly this structure in all supported versions of transformers.
FAMILIES = {"llama": LLAMA, "mistral": LLAMA, "qwen2": LLAMA, "qwen3": LLAMA, "gemma3_text": _GEMMA3}
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
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)


def linears_of(layer: Any) -> tuple[tuple[Any, ...], ...]:
    """Return the linear layers of a decoder layer, those with the same input together."""
    return tuple(tuple(layer.get_submodule(name) for name in names) for names in LINEARS)


def window_of(attention: Any) -> int | None:
    """Return how many positions back a layer sees, or None for all; families set it per layer or in the config."""
    window: int | None = getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))
    return window

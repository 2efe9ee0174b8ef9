"""What a family's decoder layer consists of, for the decoders that compute layers by themselves.

Llama's: norm, attention with rotated queries and keys, norm, a gated MLP; what attention and the MLP return is added to
the hidden states. Other kinds say where they differ.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Decoder layers of some families, by the names of transformers' modules.

    Attributes:
        norms: Those before attention and before the MLP.
        post_norms: Those of what attention and the MLP return, before it is added; None: it is added as it is.
        norm_offset: Added to the weights of all norms, where checkpoints hold differences from it.
        rotates_by_type: Whether layer types (sliding and full attention) have rotations of their own.
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
# Families whose layers are just that in all versions of transformers this runs with.
FAMILIES = {"llama": LLAMA, "mistral": LLAMA, "qwen2": LLAMA, "qwen3": LLAMA, "gemma3_text": _GEMMA3}
# Rotations that depend on nothing but the position.
_ROTATIONS = frozenset({"default", "linear", "llama3", "yarn"})


def kind_of(config: Any) -> LayerKind | None:
    """The kind of a model's layers; None if they, or its head, have something that no kind has."""
    kind = FAMILIES.get(config.model_type)
    if kind is None or getattr(config, "final_logit_softcapping", None) is not None:
        return None
    rope = getattr(config, "rope_parameters", None) or {}
    rotations = rope.values() if kind.rotates_by_type else [rope]
    return kind if all(one.get("rope_type", "default") in _ROTATIONS for one in rotations) else None


def activation_of(config: Any) -> str:
    """The name of the activation of an MLP's gates."""
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)


def window_of(attention: Any) -> int | None:
    """How many positions back a layer sees; None: all. Some families say it of a layer, others of all."""
    window: int | None = getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))
    return window

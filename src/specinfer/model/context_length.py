"""The longest text of a model, and rotations of its positions that hold for every text up to it.

Scaled rotations reach beyond `max_position_embeddings`. Two kinds of them depend on the text's length (dynamic and
longrope), but a pass holds texts of different lengths, and keys in the cache cannot be rotated again. So the longest
text of the engine decides for all, as in vLLM and llama.cpp.
"""

import logging
import math
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)
_NO_POSITIONS = 2**20  # tokens of a request at most, where recurrent layers alone do not limit them
_MOST = 2**24  # positions that a factor can lead to; tables have one row for each


def max_position_of(config: Any) -> int:
    """Return the number of positions of a model."""
    config = config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length"):
        if isinstance(value := getattr(config, name, None), int):
            return value
    if set(getattr(config, "layer_types", None) or ()) == {"linear_attention"}:
        return _NO_POSITIONS
    return 2048


def fit_to_length(config: Any, max_model_len: int | None) -> None:
    """Set the number of positions in a model's configuration, and rotations that hold for all of them.

    Args:
        max_model_len: Length of the longest text, or None for the model's own.
    """
    text = config.get_text_config()
    rope, trained = getattr(text, "rope_parameters", None), getattr(text, "max_position_embeddings", None)
    # Rotations by kind of layer, as Gemma 3 has them, already reach as far as the configuration says.
    if not isinstance(rope, Mapping) or not isinstance(trained, int):
        return
    kind, factor = rope.get("rope_type"), _factor(rope)
    if kind == "linear":
        text.max_position_embeddings = _scaled(trained, trained, factor)
    elif kind == "yarn" and isinstance(original := rope.get("original_max_position_embeddings"), int):
        text.max_position_embeddings = _scaled(trained, original, factor)
    elif kind == "dynamic" and max_model_len is not None and max_model_len > trained:
        _stretch(text, dict(rope), min(max_model_len, _scaled(trained, trained, factor)), factor)
    elif kind == "longrope":
        _choose_factors(text, dict(rope), max_model_len)


def _factor(rope: Mapping[str, Any]) -> float:
    value = rope.get("factor")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 1.0
    return float(value) if math.isfinite(value) and value > 1 else 1.0


def _scaled(trained: int, original: int, factor: float) -> int:
    return max(trained, int(min(original * factor, _MOST)))


def _stretch(text: Any, rope: dict[str, Any], length: int, factor: float) -> None:
    """Replace dynamic rotations by those that they have for texts of this length."""
    trained, head_dim = text.max_position_embeddings, getattr(text, "head_dim", None)
    head_dim = head_dim or text.hidden_size // text.num_attention_heads
    rotated = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    if length == trained or rotated <= 2:
        return
    stretch = factor * length / trained - (factor - 1)
    theta = rope["rope_theta"] * stretch ** (rotated / (rotated - 2))
    logger.info("positions are stretched for texts of %d tokens, also in shorter ones", length)
    text.rope_parameters = rope | {"rope_type": "default", "rope_theta": theta}
    text.max_position_embeddings = length


def _choose_factors(text: Any, rope: dict[str, Any], max_model_len: int | None) -> None:
    """Let longrope have its factors for short texts, or those for long ones, for texts of all lengths."""
    trained, original = text.max_position_embeddings, rope.get("original_max_position_embeddings")
    if not isinstance(original, int) or original >= trained:
        return
    if max_model_len is not None and max_model_len <= original:
        # What the attention is scaled by depends on the whole length.
        rope["factor"] = rope.get("factor") or trained / original
        text.max_position_embeddings = original
    else:
        logger.info(
            "positions have the factors for texts of more than %d tokens, also in shorter ones; max_model_len %d or "
            "less has those for short ones",
            original, original,
        )  # fmt: skip
        rope["short_factor"] = rope.get("long_factor")
    text.rope_parameters = rope

"""New drafters whose layers are recurrences (gated delta rule), but for the last, which has attention.

Only the last layer reads the whole context, so a level costs about the same at any context.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specinfer.model.definition import known_positions, load_config

# The family whose training pass in transformers is matrix products over chunks and needs no kernels of its own.
_FAMILY = "qwen3_5_text"
_MLP_RATIO = 3
_POSITIONS = 2**20  # of a target whose config does not limit them
NUM_LAYERS, HEAD_DIM = 4, 64


def check_sizes(name: str, num_layers: int, width: int) -> None:
    """Check the sizes that a `--drafter` option asks for.

    Raises:
        ValueError: There is no layer for a recurrence, or heads do not divide the hidden size.
    """
    if num_layers < 2:
        raise ValueError(f"drafter: {name}: the last layer has attention and the others none; take at least 2 layers")
    if width % HEAD_DIM:
        nearest = max(round(width / HEAD_DIM), 1) * HEAD_DIM
        raise ValueError(
            f"drafter: {name}: the hidden size {width} is not a multiple of the {HEAD_DIM} of a head; take {nearest}"
        )


def new_hybrid(target: Path, num_layers: int, width: int | None) -> Any:
    """Return a model with the target's vocabulary and random layers, in float32.

    Args:
        width: The hidden size, or None for about a quarter of the target's.
    """
    of_target = load_config(target).get_text_config()
    width = width or max(of_target.hidden_size // 4 // HEAD_DIM, 1) * HEAD_DIM
    heads = width // HEAD_DIM
    config = AutoConfig.for_model(
        _FAMILY,
        vocab_size=of_target.vocab_size,
        hidden_size=width,
        intermediate_size=_MLP_RATIO * width,
        num_hidden_layers=num_layers,
        layer_types=[*["linear_attention"] * (num_layers - 1), "full_attention"],
        num_attention_heads=heads,
        num_key_value_heads=1,
        head_dim=HEAD_DIM,
        linear_num_key_heads=heads,
        linear_num_value_heads=heads,
        linear_key_head_dim=HEAD_DIM,
        linear_value_head_dim=HEAD_DIM,
        max_position_embeddings=known_positions(target) or _POSITIONS,
        tie_word_embeddings=bool(getattr(of_target, "tie_word_embeddings", True)),
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def take_embeddings(model: Any, target: Any) -> None:
    """Copy the target's embeddings and output head into a model of the same hidden size."""
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(target.get_input_embeddings().weight)
        if not model.config.tie_word_embeddings:
            model.get_output_embeddings().weight.copy_(target.get_output_embeddings().weight)

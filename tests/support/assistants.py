"""Tiny Gemma 4 assistants with the public tensor names."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heads import random_tensors, save_head

SLIDING, FULL = "sliding_attention", "full_attention"
WINDOW, OWN, VOCAB = 8, 16, 96
_HEAD_SIZES = {SLIDING: 8, FULL: 16}
_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
KINDS = (SLIDING, SLIDING, FULL)  # of an assistant's layers


def save_assistant(
    folder: Path,
    *,
    clusters: int = 0,
    drop: Sequence[str] = (),
    target_width: int = 32,
    text: dict[str, Any] | None = None,
    tensors: dict[str, Tensor] | None = None,
    **fields: Any,
) -> Path:
    """Write an assistant of three layers.

    Args:
        clusters: Number of clusters of the output head, or 0 for a plain one.
        drop: Tensors to leave out.
        text: Changes of its text_config.
        tensors: Changes of its tensors.
    """
    shapes: dict[str, tuple[int, ...]] = {
        "pre_projection.weight": (OWN, 2 * target_width), "post_projection.weight": (target_width, OWN),
        "model.embed_tokens.weight": (VOCAB, OWN), "model.norm.weight": (OWN,),
    }  # fmt: skip
    for i, kind in enumerate(KINDS):
        size, at = _HEAD_SIZES[kind], f"model.layers.{i}."
        shapes |= {f"{at}self_attn.{name}.weight": shape for name, shape in (
            ("q_proj", (4 * size, OWN)), ("o_proj", (OWN, 4 * size)), ("q_norm", (size,)),
        )}  # fmt: skip
        shapes |= {f"{at}mlp.{name}_proj.weight": (24, OWN) for name in ("gate", "up")}
        shapes |= {f"{at}mlp.down_proj.weight": (OWN, 24), f"{at}layer_scalar": (1,)}
        shapes |= {f"{at}{name}.weight": (OWN,) for name in _NORMS}
    if clusters:
        shapes["masked_embedding.centroids.weight"] = (clusters, OWN)
    found = random_tensors(shapes)
    if clusters:
        found["masked_embedding.token_ordering"] = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(2))
    found |= tensors or {}
    own = {
        "model_type": "gemma4_text", "vocab_size": VOCAB, "hidden_size": OWN, "intermediate_size": 24,
        "num_hidden_layers": len(KINDS), "num_kv_shared_layers": len(KINDS), "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16, "sliding_window": WINDOW,
        "layer_types": list(KINDS), "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    config = {
        "architectures": ["Gemma4AssistantForCausalLM"], "model_type": "gemma4_assistant",
        "text_config": own | (text or {}), "backbone_hidden_size": target_width,
        "use_ordered_embeddings": bool(clusters), "num_centroids": clusters or 2048,
        "centroid_intermediate_top_k": 3 if clusters else 32,
    }  # fmt: skip
    return save_head(folder, found, config | fields, drop=drop)

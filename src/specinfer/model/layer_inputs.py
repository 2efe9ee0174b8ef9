"""The inputs that the layers of some models (Gemma 4) read in addition to hidden states."""

from dataclasses import replace
from typing import Any

from specinfer.model.packing import Packing, call_of
from specinfer.model.sharding.placeholder import EmbeddingPlaceholder
from specinfer.ops import LayerInputsCall, QuantizedEmbedding, packs_type


def can_take_inputs(trunk: Any, config: Any) -> bool:
    """Return whether a model's layers have no inputs but hidden states, or ones that native code computes."""
    if not _size(config):
        return True
    table = trunk.embed_tokens_per_layer
    if isinstance(table, EmbeddingPlaceholder):
        return False
    return table.call is not None if isinstance(table, QuantizedEmbedding) else packs_type(table.weight.dtype)


def inputs_of(trunk: Any, config: Any, eps: float, packing: Packing) -> LayerInputsCall | None:
    """Return the call that computes the inputs of all layers, or None if they read hidden states alone.

    What is outside of layers is not rounded.
    """
    if not _size(config):
        return None
    table, mean = trunk.embed_tokens_per_layer, float(trunk.per_layer_input_scale)  # of the rows and the projection
    is_quantized = isinstance(table, QuantizedEmbedding)
    dtype = table.dtype if is_quantized else table.weight.dtype
    scale = float(table.embed_scale.to(dtype)) * mean  # rounded as transformers does
    return LayerInputsCall(
        table.call if is_quantized else table.weight.detach(),
        scale,
        call_of([trunk.per_layer_model_projection], replace(packing, bits=None)),
        trunk.per_layer_projection_norm.weight.detach().float() * mean,
        # The definition multiplies what it norms by this number first.
        eps / float(trunk.per_layer_model_projection_scale) ** 2,
    )


def _size(config: Any) -> int:
    """Return the number of inputs of each layer."""
    return getattr(config, "hidden_size_per_layer_input", None) or 0

"""Decoder layers of heads as transformers defines them, which are called as native layers and those of GPUs are."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from specinfer.model.attention import store_new
from specinfer.model.batch import ForwardBatch
from specinfer.model.families import rotate
from specinfer.model.kv_tensors import LayerShape


class DefinitionLayers:
    """Decoder layers, one after the other.

    Attributes:
        layer_type: The type whose rotation they have, in families with several.
    """

    def __init__(self, layers: nn.ModuleList, rotary: nn.Module, shapes: Sequence[LayerShape]) -> None:
        self._layers, self._rotary, self._shapes = layers, rotary, shapes
        self.layer_type: str | None = None

    def __call__(self, batch: ForwardBatch, hidden: Tensor, windowed: ForwardBatch | None = None) -> Tensor:
        """Return the [tokens, width] output for `hidden` of the same shape.

        Args:
            windowed: The batch as layers with a window see it, or None for the same.
        """
        rotation, hidden = self._rotation(batch, hidden), hidden.unsqueeze(0)
        for layer in self._layers:
            has_window = getattr(layer.self_attn, "sliding_window", None) is not None
            output: Any = layer(
                hidden,
                attention_mask=None,
                position_ids=batch.positions.unsqueeze(0),
                position_embeddings=rotation,
                forward_batch=batch if windowed is None or not has_window else windowed,
            )
            hidden = output[0] if isinstance(output, tuple) else output
        return hidden[0]

    def read(self, batch: ForwardBatch, inputs: Tensor) -> None:
        """Store the keys and values that each layer makes of `inputs` [tokens, width], and compute nothing else."""
        rotation = self._rotation(batch, inputs)
        for i, (layer, shape) in enumerate(zip(self._layers, self._shapes, strict=True)):
            attention: Any = layer.self_attn
            key = attention.k_proj(inputs).view(-1, shape.num_kv_heads, shape.key_dim)
            if (key_norm := getattr(attention, "k_norm", None)) is not None:
                key = key_norm(key)
            key = rotate(key.transpose(0, 1).unsqueeze(0), *rotation)[0].transpose(0, 1)
            value = attention.v_proj(inputs).view(-1, shape.num_kv_heads, shape.value_dim)
            store_new(batch, i, key, value)

    def _rotation(self, batch: ForwardBatch, hidden: Tensor) -> Any:
        kind = [] if self.layer_type is None else [self.layer_type]
        return self._rotary(hidden.unsqueeze(0), batch.positions.unsqueeze(0), *kind)

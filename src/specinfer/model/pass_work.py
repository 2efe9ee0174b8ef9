"""Necessary work of a pass: the bytes that it reads and the operations that it computes."""

from dataclasses import dataclass, replace
from typing import Any

from specinfer.model.definition import load_config
from specinfer.model.heads.head import FeatureHead
from specinfer.model.kv_tensors import bytes_per_slot
from specinfer.model.load import LoadedModel
from specinfer.model.recurrent.layers import is_recurrent
from specinfer.ops import PackedLinear, QuantizedEmbedding

_WINDOWED = ("sliding_attention", "chunked_attention")  # kinds of layers that attend to the last tokens only


@dataclass(frozen=True, slots=True)
class PassWork:
    """Necessary work of the passes of one model.

    Attributes:
        weight_bytes: Bytes of weights that every pass reads.
        token_bytes: Bytes of the keys and values of one token in all layers that attend to tokens at any distance.
        row_flops: Operations of one row's products with the weights.
        pair_flops: Operations of attention for one row and one token that it attends to.
    """

    weight_bytes: int
    token_bytes: int
    row_flops: float
    pair_flops: float

    @classmethod
    def from_loaded(cls, loaded: LoadedModel) -> "PassWork | None":
        """Return the work of a model, or None if a pass streams weights or its weight reads depend on the rows.

        That of a head is not known either: a part of it belongs to the target.
        """
        if isinstance(loaded.model, FeatureHead):
            return None
        config = load_config(loaded.folder).get_text_config()
        if loaded.stream is not None or not loaded.shard.is_whole or _has_experts(config):
            return None
        is_tied = getattr(config, "tie_word_embeddings", True)
        embedding = 0 if is_tied else config.vocab_size * config.hidden_size  # a lookup, not a product
        kinds = getattr(config, "layer_types", None) or ()
        elsewhere: set[Any] = {place for place, kind in enumerate(kinds) if kind in _WINDOWED}
        # Recurrent layers read states instead.
        elsewhere.update(module.layer_idx for module in loaded.model.modules() if is_recurrent(module))
        attending = [
            replace(shape, shares=None) for place, shape in enumerate(loaded.layer_shapes) if place not in elsewhere
        ]
        widths = sum(shape.key_dim + shape.value_dim for shape in attending)
        return cls(
            weight_bytes=_read_bytes(loaded, config),
            token_bytes=bytes_per_slot(attending, loaded.dtype, kv_dtype=loaded.kv_dtype),
            row_flops=2.0 * (loaded.num_parameters - embedding),
            pair_flops=2.0 * config.num_attention_heads * widths if attending else 0.0,
        )

    def of_step(self, num_rows: float, num_context: float, num_requests: int) -> tuple[float, float]:
        """Return the bytes and the operations of one pass.

        Args:
            num_rows: Rows of all requests.
            num_context: Tokens before these rows, summed over all requests and assumed equal among them.
        """
        seen = num_context / max(1, num_requests)
        num_bytes = self.weight_bytes + (num_context + num_rows) * self.token_bytes
        return num_bytes, num_rows * (self.row_flops + seen * self.pair_flops)


def _has_experts(config: Any) -> bool:
    return any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def read_bytes(loaded: LoadedModel) -> int:
    """Return the bytes of weights that a pass over few rows reads: all but an input embedding that is not the head.

    For a mixture of experts this is more than a pass reads.
    """
    return _read_bytes(loaded, load_config(loaded.folder).get_text_config())


def _read_bytes(loaded: LoadedModel, config: Any) -> int:
    # If a tied head is quantized or packed, it is a copy of the embedding.
    modules = list(loaded.model.modules())
    is_copied = loaded.quantization is not None or any(isinstance(m, PackedLinear) for m in modules)
    if not is_copied and getattr(config, "tie_word_embeddings", True):
        return loaded.num_bytes
    embeddings = [module.num_bytes for module in modules if isinstance(module, QuantizedEmbedding)]
    return loaded.num_bytes - sum(embeddings or [int(config.vocab_size * config.hidden_size) * loaded.dtype.itemsize])

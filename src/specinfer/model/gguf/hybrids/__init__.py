"""Architectures of GGUF files with recurrent layers: their configurations, and the weights that files must have."""

from functools import partial

from specinfer.model.gguf.hybrids import delta
from specinfer.model.gguf.hybrids.common import Hybrid

HYBRIDS: dict[str, Hybrid] = {
    "qwen3next": Hybrid(delta.moe_fields, partial(delta.plan, layer=delta.qwen3_next_layer)),
    "qwen35": Hybrid(delta.dense_fields, partial(delta.plan, layer=delta.qwen3_5_layer)),
    "qwen35moe": Hybrid(delta.moe_fields, partial(delta.plan, layer=delta.qwen3_5_layer)),
}

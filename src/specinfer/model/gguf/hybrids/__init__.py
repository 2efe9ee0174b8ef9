"""Architectures of GGUF files with recurrent layers: their configurations, and the weights that files must have."""

from functools import partial

from specinfer.model.gguf.hybrids import channels, delta, kimi, mamba, short_conv
from specinfer.model.gguf.hybrids.common import Hybrid

HYBRIDS: dict[str, Hybrid] = {
    "qwen3next": Hybrid(delta.moe_fields, partial(delta.plan, layer=delta.qwen3_next_layer), False),
    "qwen35": Hybrid(delta.dense_fields, partial(delta.plan, layer=delta.qwen3_5_layer)),
    "qwen35moe": Hybrid(delta.moe_fields, partial(delta.plan, layer=delta.qwen3_5_layer), False),
    "granitehybrid": Hybrid(mamba.granite_fields, mamba.plan_granite),
    "nemotron_h": Hybrid(mamba.nemotron_fields, mamba.plan_nemotron),
    "nemotron_h_moe": Hybrid(mamba.nemotron_fields, mamba.plan_nemotron),
    "falcon-h1": Hybrid(mamba.falcon_fields, mamba.plan_falcon),
    "mamba2": Hybrid(mamba.mamba2_fields, mamba.plan_mamba2),
    "mamba": Hybrid(channels.mamba_fields, channels.plan_mamba),
    "jamba": Hybrid(channels.jamba_fields, channels.plan_jamba),
    "kimi-linear": Hybrid(kimi.read_fields, kimi.plan),
    "lfm2": Hybrid(short_conv.dense_fields, short_conv.plan),
    "lfm2moe": Hybrid(short_conv.moe_fields, short_conv.plan),
}

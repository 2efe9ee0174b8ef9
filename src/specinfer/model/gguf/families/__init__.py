"""Architectures of GGUF files, those with recurrent layers among them: configurations, and the weights of files."""

from functools import partial

from specinfer.model.gguf.families import channels, delta, kimi, mamba, plain, short_conv
from specinfer.model.gguf.families.plan_parts import Family

FAMILIES: dict[str, Family] = {
    "qwen3next": Family(delta.moe_fields, partial(delta.plan, layer=delta.qwen3_next_layer), False),
    "qwen35": Family(delta.dense_fields, partial(delta.plan, layer=delta.qwen3_5_layer)),
    "qwen35moe": Family(delta.moe_fields, partial(delta.plan, layer=delta.qwen3_5_layer), False),
    "granitehybrid": Family(mamba.granite_fields, mamba.plan_granite),
    "nemotron_h": Family(mamba.nemotron_fields, mamba.plan_nemotron),
    "nemotron_h_moe": Family(mamba.nemotron_fields, mamba.plan_nemotron),
    "falcon-h1": Family(mamba.falcon_fields, mamba.plan_falcon),
    "mamba2": Family(mamba.mamba2_fields, mamba.plan_mamba2),
    "mamba": Family(channels.mamba_fields, channels.plan_mamba),
    "jamba": Family(channels.jamba_fields, channels.plan_jamba),
    "kimi-linear": Family(kimi.read_fields, kimi.plan),
    "lfm2": Family(short_conv.dense_fields, short_conv.plan),
    "lfm2moe": Family(short_conv.moe_fields, short_conv.plan),
    "granite": Family(plain.granite_fields, plain.plan_llama),
    "smollm3": Family(plain.smollm_fields, plain.plan_llama),
    "olmo2": Family(plain.olmo_fields, plain.plan_olmo),
    "glm4": Family(plain.glm_fields, plain.plan_glm),
    "qwen2moe": Family(plain.qwen_fields, plain.plan_qwen, stacks_experts=False),
}

"""Architectures of GGUF files by llama.cpp's names: how a file becomes a configuration and the weights of a model.

A family is an entry of `FAMILIES` in one of these modules, and its case in `tests/model/test_gguf_families.py`.
"""

from specinfer.model.gguf.families import (
    channels,
    delta,
    dense,
    ernie,
    gemma,
    kimi,
    latent,
    mamba,
    moe,
    nemotron,
    short_conv,
)
from specinfer.model.gguf.families.plan_parts import Family

_MODULES = (dense, ernie, gemma, moe, latent, delta, mamba, nemotron, channels, kimi, short_conv)
FAMILIES: dict[str, Family] = {name: family for module in _MODULES for name, family in module.FAMILIES.items()}

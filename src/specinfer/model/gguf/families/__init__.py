"""Architectures of GGUF files by llama.cpp's names: how a file becomes a configuration and the weights of a model.

A family is an entry of `FAMILIES` in one of these modules, and its case in `tests/model/test_gguf_families.py`.
"""

from specinfer.model.gguf.families import channels, delta, dense, latent, mamba, moe
from specinfer.model.gguf.families.parts import Family

_MODULES = (dense, moe, latent, delta, mamba, channels)
FAMILIES: dict[str, Family] = {name: family for module in _MODULES for name, family in module.FAMILIES.items()}

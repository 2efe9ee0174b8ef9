"""The places of a loaded model where adapters add to linear layers, for all kinds of decoders.

A site is a linear layer as it is computed: some decoders compute several of a definition together. Native fused layers
take the additions with each call. The modules of other decoders get them by hooks, during passes with adapters.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from specinfer.core.errors import ModelError
from specinfer.kernels import LowRank
from specinfer.model.adapters.hooks import hook
from specinfer.model.adapters.peft_folder import Pair, Shape
from specinfer.model.device_decoder import DeviceDecoder
from specinfer.model.fused import FusedDecoder
from specinfer.model.fused_layer import together
from specinfer.model.layer_kind import LINEARS
from specinfer.model.linears import layer_names


@dataclass(frozen=True, slots=True)
class Site:
    """A linear layer that is computed at once.

    Attributes:
        parts: The linear layers of the definition whose outputs it computes, in their order.
        interleaved: Whether their outputs alternate in blocks, see `fused.together`.
    """

    parts: Mapping[str, Shape]
    interleaved: bool = False

    def low_rank(self, pairs: Mapping[str, Pair], device: torch.device, dtype: torch.dtype) -> LowRank | None:
        """Return what an adapter adds here, or None if it has no matrices for it.

        Args:
            dtype: Type of its matrices.
        """
        own = [pairs.get(name) for name in self.parts]
        found = [pair for pair in own if pair is not None]
        if not found:
            return None
        down = torch.cat([pair.down for pair in found])
        ups, start = [], 0
        for shape, pair in zip(self.parts.values(), own, strict=True):
            up = torch.zeros(shape.outputs, len(down))
            if pair is not None:
                up[:, start : start + len(pair.down)] = pair.up
                start += len(pair.down)
            ups.append(up)
        up = together(ups, interleaved=self.interleaved)
        return LowRank.of(down.to(device, dtype), up.to(device, dtype))


def connect(model: Any) -> list[Site]:
    """Return the sites of a loaded model, and prepare it for adapters; the index of a site is its number.

    Raises:
        ModelError: The model has no linear layers that adapters can change.
    """
    sites: list[Site] = []
    if isinstance(model, FusedDecoder | DeviceDecoder):
        layers: Any = model.layers
        for i, layer in enumerate(layers):
            for names, shapes, call in zip(LINEARS, layer.shapes, _computed(layer), strict=True):
                parts = {f"model.layers.{i}.{name}": Shape(*shape) for name, shape in zip(names, shapes, strict=True)}
                is_fused = isinstance(model, FusedDecoder)
                if is_fused:
                    call.number = len(sites)
                else:
                    hook(call, len(sites))
                sites.append(Site(parts, interleaved=is_fused and len(parts) == 2))
        return sites
    inside = layer_names(model, model.config.get_text_config().num_hidden_layers)
    for name, module in model.named_modules():
        # Experts compute other rows than those of the pass, and so does what a recurrence computes once more.
        is_of_pass = ".experts." not in name and not name.endswith(".mamba.dt_proj")
        if name.startswith(inside) and hasattr(module, "in_features") and is_of_pass:
            hook(module, len(sites))
            sites.append(Site({name: Shape(module.in_features, module.out_features)}))
    if not sites:
        raise ModelError("enable_lora: the model has no linear layers that adapters can change; leave it out")
    return sites


def _computed(layer: Any) -> tuple[Any, ...]:
    return layer.call.linears if hasattr(layer, "call") else (layer.qkv, layer.output, layer.gated, layer.down)

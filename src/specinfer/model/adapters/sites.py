"""The places of a loaded model where adapters add to linear layers, for all kinds of decoders.

A site is a linear layer as it is computed: some decoders compute several of a definition together. Native fused layers
take the additions with each call. The modules of other decoders get them by hooks, during passes with adapters.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specinfer.core.errors import ModelError
from specinfer.core.lora import LoRAConfig
from specinfer.model.adapters.hooks import hook
from specinfer.model.adapters.peft_folder import Pair, Shape
from specinfer.model.forward import attends_by_itself
from specinfer.model.layers.device import Decoder, DeviceLayer
from specinfer.model.layers.native import NativeLayer
from specinfer.model.layers.packing import together
from specinfer.model.linears import layer_names
from specinfer.model.load import LoadedModel
from specinfer.model.offload.meta_weights import LinearCut
from specinfer.ops import AdapterSlots, AdapterTable, LinearCall, LowRank


@dataclass(frozen=True, slots=True)
class Site:
    """A linear layer that is computed at once.

    Attributes:
        parts: The linear layers of the definition whose outputs it computes, in their order, as this rank has them.
        interleaved: Whether their outputs alternate in blocks, see `packing.together`.
    """

    parts: Mapping[str, Shape]
    interleaved: bool = False

    def low_rank(
        self, pairs: Mapping[str, Pair], cuts: Mapping[str, LinearCut], device: torch.device, dtype: torch.dtype
    ) -> LowRank | None:
        """Return what an adapter adds here, or None if it has no matrices for it.

        Args:
            pairs: Its matrices for the whole model.
            cuts: The slices that this rank computes of linear layers.
            dtype: Type of the result's matrices.
        """
        own = [_cut(pairs.get(name), cuts.get(name)) for name in self.parts]
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
        return LowRank.from_matrices(down.to(device, dtype), up.to(device, dtype))


def _cut(pair: Pair | None, cut: LinearCut | None) -> Pair | None:
    """Return the part of an adapter's matrices that belongs to a slice of their linear layer."""
    if pair is None or cut is None:
        return pair
    if cut.cut.dim == 0:
        return pair._replace(up=cut.cut.taken_from(pair.up))
    return pair._replace(down=cut.cut.taken_from(pair.down))


class AdapterSites:
    """The linear layers of a loaded model, or of a rank's shard, that adapters add to; loaded models have one each.

    Attributes:
        linears: The layers by name, with their sizes in the whole model.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._sites, self._cuts = connect(loaded), loaded.cuts
        # As vLLM has them, in the type of the model: half the bytes of a pass in bfloat16.
        is_half = loaded.dtype == torch.bfloat16 or loaded.device.type != "cpu"
        self._place = loaded.device, loaded.dtype if is_half else torch.float32
        parts = [part for site in self._sites for part in site.parts.items()]
        self.linears = {name: _whole(shape, self._cuts.get(name)) for name, shape in parts}

    def adapter_slots(self, config: LoRAConfig) -> AdapterSlots:
        """Return empty slots for the adapters of captured passes."""
        parts = max(len(site.parts) for site in self._sites)
        return AdapterSlots(len(self._sites), config.max_loras, config.max_lora_rank * parts, self._place[0])

    def table(self, pairs: Mapping[str, Pair]) -> AdapterTable:
        """Return what an adapter with these matrices, by names of linear layers, adds here."""
        return AdapterTable([site.low_rank(pairs, self._cuts, *self._place) for site in self._sites])


def _whole(shape: Shape, cut: LinearCut | None) -> Shape:
    if cut is None:
        return shape
    return shape._replace(outputs=cut.size) if cut.cut.dim == 0 else shape._replace(inputs=cut.size)


def connect(loaded: LoadedModel) -> list[Site]:
    """Return the sites of a loaded model, and prepare it for adapters; the index of a site is its number.

    Raises:
        ModelError: The model has no linear layers that adapters can change, or adapters do not know its rows.
    """
    sites: list[Site] = []
    model: Any = loaded.model
    if isinstance(model, Decoder):
        layers: Sequence[NativeLayer | DeviceLayer] = model.layers
        for i, layer in zip(loaded.layers, layers, strict=True):
            for linear in layer.linears:
                names = (f"{model.layers_name}.{i}.{name}" for name in linear.names)
                parts = {name: Shape(*shape) for name, shape in zip(names, linear.shapes, strict=True)}
                if isinstance(linear.computed, LinearCall):
                    linear.computed.number = len(sites)
                else:
                    hook(linear.computed, len(sites))
                sites.append(Site(parts, linear.interleaved))
        return sites
    if attends_by_itself(model):
        raise ModelError(
            f"enable_lora: family {model.config.model_type!r} has a row for each request, which adapters do not know; "
            "merge the adapter into the weights, or leave it out"
        )
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

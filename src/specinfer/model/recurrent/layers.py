"""Which layers of transformers' definitions are replaced by layers that follow token trees."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from specinfer.core.errors import ModelError
from specinfer.model.recurrent.definitions import (
    FalconH1Layer,
    FalconH1Model,
    JambaMambaLayer,
    Lfm2Layer,
    MambaModel,
    MixerLayer,
)
from specinfer.model.recurrent.delta import GatedDelta, KimiDelta
from specinfer.model.recurrent.linear import Lightning, RgLru, ShortConv
from specinfer.model.recurrent.mamba import Mamba, Mamba2
from specinfer.model.recurrent.mixer import Mixer
from specinfer.model.recurrent.states import RecurrentStates

# By class name, because a definition is imported only when a model of its family is loaded.
_REPLACED: dict[str, type[nn.Module]] = {
    "Lfm2ShortConv": ShortConv,
    "Lfm2MoeShortConv": ShortConv,
    "Lfm3ShortConv": ShortConv,
    "Qwen3NextGatedDeltaNet": GatedDelta,
    "Qwen3_5GatedDeltaNet": GatedDelta,
    "Qwen3_5MoeGatedDeltaNet": GatedDelta,
    "OlmoHybridGatedDeltaNet": GatedDelta,
    "KimiLinearDeltaAttention": KimiDelta,
    "BailingHybridDeltaAttention": KimiDelta,
    "MiniMaxLightningAttention": Lightning,
    "RecurrentGemmaRecurrentBlock": RgLru,
    "BambaMixer": Mamba2,
    "NemotronHMamba2Mixer": Mamba2,
    "GraniteMoeHybridMambaLayer": Mamba2,
    "Mamba2Mixer": Mamba2,
    "FalconH1Mixer": Mamba2,
    "JambaMambaMixer": Mamba,
    "MambaMixer": Mamba,
    "FalconMambaMixer": Mamba,
}
# What is around them, where it does not hand keywords on.
_AROUND: dict[str, type[nn.Module]] = {
    "Lfm2DecoderLayer": Lfm2Layer,
    "Lfm2MoeDecoderLayer": Lfm2Layer,
    "NemotronHBlock": MixerLayer,
    "JambaMambaDecoderLayer": JambaMambaLayer,
    "FalconH1DecoderLayer": FalconH1Layer,
    "FalconH1ForCausalLM": FalconH1Model,
    "MambaBlock": MixerLayer,
    "MambaForCausalLM": MambaModel,
    "FalconMambaBlock": MixerLayer,
    "FalconMambaForCausalLM": MambaModel,
    "Mamba2Block": MixerLayer,
    "Mamba2ForCausalLM": MambaModel,
}
# Families whose loop over layers is replaced, too.
LOOP_REPLACED = frozenset({"falcon_h1", "mamba", "mamba2", "falcon_mamba"})
_BOTH = "hybrid"  # attention and a recurrence side by side: what they store is numbered one after the other
LAYER_TYPES = frozenset({"conv", "linear_attention", _BOTH})  # names in `layer_types` of what is replaced

# Names in config.json, of which a family has one each: heads, heads of keys, and the size of a head.
_HEAD_FIELDS = (
    ("mamba_n_heads", "mamba_num_heads", "linear_num_value_heads", "num_heads"),
    ("mamba_n_groups", "n_groups", "linear_num_key_heads"),
    ("mamba_d_head", "mamba_head_dim", "linear_value_head_dim", "head_dim"),
)

FEED_FORWARD_TYPES = frozenset({"mlp", "moe"})  # names of layers that mix no tokens, and store nothing


def stores(config: Any, layer: int) -> bool:
    """Return whether a layer, or the recurrence next to its attention, stores anything for a token."""
    types = getattr(config.get_text_config(), "layer_types", None)
    return types is None or types[layer % len(types)] not in FEED_FORWARD_TYPES


def num_attending(config: Any) -> int:
    """Return the number of layers with attention."""
    config = config.get_text_config()
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return sum(one == _BOTH or one not in LAYER_TYPES | FEED_FORWARD_TYPES for one in types)


def num_stored(config: Any, num_layers: int) -> int:
    """Return the number of places where this many layers store: a recurrence next to attention has its own."""
    types = getattr(config.get_text_config(), "layer_types", None) or ()
    return num_layers * (2 if _BOTH in types else 1)


def replace_layers(model: nn.Module) -> nn.Module:
    """Replace layers of a definition, with their weights or meta weights; names of weights stay.

    Raises:
        ModelError: The definition has layers of such a type that are computed in another way.
    """
    config: Any = model.config
    types = getattr(config.get_text_config(), "layer_types", None) or ()
    num_left = sum(one in LAYER_TYPES for one in types)
    for name, module in list(model.named_modules()):
        if name and (around := _kind(module, _AROUND)) is not None:
            model.set_submodule(name, around(module))
        if (kind := _kind(module, _REPLACED)) is not None:
            layer = _replaced(kind, name, module, types)
            _check_heads(layer, config.get_text_config())
            model.set_submodule(name, layer)
            num_left -= 1
    if num_left:
        raise ModelError(f"model: {config.model_type!r} has layers not supported: {', '.join(_types(config))}")
    whole = _kind(model, _AROUND)
    return model if whole is None else whole(model)


def _replaced(kind: Any, name: str, module: nn.Module, types: Sequence[str]) -> nn.Module:
    if kind is Mamba2 and _BOTH in types:
        return Mamba2(module, len(types))
    if kind is RgLru:  # its block does not know which layer it is
        return RgLru(module, int(name.split(".")[-2]))
    layer: nn.Module = kind(module)
    return layer


def _check_heads(layer: nn.Module, config: Any) -> None:
    """Refuse heads of keys that cannot serve the same number of heads each."""
    if isinstance(layer, Mamba2):
        sizes = (layer.num_heads, layer.num_groups, layer.head_dim)
    elif isinstance(layer, GatedDelta):
        sizes = (layer.num_v_heads, layer.num_k_heads, layer.head_v_dim)
    else:
        return
    if sizes[0] % sizes[1]:
        fields = (next(name for name in names if hasattr(config, name)) for names in _HEAD_FIELDS)
        raise ModelError(
            f"model: {sizes[1]} heads of keys cannot serve {sizes[0]} heads of {sizes[2]} numbers; "
            f"correct {' or '.join(fields)} in config.json"
        )


def _kind(module: nn.Module, kinds: Mapping[str, type[nn.Module]]) -> Any:
    """Return the class that replaces a module of transformers, or None."""
    is_theirs = type(module).__module__.startswith("transformers.")
    return kinds.get(type(module).__name__) if is_theirs else None


def has_recurrent_layers(config: Any) -> bool:
    """Return whether a model has layers without attention that mix tokens."""
    return bool(_types(config))


def is_hybrid(model: nn.Module) -> bool:
    """Return whether a model has layers that were replaced."""
    return any(map(is_recurrent, model.modules()))


def is_recurrent(module: nn.Module) -> bool:
    """Return whether a module is a layer, or a part of one, that replaces one without attention."""
    return isinstance(module, Mixer)


def num_taps(model: nn.Module) -> int:
    """Return the most tokens that a layer without attention reads on a path, or 0 if there are no such layers."""
    layers = [module for module in model.modules() if is_recurrent(module)]
    convolutions = [one for layer in layers for one in layer.modules() if isinstance(one, nn.Conv1d)]
    return max([2, *(one.kernel_size[0] for one in convolutions)]) if layers else 0


def weights_in_memory(model: nn.Module) -> set[str]:
    """Return the names of weights that layers without attention read other than by calling a linear layer."""
    return {
        f"{outer}.{name}.{weight}".replace("..", ".")
        for outer, layer in model.named_modules()
        if is_recurrent(layer)
        for name, module in layer.named_modules()
        if not isinstance(module, nn.Linear)
        for weight in (*dict(module.named_parameters(recurse=False)), *dict(module.named_buffers(recurse=False)))
    }


def has_stages(config: Any) -> bool:
    """Return whether a model can be split into stages."""
    return not has_recurrent_layers(config) or config.model_type not in LOOP_REPLACED


def check_stages(config: Any, num_stages: int) -> None:
    """Refuse stages of a model whose loop over layers is replaced.

    Raises:
        ModelError: The model is such a one, and is to be split into stages.
    """
    if num_stages > 1 and not has_stages(config):
        raise ModelError(
            f"pipeline_parallel_size: family {config.model_type!r} has layers of type {', '.join(_types(config))}, "
            "which are not split into stages; use 1, or tensor_parallel_size"
        )


def _types(config: Any) -> list[str]:
    return sorted(LAYER_TYPES.intersection(getattr(config.get_text_config(), "layer_types", None) or ()))


def _state_shapes(model: nn.Module) -> dict[int, tuple[int, ...]]:
    mixers = [one for one in model.modules() if isinstance(one, Mixer)]
    return {one.layer_idx: shape for one in mixers if (shape := one.state_shape) is not None}


def kept_states(model: nn.Module, num_states: int, num_slots: int, device: torch.device) -> RecurrentStates:
    """Return a pool for this many states of a model's recurrent layers."""
    return RecurrentStates(_state_shapes(model), num_states, num_slots, device)


def state_bytes(model: nn.Module) -> int:
    """Return the bytes of one state of all recurrent layers, or 0 if there are none."""
    return sum(math.prod(shape) for shape in _state_shapes(model).values()) * torch.float32.itemsize


def slot_numbers(model: nn.Module) -> int:
    """Return how many inputs of convolutions recurrent layers store for a token: most of what they store."""
    layers = [module for module in model.modules() if is_recurrent(module)]
    kernels = [one for layer in layers for one in layer.modules() if isinstance(one, nn.Conv1d)]
    return sum(one.weight.shape[0] for one in kernels)


def largest_state_bytes(model: nn.Module) -> int:
    """Return the bytes of the largest state of one recurrent layer, or 0 if there are none."""
    return max(map(math.prod, _state_shapes(model).values()), default=0) * torch.float32.itemsize

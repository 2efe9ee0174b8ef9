"""Which layers of transformers' definitions are replaced by layers that follow token trees."""

from typing import Any

from torch import nn

from specinfer.core.errors import ModelError
from specinfer.model.recurrent.short_conv import ShortConv

# By class name, because a definition is imported only when a model of its family is loaded.
_REPLACED: dict[str, type[ShortConv]] = {
    "Lfm2ShortConv": ShortConv,
    "Lfm2MoeShortConv": ShortConv,
}
LAYER_TYPES = frozenset({"conv"})  # names in `layer_types` of what is replaced


def replace_layers(model: nn.Module) -> nn.Module:
    """Replace convolutions of a definition, with their weights or meta weights; names of weights stay."""
    for name, module in list(model.named_modules()):
        kind = _REPLACED.get(type(module).__name__)
        if kind is not None and type(module).__module__.startswith("transformers."):
            model.set_submodule(name, kind(module))
    return model


def is_hybrid(model: nn.Module) -> bool:
    """Return whether a model has layers that were replaced."""
    kinds = tuple(set(_REPLACED.values()))
    return any(isinstance(module, kinds) for module in model.modules())


def check_split(config: Any, tensor_parallel_size: int, num_stages: int, offload: str | None = None) -> None:
    """Refuse what layers that are replaced do not support.

    Raises:
        ModelError: The model has such layers, and is to be split or streamed.
    """
    kinds = sorted(LAYER_TYPES.intersection(getattr(config.get_text_config(), "layer_types", None) or ()))
    if not kinds:
        return
    why = f"family {config.model_type!r} has layers of type {', '.join(kinds)}, which"
    if tensor_parallel_size > 1:
        raise ModelError(f"tensor_parallel_size: {why} are not split; use 1")
    if num_stages > 1:
        raise ModelError(f"pipeline_parallel_size: {why} are not split into stages; use 1")
    if offload is not None:
        raise ModelError(f"offload: {why} are not streamed; leave offload out")

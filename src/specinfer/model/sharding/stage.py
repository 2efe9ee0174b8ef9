"""One stage of a pipeline: consecutive decoder layers of a model, with the embedding before or the head after them.

`forward` runs a stage as it does a whole model.
"""

from typing import Any

import torch
from torch import Tensor, nn

from specinfer.core.errors import ModelError
from specinfer.model.batch import ForwardBatch
from specinfer.model.forward import forward
from specinfer.model.layers.device import Decoder
from specinfer.model.linears import layer_lists, output_head
from specinfer.model.sharding.placeholder import EmbeddingPlaceholder, End, Placeholder

# Names that definitions use for modules after the layers. A module with another name stays, and is never called.
_AFTER = ("norm", "ln_f", "norm_f", "final_layer_norm", "final_layernorm", "project_out")


def make_stage(model: nn.Module, layers: range, *, is_first: bool, is_last: bool) -> None:
    """Remove all of a definition but these decoder layers, and the embedding or the head if they belong to the stage.

    Modules that stay keep their names. Attention modules are renumbered from 0 within the stage. Weights may be on the
    meta device.

    Args:
        is_last: Whether the stage has the head. Without the head, even the last layers end in hidden states.

    Raises:
        ModelError: The family passes more than hidden states from layer to layer.
    """
    config: Any = model.config
    num_layers = config.get_text_config().num_hidden_layers
    assert 0 <= layers.start < layers.stop <= num_layers
    assert is_first == (layers.start == 0)
    ends_early = not is_last and layers.stop == num_layers
    assert ends_early or is_last == (layers.stop == num_layers)
    if getattr(config.get_text_config(), "num_kv_shared_layers", 0) and len(layers) < num_layers:
        raise ModelError(_refusal(config, "some layers use the keys and values of others"))
    lists = layer_lists(model, num_layers)
    assert lists
    if not is_first:
        _replace_embeddings(model, tuple(f"{name}." for name in lists))
    for name in lists:
        trunk, own_name = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        if not is_last:
            _replace_after(model, trunk, End if ends_early else Placeholder)
        _cut(getattr(trunk, own_name), layers)


def received(model: nn.Module, num_tokens: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialized [tokens, width] tensor, to receive the hidden states of the previous stage.

    Args:
        dtype: The model's type.
    """
    if isinstance(model, Decoder):
        width, dtype = model.width, model.hidden_dtype(dtype)
    else:
        config: Any = model.config
        width = config.get_text_config().hidden_size
    return torch.empty(num_tokens, width, dtype=dtype, device=device)


def random_hidden(model: nn.Module, num_tokens: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return hidden states as `received` has them, with random numbers that are always the same."""
    like = received(model, num_tokens, dtype, device)
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(0)).to(like)


def check_stage(model: nn.Module, batch: ForwardBatch, hidden: Tensor) -> None:
    """Refuse a stage, not the first, whose result depends on more than the hidden states that it received.

    Args:
        hidden: The received hidden states, as in `forward`.

    Raises:
        ModelError: The result depends on more.
    """
    embeddings = [module for module in model.modules() if isinstance(module, EmbeddingPlaceholder)]
    outputs = []
    for value in (0.0, 1.0):
        for embedding in embeddings:
            embedding.value = value
        outputs.append(forward(model, batch, hidden.clone()))
    if not torch.equal(*outputs):
        config: Any = model.config
        raise ModelError(_refusal(config, "layers get more of earlier ones than hidden states"))


def _cut(modules: nn.ModuleList, layers: range) -> None:
    for i, layer in enumerate(modules):
        if i not in layers:
            modules[i] = (End if i == layers.stop else Placeholder)(layer)
            continue
        for module in layer.modules() if layers.start else ():
            if isinstance(index := getattr(module, "layer_idx", None), int):
                assert index == i
                module.layer_idx = index - layers.start  # type: ignore[assignment]
    if layers.start:
        modules[layers.start].register_forward_pre_hook(_receive, with_kwargs=True)


def _receive(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Replace the input of the stage's first layer by the received hidden states."""
    hidden = kwargs["forward_batch"].hidden
    assert hidden is not None
    return ((hidden, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": hidden})


def _replace_embeddings(model: nn.Module, inside: tuple[str, ...]) -> None:
    head = output_head(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Embedding) and module is not head and not name.startswith(inside):
            model.set_submodule(name, EmbeddingPlaceholder(module))


def _replace_after(model: nn.Module, trunk: nn.Module, kind: type[Placeholder]) -> None:
    head = output_head(model)
    for name, module in list(model.named_modules()):
        if head is not None and module is head:
            model.set_submodule(name, kind(module))
    for name in _AFTER:
        if isinstance(module := getattr(trunk, name, None), nn.Module):
            setattr(trunk, name, kind(module))


def _refusal(config: Any, why: str) -> str:
    return f"model: family {config.model_type!r} cannot be split into stages: {why}; use pipeline_parallel_size=1"

"""The linear layers of a loaded model: those that go by another name made plain, and quantized if that is asked for."""

import logging
import re
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from specinfer.errors import ModelError
from specinfer.kernels import Float8Linear, QuantizedLinear
from specinfer.kernels.quantization import BITS
from specinfer.kernels.quantized_linear import joined_bias

HEAD_BITS: Literal[8] = 8  # what is lost in the last layer nothing makes up for
# Layers that choose experts: small, and a choice that flips changes more than a number that is a little off.
_ROUTER = re.compile(r"(^|\.)(gate|\w*expert_gate|\w*router\w*)(\.|$)")
logger = logging.getLogger(__name__)


def make_linears_plain(model: nn.Module) -> None:
    """GPT-2's transposed layers and Falcon's become `nn.Linear`, so that all that follows needs to know only that."""
    kinds = {name: _kind(module) for name, module in model.named_modules()}
    for name, kind in kinds.items():
        layer: Any = model.get_submodule(name)
        if kind == "Conv1D":
            weight = nn.Parameter(layer.weight.detach().T.contiguous(), requires_grad=False)
            _replace(model, name, _plain(weight, layer.bias))
        elif kind == "FalconLinear":
            _replace(model, name, _plain(layer.weight, layer.bias))


def _kind(module: nn.Module) -> str:
    """The name, if it is a class of transformers. A list of the modules would keep old weights beside the new ones."""
    return type(module).__name__ if type(module).__module__.startswith("transformers.") else ""


def quantize_linears(
    model: nn.Module, quantization: str, config: Any, device: torch.device, *, native: bool = True, warns: bool = True
) -> None:
    """Replaces the linear layers of the decoder's layers, and the output head, by quantized ones on the device.

    Embeddings stay as they are, also where the head had the same weights; so do norms, routers, and experts that are
    one stack of matrices.

    Raises:
        ModelError: The layers have none.
    """
    inside = layer_names(model, config.get_text_config().num_hidden_layers)
    names = [
        name
        for name, layer in model.named_modules()
        if type(layer) is nn.Linear and name.startswith(inside) and not _ROUTER.search(name)
    ]
    stacks = {name for name, weight in model.named_parameters() if weight.ndim > 2 and name.startswith(inside)}
    if not names:
        raise ModelError(
            f"model: family {config.model_type!r} has no layers that can be quantized; leave quantization out"
        )
    heads = _head_names(model)
    for name in [*names, *heads]:
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        if not layer.weight.is_meta:
            layer.to(device)
        if quantization in BITS:
            bits = HEAD_BITS if name in heads else BITS[quantization]
            _replace(model, name, QuantizedLinear.of(layer, bits, native=native))
        else:
            _replace(model, name, Float8Linear.of(layer))
    if stacks and warns:
        kinds = sorted({name.removeprefix(next(p for p in inside if name.startswith(p))) for name in stacks})
        logger.warning("experts stay as they are, only the other layers are quantized: %s", ", ".join(kinds))


def cut_head(model: nn.Module, token_ids: Tensor) -> None:
    """Leaves of the output head the rows of these tokens; an embedding with the same weights stays whole.

    Args:
        token_ids: [map] int64, all in the vocabulary.

    Raises:
        ModelError: The head is no linear layer.
    """
    names = _head_names(model)
    if len(names) != 1:
        raise ModelError("model: its output head is no linear layer, and cannot be cut to a token map; remove the file")
    head: Any = model.get_submodule(names[0])
    weight = nn.Parameter(head.weight.detach()[token_ids], requires_grad=False)
    bias = None if head.bias is None else nn.Parameter(head.bias.detach()[token_ids], requires_grad=False)
    _replace(model, names[0], _plain(weight, bias))


def layer_names(model: nn.Module, num_layers: int) -> tuple[str, ...]:
    """What names of modules within decoder layers begin with."""
    return tuple(
        f"{name}.{i}."
        for name, modules in model.named_modules()
        if isinstance(modules, nn.ModuleList) and len(modules) == num_layers
        for i in range(num_layers)
    )


def _head_names(model: nn.Module) -> list[str]:
    """One; or none, if the output head is no linear layer."""
    find = getattr(model, "get_output_embeddings", None)
    head = getattr(model, "lm_head", None) if find is None else find()
    return [name for name, module in model.named_modules() if module is head and type(head) is nn.Linear]


def _plain(weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight, layer.bias = weight, bias  # type: ignore[assignment]
    return layer


def joined(layers: Sequence[Any]) -> nn.Module:
    """One linear layer whose outputs are those of all these, one after the other; they are of one kind."""
    if len(layers) == 1:
        only: nn.Module = layers[0]
        return only
    if isinstance(layers[0], QuantizedLinear | Float8Linear):
        rounded: nn.Module = type(layers[0]).joined(layers)
        return rounded
    weight = nn.Parameter(torch.cat([layer.weight.detach() for layer in layers]), requires_grad=False)
    return _plain(weight, joined_bias(layers))


def _replace(model: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, layer)

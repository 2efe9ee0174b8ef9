"""The linear layers of a loaded model: conversion of special classes to `nn.Linear`, and quantization."""

import itertools
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from specinfer.core.errors import ModelError
from specinfer.model.quantized_experts import plain_linear, quantize_experts, round_experts
from specinfer.ops import QuantizedEmbedding, QuantizedLinear, QuantizedWeight
from specinfer.ops.quantization import BITS
from specinfer.ops.quantized_linear import joined_bias

HEAD_BITS: Literal[8] = 8  # later layers cannot make up for an error of the last one
# Layers that choose experts: they are small, and another choice changes more than a small error in a number.
ROUTER = re.compile(r"(^|\.)(gate|\w*expert_gate|\w*router\w*)(\.|$)")
logger = logging.getLogger(__name__)
# The function that quantizes a layer, by names of `config.QUANTIZATIONS`; `native` packs it for CPUs.
QUANTIZE: dict[str, Callable[[nn.Linear, bool], nn.Module]] = {
    "int8": lambda layer, native: QuantizedLinear.from_linear(layer, 8, native=native),
    "int4": lambda layer, native: QuantizedLinear.from_linear(layer, 4, native=native),
    "fp8": lambda layer, native: QuantizedLinear.from_linear(layer, "fp8", native=native),
}


def make_linears_plain(model: nn.Module) -> None:
    """Replace GPT-2's transposed layers and Falcon's linear layers by `nn.Linear`, which later code expects."""
    kinds = {name: _kind(module) for name, module in model.named_modules()}
    for name, kind in kinds.items():
        layer: Any = model.get_submodule(name)
        if kind == "Conv1D":
            weight = nn.Parameter(layer.weight.detach().T.contiguous(), requires_grad=False)
            model.set_submodule(name, plain_linear(weight, layer.bias))
        elif kind == "FalconLinear":
            model.set_submodule(name, plain_linear(layer.weight, layer.bias))


def _kind(module: nn.Module) -> str:
    """Return the class name if it is transformers'; a name, because a kept module would keep old weights in memory."""
    return type(module).__name__ if type(module).__module__.startswith("transformers.") else ""


def quantize_linears(
    model: nn.Module,
    quantization: str,
    config: Any,
    device: torch.device,
    *,
    native: bool = True,
    warns: bool = True,
) -> None:
    """Replace the linear layers of the decoder layers, and the output head, by quantized ones on the device.

    The output head has 8 bits; that of a draft head has those of its layers, since it is up to half of what a level
    reads, and an error costs a draft token at most. Experts are rounded to integers, too. Embeddings are not quantized,
    even if they are tied to the head. Neither are norms, routers, convolutions, and other stacks of matrices.

    Args:
        config: The model's configuration, or None for a draft head, all of whose linear layers are quantized alike.

    Raises:
        ModelError: The model has no such linear layers.
    """
    inside = ("",) if config is None else layer_names(model, config.get_text_config().num_hidden_layers)
    heads = [] if config is None else _head_names(model)
    names = [name for name in quantizable_names(model, inside) if name not in heads]
    if not names:
        what = "drafters: a drafter" if config is None else f"model: family {config.model_type!r}"
        raise ModelError(f"{what} has no layers that can be quantized; leave quantization out")
    if rounds_experts(quantization, device):
        if native and device.type == "cpu":
            quantize_experts(model, inside, BITS[quantization])
        else:
            round_experts(model, inside, BITS[quantization], device)
    if warns:
        _warn_of_stacks(model, inside)
    for name in [*names, *heads]:
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        if not layer.weight.is_meta:
            layer.to(device)
        kind = f"int{HEAD_BITS}" if quantization in BITS and name in heads else quantization
        model.set_submodule(name, QUANTIZE[kind](layer, native))


def rounds_experts(quantization: str | None, device: torch.device) -> bool:
    """Return whether experts are rounded with the linear layers, if they are of a known structure."""
    return quantization in BITS and device.type in ("cpu", "cuda")


def _warn_of_stacks(model: nn.Module, inside: tuple[str, ...]) -> None:
    """Log a warning that names the stacks of matrices which are not quantized with the linear layers.

    Args:
        inside: What the names of weights in decoder layers begin with.
    """
    weights = [(name, weight) for name, weight in model.named_parameters() if name.startswith(inside)]
    stacks = {name for name, weight in weights if sum(size > 1 for size in weight.shape) > 2}  # no convolutions
    if stacks:
        kinds = sorted({name.removeprefix(next(p for p in inside if name.startswith(p))) for name in stacks})
        logger.warning("stacked matrices stay as they are, only the other layers are quantized: %s", ", ".join(kinds))


def place_codes(
    model: nn.Module,
    codes_of: Callable[[nn.Module, str, Tensor], tuple[str, QuantizedWeight] | None],
    *,
    native: bool = True,
) -> set[str]:
    """Replace linear layers and embeddings with meta weights by ones that compute with codes; return their types.

    Args:
        codes_of: Function of a module, and of its meta weight's name and itself. It returns the type and the codes,
            or None for a weight that has none.
        native: False for the kernels of GPUs.
    """
    kinds: set[str] = set()
    found: dict[int, QuantizedLinear] = {}  # a tied head is read once
    for name, module in list(model.named_modules()):
        weight = module._parameters.get("weight")
        if weight is None or not weight.is_meta or not isinstance(module, nn.Linear | nn.Embedding):
            continue
        if (layer := found.get(id(weight))) is None:
            bias = module.bias if isinstance(module, nn.Linear) else None
            if (stored := codes_of(module, f"{name}.weight", weight)) is None:
                continue
            kind, codes = stored
            kinds.add(kind)
            codes = codes if native else codes.merged()
            layer = found[id(weight)] = QuantizedLinear(codes, bias, weight.dtype, native=native)
        if isinstance(module, nn.Embedding):
            model.set_submodule(name, QuantizedEmbedding(layer, getattr(module, "embed_scale", None)))
        else:
            assert module.bias is None or layer.bias is module.bias
            model.set_submodule(name, layer)
    return kinds


def quantizable_names(model: nn.Module, inside: tuple[str, ...]) -> list[str]:
    """Return the names of linear layers with these prefixes, those of decoder layers, but for routers."""
    return [
        name
        for name, layer in model.named_modules()
        if type(layer) is nn.Linear and name.startswith(inside) and not ROUTER.search(name)
    ]


def cut_head(model: nn.Module, token_ids: Tensor) -> None:
    """Keep only the rows of these tokens in the output head, or their codes; a tied embedding stays whole.

    Args:
        token_ids: [map] int64, all in the vocabulary.

    Raises:
        ModelError: The head is not a linear layer.
    """
    names = _head_names(model)
    if len(names) != 1:
        raise ModelError(
            "model: its output head is not a linear layer, and cannot be cut to a token map; remove the file"
        )
    head: Any = model.get_submodule(names[0])
    if isinstance(head, QuantizedLinear):
        model.set_submodule(names[0], head.part(token_ids))
        return
    weight = nn.Parameter(head.weight.detach()[token_ids], requires_grad=False)
    bias = None if head.bias is None else nn.Parameter(head.bias.detach()[token_ids], requires_grad=False)
    model.set_submodule(names[0], plain_linear(weight, bias))


def layer_names(model: nn.Module, num_layers: int) -> tuple[str, ...]:
    """Return the prefixes of the names of modules within decoder layers, one for each layer."""
    return tuple(f"{name}.{i}." for name in layer_lists(model, num_layers) for i in range(num_layers))


def layer_lists(model: nn.Module, num_layers: int) -> dict[str, nn.ModuleList]:
    """Return the lists of decoder layers by name, without lists inside a layer; most models have one."""
    found: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        is_list = isinstance(module, nn.ModuleList) and len(module) == num_layers
        if is_list and not name.startswith(tuple(f"{outer}." for outer in found)):
            found[name] = module
    return found


def _head_names(model: nn.Module) -> list[str]:
    """Return the name of the output head, in a list that is empty if the head is not a linear layer."""
    head, kinds = output_head(model), (nn.Linear, QuantizedLinear)
    return [name for name, module in model.named_modules() if module is head and type(head) in kinds]


def output_head(model: nn.Module) -> nn.Module | None:
    """Return the module that computes logits."""
    find: Any = getattr(model, "get_output_embeddings", None)
    head: nn.Module | None = getattr(model, "lm_head", None) if find is None else find()
    return head


def can_join(layer: Any) -> bool:
    """Return whether `joined` takes layers of this class."""
    return type(layer) is nn.Linear or hasattr(layer, "joined")


class LinearGroup(nn.Module):
    """Linear layers of several formats with the same inputs; their outputs follow one another."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([layer(x) for layer in self.layers], dim=-1)


def joined(layers: Sequence[Any]) -> nn.Module:
    """Return one layer whose outputs are those of all layers, one after the other."""
    runs = [_joined(list(run)) for _, run in itertools.groupby(layers, _format_of)]
    return runs[0] if len(runs) == 1 else LinearGroup(runs)


def _format_of(layer: Any) -> tuple[object, ...]:
    """Return the properties that linear layers must share to become one."""
    stored = layer.stored.format if isinstance(layer, QuantizedLinear) else None
    return type(layer), layer.bias is None, stored


def _joined(layers: list[Any]) -> nn.Module:
    if len(layers) == 1:
        only: nn.Module = layers[0]
        return only
    if type(layers[0]) is not nn.Linear:
        rounded: nn.Module = type(layers[0]).joined(layers)
        return rounded
    weight = nn.Parameter(torch.cat([layer.weight.detach() for layer in layers]), requires_grad=False)
    return plain_linear(weight, joined_bias(layers))

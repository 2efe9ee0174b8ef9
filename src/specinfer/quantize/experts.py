"""Experts of a model's files as one linear layer for each matrix, whether the files have these or stacks of them.

A stack `mlp.experts.gate_up_proj` [experts, out, in], or transposed, becomes `experts.0.gate_proj.weight` [out, in],
`experts.0.up_proj.weight` and so on: the names that vLLM and compressed-tensors have for quantized experts.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from specinfer.core.errors import ModelError
from specinfer.model.gguf.stored import mtp_names
from specinfer.model.offload.checkpoint import layer_number
from specinfer.model.quantized_experts import can_quantize_experts
from specinfer.model.stacked_source import EXPERT, expert_kind, rows_of

_STACK = re.compile(r"(?P<layer>.*\.experts)\.(?P<kind>gate_up|up|down)_proj(?P<bias>_bias)?")
_OF_GRANITE = re.compile(r"(?P<block>.*)\.(?P<kind>in|out)put_linear\.weight")
_PARTS = {"gate_up": ("gate_proj", "up_proj"), "up": ("up_proj",), "down": ("down_proj",)}


class Place(NamedTuple):
    """The place of an expert's matrix in a model whose experts `split_experts` has split.

    Attributes:
        linear: Name of the linear layer.
        rows: Its outputs that are those of the matrix.
    """

    linear: str
    rows: slice


class StoredExperts:
    """The experts of a model's files.

    Args:
        model: Its definition.
        shapes: Shapes of the tensors in the files, by name.

    Attributes:
        shapes: Shapes of the same tensors, without stacks.
    """

    def __init__(self, model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
        modules = [(name, module) for name, module in model.named_modules() if can_quantize_experts(module)]
        self._modules: dict[int | None, tuple[str, Any]] = {
            layer_number(f"{name}."): (name, module) for name, module in modules
        }
        self._mtp = mtp_names(shapes)
        self.shapes = {
            name: tuple(part.shape)
            for key, shape in shapes.items()
            for name, part in self.split(key, torch.empty(shape, device="meta"))
        }

    def split(self, key: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the parts of a stack by their names, as views; and any other tensor as it is.

        Raises:
            ModelError: A stack has another shape than in the definition.
        """
        of_granite, match = _OF_GRANITE.fullmatch(key), _STACK.fullmatch(key)
        named = self._module_of(key)
        if named is None or tensor.ndim < 2 or (match is None and (of_granite is None or tensor.ndim < 3)):
            yield key, tensor
            return
        experts = named[1]
        if match is not None:
            layer, kind, names = match["layer"], match["kind"], _PARTS[match["kind"]]
            end = "bias" if match["bias"] else "weight"
        else:
            assert of_granite is not None
            layer, end = f"{of_granite['block']}.experts", "weight"
            kind, names = ("gate_up", ("w1", "w3")) if of_granite["kind"] == "in" else ("down", ("w2",))
        wanted = getattr(experts, f"{kind}_proj{'_bias' if end == 'bias' else ''}").shape
        if tensor.shape != wanted:
            raise ModelError(
                f"model: weight {key} has the shape {list(tensor.shape)}, and config.json asks for {list(wanted)}; "
                "fetch the model again"
            )
        for number, stacked in enumerate(tensor):
            matrix = stacked.T if experts.is_transposed and end == "weight" else stacked
            parts = rows_of(len(matrix), len(names), is_transposed=experts.is_transposed)
            for name, rows in zip(names, parts, strict=True):
                yield f"{layer}.{number}.{name}.{end}", matrix[rows]

    def place(self, layer: str) -> Place | None:
        """Return the place of a layer, named as in `shapes`, or None if it is no expert's matrix."""
        match, named = EXPERT.fullmatch(f"{layer}.weight"), self._module_of(f"{layer}.weight")
        if match is None or named is None:
            return None
        (name, experts), kind = named, expert_kind(match)
        is_half = kind != "down" and getattr(experts, "has_gate", True)
        outputs = self.shapes[f"{layer}.weight"][0]
        both = rows_of(2 * outputs, 2, is_transposed=experts.is_transposed)
        rows = both[kind == "up"] if is_half else slice(None)
        return Place(f"{name}.linears.{2 * int(match['number']) + (kind == 'down')}", rows)

    def _module_of(self, key: str) -> tuple[str, Any] | None:
        return None if key in self._mtp else self._modules.get(layer_number(key))

"""Rounding of weights that makes up for its own errors on calibration texts: GPTQ (arXiv 2210.17323, section 3).

Each row is rounded input by input, and the error of an input is taken back from those to its right, in proportion to
the inverse of the inputs' second moments. So outputs on the calibration texts change least. Layers are rounded in the
model's order, and each sees the hidden states that the rounded layers before it give.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from specinfer.ops import each_alone
from specinfer.ops.quantization import RANGES, Bits, dequantize, find_scales, quantize
from specinfer.ops.quantized_weight import GROUP_SIZES, ZEROS, QuantizedWeight

_DAMPING = 0.01  # of the mean second moment, added to all of them, because few texts leave some directions unseen
_AT_ONCE = 1024  # rows; with fewer a step would be all overhead
_BLOCK = 128  # inputs rounded before the others to their right learn of the errors


def quantize_with_moments(weight: Tensor, moments: Tensor, bits: Bits) -> QuantizedWeight:
    """Round weights so that the layer's outputs change least.

    Args:
        weight: [out, in], finite.
        moments: [in, in] sum of the products of each two inputs over all calibration tokens.
    """
    size, width = GROUP_SIZES[bits], weight.shape[1]
    if width % size or not moments.any():  # padded inputs have no moments, and experts may see no token
        return quantize(weight, bits)
    rest, inverse = weight.detach().float().clone(), _inverse_factor(moments)
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    scales = torch.empty((len(weight), width // size), dtype=torch.bfloat16, device=weight.device)
    step = _AT_ONCE if weight.device.type == "cpu" else max(len(weight), 1)
    parts = [slice(first, first + step) for first in range(0, len(weight), step)]
    each_alone(lambda rows: _round_rows(rest[rows], inverse, bits, codes[rows], scales[rows]), parts)
    return QuantizedWeight(codes, scales, bits, width)


@torch.no_grad()  # threads do not inherit it
def _round_rows(rest: Tensor, inverse: Tensor, bits: Bits, codes: Tensor, scales: Tensor) -> None:
    """Write codes and scales of some rows, whose weights in `rest` take up the errors."""
    size, zero, width = GROUP_SIZES[bits], ZEROS[bits], rest.shape[1]
    for first in range(0, width, _BLOCK):
        last = min(first + _BLOCK, width)
        errors = torch.empty((len(rest), last - first), device=rest.device)
        for i in range(first, last):
            if i % size == 0:
                group_scales = find_scales(rest[:, i : i + size].unsqueeze(1), bits)
                scales[:, i // size] = group_scales.flatten().to(torch.bfloat16)
            scale = scales[:, i // size].float()
            code = (rest[:, i] / scale.masked_fill(scale == 0, torch.inf)).round().clamp(*RANGES[bits])
            codes[:, i] = (code + zero).to(torch.uint8)
            errors[:, i - first] = (rest[:, i] - code * scale) / inverse[i, i]
            rest[:, i:last] -= errors[:, i - first, None] * inverse[i, i:last]
        rest[:, last:] -= errors @ inverse[first:last, last:]


def _inverse_factor(moments: Tensor) -> Tensor:
    """Return the upper Cholesky factor of the inverse of damped moments, [in, in] float32."""
    damped = moments.double() + _DAMPING * moments.diagonal().double().mean() * torch.eye(
        len(moments), dtype=torch.float64, device=moments.device
    )
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factor: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor.float()


@torch.no_grad()
def round_layers(
    model: Any,
    layers: Mapping[str, nn.Module],
    names: Sequence[str],
    texts: Sequence[Sequence[int]],
    bits: Bits,
    note: Callable[[int], None],
) -> tuple[dict[str, QuantizedWeight], set[str]]:
    """Round linear layers of a model in place; return their codes by name, and those that no token of the texts saw.

    Args:
        model: A model as transformers defines it, in float32.
        layers: Decoder layers by name, in their order.
        names: Names of the linear layers to round; all are in decoder layers.
        texts: Token ids of the calibration texts.
        note: Called with the number of decoder layers done.
    """
    states, calls = _first_calls(model, layers, texts)
    rounded: dict[str, QuantizedWeight] = {}
    unseen: set[str] = set()
    for number, (prefix, layer) in enumerate(layers.items(), start=1):
        inside = [name for name in names if name.startswith(f"{prefix}.")]
        moments = _Moments({name: model.get_submodule(name) for name in inside})
        with moments:
            for state, call in zip(states, calls[prefix], strict=True):
                layer(state, *call[0], **call[1])
        for name in inside:
            linear: Any = model.get_submodule(name)
            if not moments.sums[name].any():
                unseen.add(name)
            rounded[name] = quantize_with_moments(linear.weight, moments.sums[name], bits)
            linear.weight.copy_(dequantize(rounded[name]))
        outputs = (layer(state, *call[0], **call[1]) for state, call in zip(states, calls[prefix], strict=True))
        states = [output[0] if isinstance(output, tuple) else output for output in outputs]
        note(number)
    return rounded, unseen


class _Moments:
    """Second moments of the inputs of linear layers, summed while it is entered."""

    def __init__(self, linears: Mapping[str, Any]) -> None:
        self._linears = linears
        self.sums = {
            name: torch.zeros(linear.in_features, linear.in_features, device=linear.weight.device)
            for name, linear in linears.items()
        }
        self._hooks: list[Any] = []

    def __enter__(self) -> "_Moments":
        self._hooks = [
            linear.register_forward_pre_hook(lambda _, inputs, name=name: self._add(name, inputs[0]))
            for name, linear in self._linears.items()
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _add(self, name: str, inputs: Tensor) -> None:
        rows = inputs.flatten(0, -2).float()
        self.sums[name].addmm_(rows.T, rows)


Call = tuple[tuple[Any, ...], dict[str, Any]]


def _first_calls(
    model: Any, layers: Mapping[str, nn.Module], texts: Sequence[Sequence[int]]
) -> tuple[list[Tensor], dict[str, list[Call]]]:
    """Return the hidden states before the first layer for each text, and the other arguments of each layer's calls."""
    states: list[Tensor] = []
    calls: dict[str, list[Call]] = {name: [] for name in layers}

    def keep(name: str, args: tuple[Any, ...], fields: dict[str, Any]) -> None:
        fields = dict(fields)
        state, others = (args[0], args[1:]) if args else (fields.pop("hidden_states"), ())
        if name == next(iter(layers)):
            states.append(state)
        calls[name].append((others, fields))

    hooks = [
        layer.register_forward_pre_hook(lambda _, args, fields, name=name: keep(name, args, fields), with_kwargs=True)
        for name, layer in layers.items()
    ]
    try:
        for text in texts:
            model(input_ids=torch.tensor([text], device=model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return states, calls

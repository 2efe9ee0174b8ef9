"""Routed experts on GPUs: products with the codes of the experts that tokens are routed to."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from specinfer.model.quantized_experts import can_quantize_experts, first_of, matrix_of, opening_of
from specinfer.ops import QuantizedLinear, QuantizedWeight
from specinfer.ops.layer_ops import routed_product
from specinfer.ops.quantization import Bits, dequantize, quantize
from specinfer.ops.routes import Routes

Weight = QuantizedWeight | Tensor  # of an expert, [out, in]


class RoutedExperts(nn.Module):
    """A replacement for transformers' stacked experts; nothing is read back from the device.

    Args:
        first: The layers whose outputs, one after the other, `opens` takes; each has the outputs of all experts.
        down: The layer of their results, in the same way.
    """

    def __init__(
        self,
        first: Sequence[QuantizedLinear],
        down: QuantizedLinear,
        num_experts: int,
        opens: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__()
        self.linears = nn.ModuleList([*first, down])
        self.num_experts, self._opens = num_experts, opens

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return [tokens, width], the weighted sum of each token's experts, in the order that they are chosen in.

        Args: as for `QuantizedExperts`.
        """
        routes = Routes.of(top_k_index, self.num_experts, hidden_states.dtype)
        x, each = hidden_states.contiguous(), top_k_index.shape[1]
        *first, down = self.linears
        values = [_product(one, x, routes, each) for one in first]
        opened = self._opens(values[0] if len(values) == 1 else torch.cat(values, dim=-1)).contiguous()
        results = _product(down, opened, routes, 1).unflatten(0, (-1, each)).float()
        weighted: Tensor = results * top_k_weights.float().unsqueeze(2)
        return weighted.sum(1).to(hidden_states.dtype)


def _product(linear: Any, rows: Tensor, routes: Routes, each: int) -> Tensor:
    result: Tensor = routed_product(rows, linear.stored, routes, each, linear.bias)
    return result


def round_experts(model: nn.Module, inside: tuple[str, ...], bits: Bits, device: torch.device) -> None:
    """Replace the experts of a model by ones on a GPU whose matrices are rounded; see `quantize_experts`."""
    for name in [name for name, one in model.named_modules() if name.startswith(inside) and can_quantize_experts(one)]:
        experts: Any = model.get_submodule(name)
        place = experts.down_proj.device if experts.down_proj.is_meta else device
        matrices: Iterable[list[Weight]] = (
            [quantize(matrix_of(experts, one, i).to(place), bits) for one in (first_of(experts), "down_proj")]
            for i in range(experts.num_experts)
        )
        model.set_submodule(name, routed(experts, matrices).to(place))


def routed(experts: Any, matrices: Iterable[list[Weight]], *, merges: bool = False) -> nn.Module:
    """Return experts that compute with codes, or the definition's with numbers if experts are stored unlike each other.

    Args:
        matrices: Of each expert the first matrix, or gates and values, and the last one.
        merges: Whether groups with equal numbers become one, see `QuantizedWeight.merged`.
    """
    rows = list(matrices)
    joined = [_joined(one) for one in rows]
    rows = joined if len({len(one) for one in joined}) == 1 else rows
    columns = [list(one) for one in zip(*rows, strict=True)]
    dtype, name = experts.down_proj.dtype, first_of(experts)
    stacks = [one for one in map(_stacked, columns) if one is not None]
    if len(stacks) == len(columns):
        assert len(stacks) == 2 or not experts.has_bias
        names = (*[name] * (len(stacks) - 1), "down_proj")
        stacks = [one.merged() for one in stacks] if merges else stacks
        *first, down = (_linear(experts, one, stack) for one, stack in zip(names, stacks, strict=True))
        return RoutedExperts(first, down, experts.num_experts, opening_of(experts))
    *gates_and_values, downs = ([_numbers(one, dtype) for one in column] for column in columns)
    wholes = [torch.cat(parts) for parts in zip(*gates_and_values, strict=True)]
    for one, numbers in ((name, wholes), ("down_proj", downs)):
        stack = torch.stack([number.T if experts.is_transposed else number for number in numbers])
        setattr(experts, one, nn.Parameter(stack, requires_grad=False))
    module: nn.Module = experts
    return module


def _linear(experts: Any, name: str, weight: QuantizedWeight) -> QuantizedLinear:
    """Return the layer of a matrix of all experts."""
    bias = getattr(experts, f"{name}_bias").flatten() if experts.has_bias else None
    given = None if bias is None else nn.Parameter(bias, requires_grad=False)
    return QuantizedLinear(weight, given, experts.down_proj.dtype, native=False)


def _joined(matrices: list[Weight]) -> list[Weight]:
    """Return gates and values as one matrix if they are stored alike."""
    *first, down = matrices
    codes = [one for one in first if isinstance(one, QuantizedWeight)]
    if len(codes) == len(first) and len({one.format for one in codes}) == 1:
        return [QuantizedWeight.joined(codes), down]
    return matrices


def _stacked(matrices: Sequence[Weight]) -> QuantizedWeight | None:
    """Return the matrices of all experts, one after the other, or None if they are not stored alike."""
    codes = [one for one in matrices if isinstance(one, QuantizedWeight)]
    is_alike = len(codes) == len(matrices) and len({one.format for one in codes}) == 1
    return QuantizedWeight.joined(codes) if is_alike and codes[0].inputs is None else None


def _numbers(weight: Weight, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype) if isinstance(weight, Tensor) else dequantize(weight, dtype)

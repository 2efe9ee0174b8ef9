"""Routed experts that compute with codes, and the rounding of a definition's experts to them."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from specinfer.ops import Ending, LinearCall, QuantizedLinear, QuantizedWeight
from specinfer.ops.layer_ops import routed_product
from specinfer.ops.quantization import Bits, dequantize, quantize
from specinfer.ops.routes import Routes

_Linear = Callable[[Tensor], Tensor]
_Gated = Callable[[Tensor], Tensor]  # from inputs to the inputs of the output matrix
# Of an expert its gated values, the linear layers that compute these, that of its outputs, and the ending of the first
# call with which fused layers compute the same, or None.
Expert = tuple[_Gated, Sequence[_Linear], _Linear, Ending | None]


class QuantizedExperts(nn.Module):
    """A replacement for transformers' stacked experts, with a linear layer for each matrix; only routed ones are read.

    Attributes:
        calls: The native calls of all experts.
        pairs: The first and the last linear layer of each expert.
        ending: The ending of the first calls, of which each expert has one, or None. STORE: values have no gates.
    """

    def __init__(self, experts: Iterable[Expert]) -> None:
        super().__init__()
        parts = list(experts)
        self._gated, self._down = [gated for gated, _, _, _ in parts], [down for _, _, down, _ in parts]
        linears = [linear for _, linears, down, _ in parts for linear in (*linears, down)]
        self.calls = [linear for linear in linears if isinstance(linear, LinearCall)]
        self.linears = nn.ModuleList(linear for linear in linears if isinstance(linear, nn.Module))
        self.pairs: list[tuple[Any, Any]] = [(linears[0], down) for _, linears, down, _ in parts]
        endings = {ending for _, _, _, ending in parts}
        self.ending = endings.pop() if len(endings) == 1 else None

    @property
    def num_bytes(self) -> int:
        """Bytes stored in addition to parameters and buffers."""
        return sum(call.num_bytes for call in self.calls)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return [tokens, width], the weighted sum of each token's experts, in the order of the experts.

        Args:
            hidden_states: [tokens, width].
            top_k_index: [tokens, experts of each]; the number after the last expert's stands for none.
            top_k_weights: [tokens, experts of each].
        """
        x, weights = hidden_states.float(), top_k_weights.float().flatten()
        result = torch.zeros_like(x)
        order = top_k_index.flatten().argsort(stable=True)
        numbers, counts = top_k_index.flatten()[order].unique_consecutive(return_counts=True)
        for number, places in zip(numbers.tolist(), order.split(counts.tolist()), strict=True):
            if number == len(self._down):
                continue
            tokens = places // top_k_index.shape[1]
            added = self._down[number](self._gated[number](x[tokens]))
            result.index_add_(0, tokens, added * weights[places].unsqueeze(1))
        return result.to(hidden_states.dtype)


def can_quantize_experts(module: nn.Module) -> bool:
    """Return whether a module is one of transformers' experts in stacks, which say what lies between the matrices."""
    down = module._parameters.get("down_proj")
    is_known = all(hasattr(module, name) for name in ("num_experts", "is_transposed", "has_bias", "_apply_gate"))
    return down is not None and down.ndim == 3 and is_known and not getattr(module, "has_post_expert_norm", False)


def _names_of_stacks(model: nn.Module, inside: tuple[str, ...] = ("",)) -> list[str]:
    """Return the names of experts in stacks that begin with one of these."""
    modules = model.named_modules()
    return [name for name, module in modules if name.startswith(inside) and can_quantize_experts(module)]


def quantize_experts(model: nn.Module, inside: tuple[str, ...], bits: Bits) -> None:
    """Replace the experts of a model on a CPU by ones whose matrices are rounded.

    Args:
        inside: What the names of modules in decoder layers begin with.
    """
    # One after the other, so that the numbers of few are in memory with their codes.
    for name in _names_of_stacks(model, inside):
        model.set_submodule(name, QuantizedExperts(_parts(model.get_submodule(name), partial(_rounded, bits=bits))))


def split_experts(model: nn.Module) -> None:
    """Replace the experts of a model by ones with an `nn.Linear` for each matrix, `linears.{2 * expert}` the first."""
    for name in _names_of_stacks(model):
        model.set_submodule(name, QuantizedExperts(_parts(model.get_submodule(name), plain_linear)))


def _parts(experts: Any, make: Callable[[Tensor, Tensor | None], _Linear]) -> Iterator[Expert]:
    """Yield the parts of experts, whose linear layers are made of a matrix and its bias."""
    opens = opening_of(experts)
    for i in range(experts.num_experts):
        values, down = (
            make(matrix_of(experts, name, i), getattr(experts, f"{name}_bias")[i] if experts.has_bias else None)
            for name in (first_of(experts), "down_proj")
        )
        yield partial(opened, values, opens), [values], down, None


def first_of(experts: Any) -> str:
    """Return the name of the stack of the first matrices."""
    return "gate_up_proj" if getattr(experts, "has_gate", True) else "up_proj"


def opening_of(experts: Any) -> Callable[[Tensor], Tensor]:
    """Return the function from the results of the first matrix to the inputs of the last, which keeps no weights."""
    shell = copy.copy(experts)
    shell._parameters = {}  # gates are functions of values and of the module's settings
    opening: Callable[[Tensor], Tensor] = shell._apply_gate if getattr(experts, "has_gate", True) else shell.act_fn
    return opening


def plain_linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return a linear layer of tensors."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight, layer.bias = (  # type: ignore[assignment]
        x if x is None or isinstance(x, nn.Parameter) else nn.Parameter(x, requires_grad=False) for x in (weight, bias)
    )
    return layer


def _rounded(weight: Tensor, bias: Tensor | None, bits: Bits) -> _Linear:
    """Return the rounded layer of one matrix of a stack."""
    return LinearCall.from_weight(quantize(weight, bits), bias)


def matrix_of(experts: Any, name: str, expert: int) -> Tensor:
    """Return a contiguous matrix [out, in] of a stack."""
    matrix: Tensor = getattr(experts, name).detach()[expert]
    return (matrix.T if experts.is_transposed else matrix).contiguous()


def opened(values: _Linear, opens: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return an expert's values, opened by their gates or by its activation."""
    return opens(values(x)).contiguous()


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
        routes = Routes.from_experts(top_k_index, self.num_experts, hidden_states.dtype)
        x, each = hidden_states.contiguous(), top_k_index.shape[1]
        *first, down = self.linears
        values = [_product(linear, x, routes, each) for linear in first]
        opened = self._opens(values[0] if len(values) == 1 else torch.cat(values, dim=-1)).contiguous()
        results = _product(down, opened, routes, 1).unflatten(0, (-1, each)).float()
        weighted: Tensor = results * top_k_weights.float().unsqueeze(2)
        return weighted.sum(1).to(hidden_states.dtype)


def _product(linear: Any, rows: Tensor, routes: Routes, each: int) -> Tensor:
    result: Tensor = routed_product(rows, linear.stored, routes, each, linear.bias)
    return result


def round_experts(model: nn.Module, inside: tuple[str, ...], bits: Bits, device: torch.device) -> None:
    """Replace the experts of a model by ones on a GPU whose matrices are rounded; see `quantize_experts`."""
    for name in _names_of_stacks(model, inside):
        experts: Any = model.get_submodule(name)
        place = experts.down_proj.device if experts.down_proj.is_meta else device
        matrices: Iterable[list[Weight]] = (
            [quantize(matrix_of(experts, stack, i).to(place), bits) for stack in (first_of(experts), "down_proj")]
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
    joined = [_joined(row) for row in rows]
    rows = joined if len({len(row) for row in joined}) == 1 else rows
    columns = [list(column) for column in zip(*rows, strict=True)]
    dtype, name = experts.down_proj.dtype, first_of(experts)
    stacks = [stack for stack in map(_stacked, columns) if stack is not None]
    if len(stacks) == len(columns):
        assert len(stacks) == 2 or not experts.has_bias
        names = (*[name] * (len(stacks) - 1), "down_proj")
        stacks = [stack.merged() for stack in stacks] if merges else stacks
        *first, down = (_linear(experts, each, stack) for each, stack in zip(names, stacks, strict=True))
        return RoutedExperts(first, down, experts.num_experts, opening_of(experts))
    *gates_and_values, downs = ([_numbers(matrix, dtype) for matrix in column] for column in columns)
    wholes = [torch.cat(parts) for parts in zip(*gates_and_values, strict=True)]
    for each, numbers in ((name, wholes), ("down_proj", downs)):
        stack = torch.stack([number.T if experts.is_transposed else number for number in numbers])
        setattr(experts, each, nn.Parameter(stack, requires_grad=False))
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
    codes = [matrix for matrix in first if isinstance(matrix, QuantizedWeight)]
    if len(codes) == len(first) and len({matrix.format for matrix in codes}) == 1:
        return [QuantizedWeight.joined(codes), down]
    return matrices


def _stacked(matrices: Sequence[Weight]) -> QuantizedWeight | None:
    """Return the matrices of all experts, one after the other, or None if they are not stored alike."""
    codes = [matrix for matrix in matrices if isinstance(matrix, QuantizedWeight)]
    is_alike = len(codes) == len(matrices) and len({matrix.format for matrix in codes}) == 1
    return QuantizedWeight.joined(codes) if is_alike and codes[0].inputs is None else None


def _numbers(weight: Weight, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype) if isinstance(weight, Tensor) else dequantize(weight, dtype)

"""PyTorch's operations in passes of a fixed order: what rounds differently for other numbers of rows is replaced.

Each operation of a definition is one of these: it computes each number from the numbers at its place, or moves numbers;
it has one result whatever its order (largest numbers, sums of whole numbers); or it is a product with a weight, or a
sum over a row, which the kernels of `ops/triton` compute in one order. Any other is refused by its name.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from specinfer.core.errors import ModelError
from specinfer.ops import layer_ops
from specinfer.ops.fixed_order import fixed_order
from specinfer.ops.routes import Routes

# Names of operations: those that move numbers, that have one result in any order, and one for whole numbers.
_MOVES = frozenset(
    {
        "_reshape_alias", "_to_copy", "_unsafe_view", "alias", "arange", "as_strided", "cat", "chunk", "clone",
        "constant_pad_nd", "contiguous", "copy", "copy_", "detach", "detach_", "embedding", "empty", "empty_like",
        "empty_strided", "expand", "eye", "fill", "fill_", "flip", "full", "full_like", "gather", "index",
        "index_copy_", "index_put_", "index_select", "lift", "lift_fresh", "lift_fresh_copy", "masked_fill",
        "masked_fill_", "narrow", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros", "ones",
        "ones_like", "permute", "repeat", "reshape", "resolve_conj", "resolve_neg", "roll", "scalar_tensor",
        "scatter", "scatter_", "select", "slice", "slice_scatter", "split", "split_with_sizes", "squeeze", "stack",
        "t", "transpose", "tril", "triu", "unbind", "unfold", "unsqueeze", "view", "view_as_complex",
        "view_as_real", "where", "zero_", "zeros", "zeros_like",
    }
)  # fmt: skip
_ONE_RESULT = frozenset(
    {
        "_local_scalar_dense", "all", "amax", "amin", "any", "argmax", "argmin", "bucketize",
        "floor_divide", "histc", "item", "max", "min", "searchsorted",
    }
)  # fmt: skip
_WHOLE_NUMBERS = frozenset(
    {
        "bincount", "cumsum", "index_add", "index_add_", "prod", "scatter_add", "scatter_add_", "sum",
    }
)  # fmt: skip
_FEW = 64  # terms of a sum over another dimension than the last


class FixedOrder(TorchDispatchMode):
    """A mode in which operations of this thread add up the numbers of a row in one order.

    Args:
        model: Model whose parameters and buffers are weights.

    Raises:
        ModelError: An operation is reached that does not; the message names it.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        tensors = (*model.parameters(), *model.buffers())
        self._weights = {tensor.untyped_storage().data_ptr() for tensor in tensors if not tensor.is_meta}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        replacement = _REPLACED.get(name)
        if replacement is not None:
            result = replacement(self, *args, **kwargs)
            if result is not NotImplemented:
                return result
        with self:  # in inference mode, a composite operation arrives as a whole
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        adds = "reduce" in func._overloadname or kwargs.get("accumulate", name == "index_put_" and True in args[3:4])
        if not adds and (torch.Tag.pointwise in func.tags or name in _MOVES or name in _ONE_RESULT):
            return func(*args, **kwargs)
        if name in _WHOLE_NUMBERS and not _has_fractions((*args, *kwargs.values()), kwargs.get("dtype")):
            return func(*args, **kwargs)
        raise ModelError(
            f"PyTorch's {name}, which the model uses, may add up in another order for another number of rows"
        )

    def product(self, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return [..., outputs], the product with a weight [outputs, inputs].

        Raises:
            ModelError: It is no weight, but computed from rows.
        """
        if weight.untyped_storage().data_ptr() not in self._weights:
            raise ModelError("the model multiplies rows by each other, in sums that may depend on their number")
        flat = rows.reshape(-1, rows.shape[-1]).contiguous()
        result: Tensor = layer_ops.product(flat, weight.contiguous(), bias)
        return result.view(*rows.shape[:-1], len(weight))


_MODES: WeakKeyDictionary[nn.Module, FixedOrder] = WeakKeyDictionary()


def fix_order(model: nn.Module) -> None:
    """Let passes of a loaded model have a fixed order from here on."""
    _MODES[model] = FixedOrder(model)


def has_fixed_order(model: nn.Module) -> bool:
    return model in _MODES


@contextmanager
def in_order_of(model: nn.Module) -> Iterator[None]:
    """Compute in a fixed order within the context, if passes of the model have one."""
    if (mode := _MODES.get(model)) is None:
        yield
        return
    with fixed_order(), mode:
        yield


def _has_fractions(args: Sequence[Any], dtype: torch.dtype | None) -> bool:
    """Return whether fractions are added up; numbers are brought to `dtype` before."""
    if dtype is not None and not dtype.is_floating_point:
        return False
    return any(isinstance(each, Tensor) and each.is_floating_point() for each in args)


def _linear(mode: FixedOrder, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return mode.product(rows, weight, bias)


def _mm(mode: FixedOrder, rows: Tensor, matrix: Tensor) -> Any:
    return rows * matrix if rows.shape[1] == 1 else mode.product(rows, matrix.t())


def _addmm(mode: FixedOrder, bias: Tensor, rows: Tensor, matrix: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    if beta != 1 or alpha != 1 or bias.dim() != 1:
        return NotImplemented
    return mode.product(rows, matrix.t(), bias)


def _bmm(_: FixedOrder, left: Tensor, right: Tensor) -> Any:
    return left * right if left.shape[2] == 1 else NotImplemented  # of one term, such as an angle


def _grouped_mm(
    mode: FixedOrder,
    rows: Tensor,
    matrices: Tensor,
    offs: Tensor | None = None,
    bias: Any = None,
    out_dtype: Any = None,
) -> Any:
    if (
        offs is None
        or bias is not None
        or out_dtype not in (None, rows.dtype)
        or rows.dim() != 2
        or matrices.dim() != 3
    ):
        return NotImplemented
    count = len(matrices)
    numbers = torch.searchsorted(offs.long(), torch.arange(len(rows), device=rows.device), right=True)
    routes = Routes.from_experts(numbers.unsqueeze(1), count, rows.dtype)
    weights = matrices.transpose(1, 2).contiguous().flatten(0, 1)
    return layer_ops.routed_product(rows.contiguous(), weights, routes, 1)


def _sum(mode: FixedOrder, x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Sum up rows by their kernel, and a few terms of another dimension one after the other."""
    if not x.is_floating_point():
        return NotImplemented
    dims = [dim] if isinstance(dim, int) else list(dim or ())
    if len(dims) != 1 or not x.dim():
        return NotImplemented
    (only,) = (each % x.dim() for each in dims)
    kind = dtype or x.dtype
    if only == x.dim() - 1:
        flat = x.reshape(-1, x.shape[-1])
        total: Tensor = layer_ops.row_sum(flat).view(x.shape[:-1])
    elif x.shape[only] <= _FEW:
        first, *others = (part.to(torch.float32) for part in x.unbind(only))
        total = first
        for part in others:
            total = total + part
    else:
        return NotImplemented
    total = total.unsqueeze(only) if keepdim else total
    return total.to(kind)


def _mean(mode: FixedOrder, x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    total = _sum(mode, x, dim, keepdim, dtype=torch.float32)
    if total is NotImplemented:
        return total
    return (total / (x.numel() / max(total.numel(), 1))).to(dtype or x.dtype)


def _softmax(mode: FixedOrder, x: Tensor, dim: int, half_to_float: Any = None, dtype: Any = None) -> Any:
    kind = (
        dtype
        if isinstance(dtype, torch.dtype)
        else half_to_float
        if isinstance(half_to_float, torch.dtype)
        else x.dtype
    )
    if dim % x.dim() != x.dim() - 1:
        return NotImplemented
    x = x.float()
    weights = (x - x.amax(-1, keepdim=True)).exp()
    return (weights / _sum(mode, weights, -1, True)).to(torch.float32 if half_to_float is True else kind)


def _layer_norm(
    mode: FixedOrder, x: Tensor, shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Any:
    wide = x.float().reshape(-1, prod(shape))
    wide = wide - _mean(mode, wide, -1, True)
    wide = wide * (_mean(mode, wide * wide, -1, True) + eps).rsqrt()
    return _scaled(wide.view(x.shape), weight, bias).to(x.dtype)


def _rms_norm(mode: FixedOrder, x: Tensor, shape: Sequence[int], weight: Any = None, eps: Any = None) -> Any:
    wide = x.float().reshape(-1, prod(shape))
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    wide = wide * (_mean(mode, wide * wide, -1, True) + eps).rsqrt()
    return _scaled(wide.view(x.shape), weight, None).to(x.dtype)


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight.float()
    return x if bias is None else x + bias.float()


def _sort(_: FixedOrder, x: Tensor, dim: int = -1, descending: bool = False, **options: Any) -> Any:
    """Sort so that equal numbers keep their order: which of them comes first must not depend on other rows."""
    return torch.sort(x, stable=True, dim=dim, descending=descending)


def _argsort(mode: FixedOrder, x: Tensor, dim: int = -1, descending: bool = False, **options: Any) -> Any:
    return _sort(mode, x, dim, descending)[1]


def _topk(mode: FixedOrder, x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    values, places = _sort(mode, x, dim, largest)
    return values.narrow(dim, 0, k), places.narrow(dim, 0, k)


_REPLACED: dict[str, Callable[..., Any]] = {
    "linear": _linear, "mm": _mm, "addmm": _addmm, "bmm": _bmm, "_grouped_mm": _grouped_mm, "grouped_mm": _grouped_mm,
    "grouped_mm_fallback": _grouped_mm,
    "sum": _sum, "mean": _mean, "softmax": _softmax, "_softmax": _softmax, "layer_norm": _layer_norm,
    "rms_norm": _rms_norm, "sort": _sort, "argsort": _argsort, "topk": _topk,
}  # fmt: skip

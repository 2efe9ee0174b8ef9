"""Linear layers whose weights are packed for few rows, and for how many rows that pays on this machine."""

import time
from functools import cache
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional

from specinfer.kernels import library

_SIZE = 1024  # inputs and outputs of the layer that is measured; large enough that a call's own cost does not show
_NUM_LAYERS = 8  # so many of them in turn, as in a model: one alone would stay in the cache
_FEW, _MANY = (1, 4, 8, 16), (32, 64, 128, 256)  # rows that are tried
_ROUNDS = 3


class PackedLinear(nn.Module):
    """What `nn.Linear` computes, from packed weights.

    Up to `max_rows` rows the native kernel multiplies; for more the weights are unpacked for PyTorch's own.
    """

    packed: Tensor  # [panels, in, columns of a panel]

    def __init__(self, layer: nn.Linear, max_rows: int) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.max_rows = max_rows
        self.register_buffer("packed", library.pack(layer.weight.detach()), persistent=False)
        self.bias = layer.bias

    @property
    def weight(self) -> Tensor:
        """[out, in], made anew each time."""
        return library.unpack(self.packed, self.out_features)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        if not 0 < len(rows) <= self.max_rows:
            return functional.linear(x, self.weight, self.bias)
        result = library.linear(rows, self.packed, self.bias, self.out_features)
        return result.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, max_rows={self.max_rows}"


def pack_linears(model: nn.Module) -> int:
    """Replaces the linear layers that run faster packed; how many. Other types than fp32 and bf16 stay as they are."""
    count = 0
    if library.library() is None:
        return count
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if not isinstance(layer, nn.Linear) or type(layer) is not nn.Linear:
                continue  # kinds that inherit may do more than multiply
            fits = layer.weight.device.type == "cpu" and layer.weight.dtype in library.KINDS
            if fits and (max_rows := rows_that_pay(layer.weight.dtype)) > 0:
                setattr(module, name, PackedLinear(layer, max_rows))
                count += 1
    return count


@cache
def rows_that_pay(dtype: torch.dtype) -> int:
    """Up to how many rows the native kernel is faster here, as measured by turns; 0 if it is not at all."""
    source = torch.Generator().manual_seed(0)
    weights = [torch.randn((_SIZE, _SIZE), generator=source).to(dtype) for _ in range(_NUM_LAYERS)]
    packed = [library.pack(weight) for weight in weights]
    if not all(_is_faster(rows, weights, packed, unpacks=False) for rows in _FEW):
        return 0
    best = _FEW[-1]
    for rows in _MANY:
        if not _is_faster(rows, weights, packed, unpacks=True):
            return best
        best = rows
    return 2**62


def _is_faster(rows: int, weights: list[Tensor], packed: list[Tensor], *, unpacks: bool) -> bool:
    """Than PyTorch: as it would be without packing, or with the weights unpacked for it."""
    x = torch.ones((rows, _SIZE), dtype=packed[0].dtype)
    ratios = []
    for _ in range(_ROUNDS):
        times = [time.perf_counter()]
        for panels in packed:
            library.linear(x, panels, None, _SIZE)
        times.append(time.perf_counter())
        for weight, panels in zip(weights, packed, strict=True):
            functional.linear(x, library.unpack(panels, _SIZE) if unpacks else weight)
        times.append(time.perf_counter())
        ratios.append((times[2] - times[1]) / (times[1] - times[0]))
    return median(ratios) > 1.0

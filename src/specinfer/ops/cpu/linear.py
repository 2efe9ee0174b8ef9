"""Linear layers whose weights are packed for few rows, and the measurement of the fastest way to run them."""

import os
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from specinfer.ops.cpu.linear_call import ANY_ROWS, LinearCall
from specinfer.ops.cpu.panels import TYPES, Panels, has_dots

_SIZE = 1024  # inputs and outputs of measured layers, large enough to hide the cost of a call
_NUM_LAYERS = 8  # measured in turn, as in a model; a single one would stay in the nearest cache
_FEW, _MANY = (1, 4, 16), (64, 256)  # measured numbers of rows
_LARGE = 1024, 4096  # outputs and inputs of the layer measured with many rows, unpacked in more than one part
_ROUNDS = 4
_IN_ROW = 2  # runs of one way before the other's: in the first the other's threads may still spin on its cores
_LOOKS = 2  # measurements that must agree that PyTorch is faster with many rows
_CLEARLY = 0.8  # the default is kept unless the other way is clearly faster


class Choice(NamedTuple):
    """The fastest way to run layers of one number type on this machine."""

    max_rows: int  # for more rows PyTorch is used; 0: do not pack
    dots: bool  # see `LinearCall`


class PackedLinear(nn.Module):
    """A replacement for `nn.Linear` with packed weights."""

    def __init__(self, layer: nn.Linear, choice: Choice) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.bias = layer.bias
        self.call = LinearCall(Panels.from_weight(layer.weight.detach(), layer.bias), **choice._asdict())

    @property
    def weight(self) -> Tensor:
        """Weights as [out, in], unpacked at each access."""
        return self.call.panels.unpack()

    @property
    def num_bytes(self) -> int:
        return self.call.panels.num_bytes

    def rows(self, numbers: Tensor) -> Tensor:
        """Return [rows, in] float32, the weight's rows with the indices `numbers` [rows]."""
        return self.call.rows(numbers)

    def forward(self, x: Tensor) -> Tensor:
        result = self.call(x.reshape(-1, self.in_features).float().contiguous())
        return result.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, max_rows={self.call.max_rows}"


def pack_linears(model: nn.Module, *, to_come: bool = False) -> int:
    """Replace the linear layers that run faster packed, and return their number.

    Args:
        to_come: Whether to include layers on the meta device whose weights will be on the CPU.
    """
    count = 0
    # By name, because a list of modules would keep old weights in memory. Subclasses may do more, so they are skipped.
    for name in [name for name, module in model.named_modules() if type(module) is nn.Linear]:
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        if packs(layer.weight) or (to_come and layer.weight.is_meta and packs_type(layer.weight.dtype)):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, PackedLinear(layer, choose(layer.weight.dtype)))
            count += 1
    return count


def packs(weight: Tensor) -> bool:
    """Return whether a layer with this weight runs faster packed."""
    return weight.device.type == "cpu" and packs_type(weight.dtype)


def packs_type(dtype: torch.dtype) -> bool:
    """Return whether layers of this type run faster packed on a CPU."""
    return dtype in TYPES and choose(dtype).max_rows > 0


@cache
def choose(dtype: torch.dtype) -> Choice:
    """Return the fastest way on this machine, by measuring PyTorch and the native kernel with its instructions."""
    if os.environ.get("SPECINFER_NATIVE") == "always":
        return Choice(ANY_ROWS, has_dots(TYPES[dtype]))
    source = torch.Generator().manual_seed(0)
    weights = [torch.randn((_SIZE, _SIZE), generator=source).to(dtype) for _ in range(_NUM_LAYERS)]
    panels = [Panels.from_weight(weight) for weight in weights]
    calls = {dots: [LinearCall(panel, dots=dots) for panel in panels] for dots in {False, has_dots(TYPES[dtype])}}
    dots = len(calls) == 2 and is_faster(calls[True], calls[False], _FEW[-1:])
    plain = [lambda x, weight=weight: functional.linear(x.to(dtype), weight) for weight in weights]
    if not is_faster(calls[dots], plain, _FEW):
        return Choice(0, dots)
    large = Panels.from_weight(torch.ones(_LARGE, dtype=dtype))
    native, by_torch = (LinearCall(large, dots=dots, max_rows=most) for most in (ANY_ROWS, 0))
    best = _FEW[-1]
    for rows in _MANY:
        # Where PyTorch multiplies, a token's logits depend on the pass, so one slow moment must not decide.
        if not any(is_faster([native], [by_torch], (rows,), inputs=_LARGE[1]) for _ in range(_LOOKS)):
            return Choice(best, dots)
        best = rows
    return Choice(ANY_ROWS, dots)


def is_faster(
    one: Sequence[Callable[..., object]],
    other: Sequence[Callable[..., object]],
    each_rows: Sequence[int],
    *,
    inputs: int = _SIZE,
) -> bool:
    """Return whether the layers of `one` are faster than those of `other`, or not clearly slower.

    Passes with each of these numbers of rows count together: those with a single row read the same bytes either way,
    and a choice by them alone would change from start to start.
    """
    seconds = [0.0, 0.0]
    for rows in each_rows:
        x, best = torch.ones((rows, inputs)), [float("inf")] * 2  # minimum, because other load only adds time
        for _ in range(_ROUNDS):
            for place, layers in enumerate((one, other)):
                best[place] = min(best[place], *(_seconds(layers, x) for _ in range(_IN_ROW)))
        seconds = [total + added for total, added in zip(seconds, best, strict=True)]
    return seconds[1] / seconds[0] > _CLEARLY


def _seconds(layers: Sequence[Callable[..., object]], x: Tensor) -> float:
    start = time.perf_counter()
    for layer in layers:
        layer(x)
    return time.perf_counter() - start

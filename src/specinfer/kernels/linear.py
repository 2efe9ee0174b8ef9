"""Linear layers whose weights are packed for few rows, and how they run best on this machine."""

import os
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from specinfer.kernels.library import library
from specinfer.kernels.panels import ANY_ROWS, TYPES, LinearCall, Panels, has_dots

_SIZE = 1024  # inputs and outputs of the layers that are measured; large enough that a call's own cost does not show
_NUM_LAYERS = 8  # so many of them in turn, as in a model: one alone would stay in the nearest cache
_FEW, _MANY = (1, 4, 16), (64, 256)  # rows that are tried
_ROUNDS = 4
_CLEARLY = 0.8  # what computes every pass alike is left for what is clearly faster only


class Choice(NamedTuple):
    """How to run layers of one number type here."""

    max_rows: int  # more are PyTorch's; 0: do not pack
    dots: bool  # see `LinearCall`


class PackedLinear(nn.Module):
    """What `nn.Linear` computes, from packed weights."""

    def __init__(self, layer: nn.Linear, choice: Choice) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.bias = layer.bias
        self.call = LinearCall(Panels.of(layer.weight.detach(), layer.bias), **choice._asdict())

    @property
    def weight(self) -> Tensor:
        """[out, in], made anew each time."""
        return self.call.panels.unpack()

    @property
    def num_bytes(self) -> int:
        return self.call.panels.num_bytes

    def forward(self, x: Tensor) -> Tensor:
        result = self.call(x.reshape(-1, self.in_features).float().contiguous())
        return result.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, max_rows={self.call.max_rows}"


def pack_linears(model: nn.Module, *, to_come: bool = False) -> int:
    """Replaces the linear layers that run faster packed; how many.

    Args:
        to_come: Those, too, whose weights are on no device yet, but will be on the CPU.
    """
    count = 0
    # By name: a list of the modules would keep old weights beside the new ones. Kinds that inherit may do more.
    for name in [name for name, module in model.named_modules() if type(module) is nn.Linear]:
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        if packs(layer.weight) or (to_come and layer.weight.is_meta and packs_type(layer.weight.dtype)):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, PackedLinear(layer, choose(layer.weight.dtype)))
            count += 1
    return count


def packs(weight: Tensor) -> bool:
    """Whether a layer of that weight runs faster packed."""
    return weight.device.type == "cpu" and packs_type(weight.dtype)


def packs_type(dtype: torch.dtype) -> bool:
    """The same of all weights of a type, on a CPU."""
    return library() is not None and dtype in TYPES and choose(dtype).max_rows > 0


@cache
def choose(dtype: torch.dtype) -> Choice:
    """What is fastest here, as measured by turns: PyTorch or the native kernel, and which of its instructions."""
    if os.environ.get("SPECINFER_NATIVE") == "always":
        return Choice(ANY_ROWS, has_dots(TYPES[dtype]))
    source = torch.Generator().manual_seed(0)
    weights = [torch.randn((_SIZE, _SIZE), generator=source).to(dtype) for _ in range(_NUM_LAYERS)]
    panels = [Panels.of(weight) for weight in weights]
    calls = {dots: [LinearCall(one, dots=dots) for one in panels] for dots in {False, has_dots(TYPES[dtype])}}
    dots = len(calls) == 2 and _is_faster(calls[True], calls[False], _FEW[-1])
    plain = [lambda x, weight=weight: functional.linear(x.to(dtype), weight) for weight in weights]
    if not all(_is_faster(calls[dots], plain, rows) for rows in _FEW):
        return Choice(0, dots)
    unpacked = [lambda x, one=one: functional.linear(x.to(dtype), one.unpack()) for one in panels]
    best = _FEW[-1]
    for rows in _MANY:
        if not _is_faster(calls[dots], unpacked, rows):
            return Choice(best, dots)
        best = rows
    return Choice(ANY_ROWS, dots)


def _is_faster(one: Sequence[Callable[..., object]], other: Sequence[Callable[..., object]], rows: int) -> bool:
    """Whether the layers of `one` take less time than those of `other`, or so little more that it may be chance."""
    x = torch.ones((rows, _SIZE))
    best = [float("inf")] * 2  # other load only ever adds
    for _ in range(_ROUNDS):
        for place, layers in enumerate((one, other)):
            before = time.perf_counter()
            for layer in layers:
                layer(x)
            best[place] = min(best[place], time.perf_counter() - before)
    return best[1] / best[0] > _CLEARLY

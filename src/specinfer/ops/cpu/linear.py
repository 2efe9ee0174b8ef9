"""Linear layers whose weights are packed, and the measurement of the instructions that they are multiplied with."""

import os
import time
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn

from specinfer.ops.cpu.linear_call import LinearCall
from specinfer.ops.cpu.panels import TYPES, Panels, has_dots

_SIZE = 1024  # inputs and outputs of measured layers, large enough to hide the cost of a call
_NUM_LAYERS = 8  # measured in turn, as in a model; a single one would stay in the nearest cache
_NUM_ROWS = 16
_ROUNDS = 8
_CLEARLY = 0.8  # the instructions of a type are used unless those of float32 are clearly faster


class PackedLinear(nn.Module):
    """A replacement for `nn.Linear` with packed weights."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.bias = layer.bias
        panels = Panels.from_weight(layer.weight.detach(), layer.bias)
        self.call = LinearCall(panels, dots=uses_dots(layer.weight.dtype))

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
        return f"in_features={self.in_features}, out_features={self.out_features}"


def pack_linears(model: nn.Module, *, to_come: bool = False) -> int:
    """Replace the linear layers on a CPU by packed ones, and return their number.

    Args:
        to_come: Whether to include layers on the meta device whose weights will be on the CPU.
    """
    count = 0
    # By name, because a list of modules would keep old weights in memory. Subclasses may do more, so they are skipped.
    for name in [name for name, module in model.named_modules() if type(module) is nn.Linear]:
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        is_on_cpu = layer.weight.device.type == "cpu" or (to_come and layer.weight.is_meta)
        if is_on_cpu and packs_type(layer.weight.dtype):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, PackedLinear(layer))
            count += 1
    return count


def packs_type(dtype: torch.dtype) -> bool:
    """Return whether native code multiplies with numbers of this type."""
    return dtype in TYPES


@cache
def uses_dots(dtype: torch.dtype) -> bool:
    """Return whether weights are multiplied by the instructions of their own type, see `LinearCall`.

    Some processors have them, but compute faster in float32, so both are measured.
    """
    if not has_dots(TYPES[dtype]) or os.environ.get("SPECINFER_NATIVE") == "always":
        return has_dots(TYPES[dtype])
    source = torch.Generator().manual_seed(0)
    panels = [Panels.from_weight(torch.randn((_SIZE, _SIZE), generator=source).to(dtype)) for _ in range(_NUM_LAYERS)]
    ways = [[LinearCall(panel, dots=dots) for panel in panels] for dots in (True, False)]
    x = torch.ones((_NUM_ROWS, _SIZE))
    # In turns, and the least time of each, because other load only adds time.
    times = [[_seconds(layers, x) for layers in ways] for _ in range(_ROUNDS)]
    with_dots, without = map(min, zip(*times, strict=True))
    return bool(without / with_dots > _CLEARLY)


def _seconds(layers: Sequence[LinearCall], x: Tensor) -> float:
    start = time.perf_counter()
    for layer in layers:
        layer(x)
    return time.perf_counter() - start

"""Linear layers whose weights are packed for native code."""

import torch
from torch import Tensor, nn

from specinfer.ops.cpu.linear_call import LinearCall
from specinfer.ops.cpu.panels import TYPES


class PackedLinear(nn.Module):
    """A replacement for `nn.Linear` with packed weights."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.bias = layer.bias
        self.call = LinearCall.from_weight(layer.weight.detach(), layer.bias)

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

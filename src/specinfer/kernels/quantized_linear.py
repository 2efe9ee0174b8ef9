"""A linear layer whose weights are held in 8 or 4 bits."""

from typing import Self

import torch
from torch import Tensor, nn

from specinfer.kernels import quantization
from specinfer.kernels.library import library
from specinfer.kernels.panels import LinearCall, Panels
from specinfer.kernels.quantization import Bits, QuantizedWeight


class QuantizedLinear(nn.Module):
    """What `nn.Linear` computes, from quantized weights and activations; `multiply` does the work.

    Args:
        dtype: Of the weights before, and of what `weight` gives.
        native: Use the native kernel where there is one; also for weights on no device yet.
    """

    codes: Tensor | None  # [out, bytes of a row] uint8: a code, or of 4 bits two, the first in the lower half
    scales: Tensor | None  # [out, groups] bfloat16

    def __init__(
        self, weight: QuantizedWeight, bias: nn.Parameter | None, dtype: torch.dtype, *, native: bool = True
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = weight.in_features, weight.out_features
        self.bits, self.dtype, self.bias = weight.bits, dtype, bias
        self.call: LinearCall | None = None
        codes, scales = None, None
        if native and library() is not None and weight.codes.device.type in ("cpu", "meta"):
            self.call = LinearCall(Panels.of_codes(weight.codes, weight.scales, self.bits, self.in_features, bias))
        else:
            codes = weight.codes if self.bits == 8 else weight.codes[:, ::2] | weight.codes[:, 1::2] << 4
            scales = weight.scales
        self.register_buffer("codes", codes, persistent=False)
        self.register_buffer("scales", scales, persistent=False)

    @classmethod
    def of(cls, layer: nn.Linear, bits: Bits, *, native: bool = True) -> Self:
        """The quantized twin of a layer."""
        weight = quantization.quantize(layer.weight.detach(), bits)
        return cls(weight, layer.bias, layer.weight.dtype, native=native)

    @property
    def quantized(self) -> QuantizedWeight:
        """The weights, a byte for each code."""
        if self.call is not None:
            codes, scales = self.call.panels.unpack(), self.call.panels.unpack_scales()
        else:
            assert self.codes is not None
            assert self.scales is not None
            codes, scales = self.codes, self.scales
            if self.bits == 4:
                codes = torch.stack([codes & 15, codes >> 4], dim=2).flatten(1)
        return QuantizedWeight(codes, scales, self.bits, self.in_features)

    @property
    def weight(self) -> Tensor:
        """[out, in], made anew each time."""
        return quantization.dequantize(self.quantized, self.dtype)

    @property
    def num_bytes(self) -> int:
        """Of what is held beside parameters and buffers."""
        return 0 if self.call is None else self.call.panels.num_bytes

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)

    def multiply(self, rows: Tensor) -> Tensor:
        """[rows, out] of the type of `rows` [rows, in]; a row's result does not depend on the other rows."""
        if self.call is not None:
            return self.call(rows.float().contiguous()).to(rows.dtype)
        return quantization.linear(rows, self.quantized, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}"

"""A linear layer whose weights are held in 8 or 4 bits."""

from typing import Self

import torch
from torch import Tensor, nn

from specinfer.kernels import quantization
from specinfer.kernels.quantization import Bits, QuantizedWeight


class QuantizedLinear(nn.Module):
    """What `nn.Linear` computes, from quantized weights and activations; `multiply` does the work.

    Args:
        dtype: Of the weights before, and of what `weight` gives.
    """

    codes: Tensor  # [out, bytes of a row] uint8: a code, or of 4 bits two, the first in the lower half
    scales: Tensor  # [out, groups] bfloat16

    def __init__(self, weight: QuantizedWeight, bias: nn.Parameter | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.out_features = weight.in_features, weight.out_features
        self.bits, self.dtype = weight.bits, dtype
        codes = weight.codes if self.bits == 8 else weight.codes[:, ::2] | weight.codes[:, 1::2] << 4
        self.register_buffer("codes", codes, persistent=False)
        self.register_buffer("scales", weight.scales, persistent=False)
        self.bias = bias

    @classmethod
    def of(cls, layer: nn.Linear, bits: Bits) -> Self:
        """The quantized twin of a layer."""
        return cls(quantization.quantize(layer.weight.detach(), bits), layer.bias, layer.weight.dtype)

    @property
    def quantized(self) -> QuantizedWeight:
        """The weights, a byte for each code."""
        codes = self.codes
        if self.bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], dim=2).flatten(1)
        return QuantizedWeight(codes, self.scales, self.bits, self.in_features)

    @property
    def weight(self) -> Tensor:
        """[out, in], made anew each time."""
        return quantization.dequantize(self.quantized, self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)

    def multiply(self, rows: Tensor) -> Tensor:
        """[rows, out] of the type of `rows` [rows, in]; a row's result does not depend on the other rows."""
        return quantization.linear(rows, self.quantized, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}"

"""Linear layers whose weights are stored in 8 or 4 bits, as integers or floating point."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from specinfer.ops import float8, layer_ops, quantization
from specinfer.ops.cpu.linear_call import LinearCall
from specinfer.ops.quantization import Bits
from specinfer.ops.quantized_weight import QuantizedWeight

_TENSORS = ("codes", "scales", "added", "nest", "levels", "zeros")


class QuantizedLinear(nn.Module):
    """A replacement for `nn.Linear` with quantized weights.

    Args:
        dtype: Type of the original weights, and of `weight`.
        native: Whether to pack weights for the kernels of CPUs, if they are not on a GPU; weights on the meta device,
            too.
    """

    # As in `QuantizedWeight`, codes packed; None if they are packed for CPUs.
    codes: Tensor | None
    scales: Tensor | None
    added: Tensor | None
    nest: Tensor | None
    levels: Tensor | None
    zeros: Tensor | None

    def __init__(
        self, weight: QuantizedWeight, bias: nn.Parameter | None, dtype: torch.dtype, *, native: bool = True
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = weight.in_features, weight.out_features
        self.bits, self.dtype, self.bias = weight.bits, dtype, bias
        self.call: LinearCall | None = None
        self.group = weight.group
        if native and weight.codes.device.type in ("cpu", "meta"):
            self.call = LinearCall.from_weight(weight, bias)
        packed = None if self.call is not None else weight.packed()
        for name in _TENSORS:
            tensor = None if packed is None else getattr(packed, name)
            if name == "levels" and weight.is_float:  # a constant that kernels do not read
                self.levels = tensor
            else:
                self.register_buffer(name, tensor, persistent=False)
        self.inputs: Tensor | None
        self.register_buffer("inputs", weight.inputs, persistent=False)

    @classmethod
    def from_linear(cls, layer: nn.Linear, kind: Bits | Literal["fp8"], *, native: bool = True) -> Self:
        """Return the quantized version of a layer, by the bits of integers or in floating point."""
        numbers = layer.weight.detach()
        weight = float8.quantize(numbers) if kind == "fp8" else quantization.quantize(numbers, kind)
        return cls(weight, layer.bias, layer.weight.dtype, native=native)

    @classmethod
    def joined(cls, layers: Sequence["QuantizedLinear"]) -> Self:
        """Return one layer with the outputs of all layers, one after the other; they must not be packed for CPUs."""
        weight = QuantizedWeight.joined([layer.stored for layer in layers])
        return cls(weight, joined_bias(layers), layers[0].dtype, native=False)

    @property
    def quantized(self) -> QuantizedWeight:
        """Weights with one byte for each code."""
        return self.stored.unpacked() if self.call is None else self.call.panels.unpack_codes()

    @property
    def stored(self) -> QuantizedWeight:
        """Weights that are not packed for CPUs."""
        assert self.codes is not None
        assert self.scales is not None
        weight = QuantizedWeight(self.codes, self.scales, self.bits, self.in_features, self.group)
        return replace(weight, **{name: getattr(self, name) for name in _TENSORS})

    def part(self, outputs: Tensor) -> "QuantizedLinear":
        """Return a layer with the outputs of these indices, whose codes are the same."""
        bias = None if self.bias is None else nn.Parameter(self.bias.detach()[outputs], requires_grad=False)
        weight = replace(self.stored if self.call is None else self.quantized, inputs=self.inputs)
        return QuantizedLinear(weight.part(outputs), bias, self.dtype, native=self.call is not None)

    @property
    def weight(self) -> Tensor:
        """Weights as [out, in], computed at each access."""
        if self.call is not None:
            weight = self.call.rows(torch.arange(self.out_features)).to(self.dtype)
        else:
            weight = quantization.dequantize(self.quantized, self.dtype)
        return weight if self.inputs is None else weight[:, self.inputs.argsort()]

    @property
    def num_bytes(self) -> int:
        """Bytes stored in addition to parameters and buffers."""
        return 0 if self.call is None else self.call.num_bytes

    def rows(self, numbers: Tensor) -> Tensor:
        """Return [rows, in] float32, the weight's rows with the indices `numbers` [rows]."""
        if self.call is not None:
            rows = self.call.rows(numbers)
        else:
            rows = quantization.dequantize(self.stored.part(numbers))
        return rows if self.inputs is None else rows[:, self.inputs.argsort()]

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)

    def multiply(self, rows: Tensor) -> Tensor:
        """Return [rows, out] in the type of `rows` [rows, in]; on a CPU a row's result depends only on that row."""
        rows = rows if self.inputs is None else rows[:, self.inputs]
        if self.call is not None:
            return self.call(rows.float().contiguous()).to(rows.dtype)
        return layer_ops.quantized_product(rows.contiguous(), self.stored, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}"


class QuantizedEmbedding(nn.Module):
    """A replacement for `nn.Embedding` whose rows are those of a linear layer, which may be tied.

    Args:
        scale: Factor of all rows, as some families have it, or None.
    """

    def __init__(self, layer: QuantizedLinear, scale: Tensor | None) -> None:
        super().__init__()
        self.call, self.dtype, self.embed_scale = layer.call, layer.dtype, scale
        self.layer = layer if layer.call is None else None

    @property
    def num_bytes(self) -> int:
        """Bytes stored in addition to parameters and buffers."""
        return 0 if self.call is None else self.call.num_bytes

    def rows(self, token_ids: Tensor) -> Tensor:
        """Return [tokens, width] float32 rows of [tokens] tokens, without the scale."""
        if self.call is not None:
            return self.call.rows(token_ids)
        assert self.layer is not None
        return self.layer.rows(token_ids)

    def forward(self, token_ids: Tensor) -> Tensor:
        rows = self.rows(token_ids.flatten()).to(self.dtype)
        # By this function, because reference passes look for it.
        result = functional.embedding(torch.arange(len(rows), device=rows.device).view(token_ids.shape), rows)
        return result if self.embed_scale is None else result * self.embed_scale.to(self.dtype)


def joined_bias(layers: Sequence[Any]) -> nn.Parameter | None:
    """Return the biases of all layers, [outputs of all], one after the other; all must have one, or none."""
    biases = [layer.bias for layer in layers]
    if biases[0] is None:
        assert not any(bias is not None for bias in biases)
        return None
    return nn.Parameter(torch.cat([bias.detach() for bias in biases]), requires_grad=False)

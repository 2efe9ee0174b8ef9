"""Further layers without attention on token trees: LFM2's convolutions, lightning attention, and RG-LRU.

Sources: MiniMax-01 (MiniMax, arXiv 2501.08313): MiniMax; Griffin (De et al., arXiv 2402.19427): RecurrentGemma.
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from specinfer.core.errors import ModelError
from specinfer.model.batch import ForwardBatch
from specinfer.model.recurrent.mixer import EVENLY, Block, Blocks, Mixer, convolve, store_inputs
from specinfer.ops.cpu.recurrence import ConvolutionCall, HeadSizes, RecurrenceCall
from specinfer.ops.cpu.recurrent_layer import RecurrentParts

_DECAY = -8.0  # of a gate of an RG-LRU that is fully open, for each unit of the parameter


class ShortConv(Mixer):
    """A short causal convolution of LFM2 with gates before and after it."""

    can_fuse = True

    @property
    def blocks(self) -> Blocks:
        return {"in_proj": (Block(len(self.conv.weight)),) * 3, "conv": EVENLY, "out_proj": None}

    def forward(self, hidden_states: Tensor, forward_batch: ForwardBatch, **_: Any) -> Tensor:
        before, after, x = self.in_proj(hidden_states[0]).chunk(3, dim=-1)
        inputs = before * x
        store_inputs(forward_batch, self.layer_idx, inputs)
        mixed = convolve(forward_batch, self.layer_idx, self._call, forward_batch.paths(self.conv.kernel_size[0]))
        out: Tensor = self.out_proj(after * mixed.to(inputs.dtype))
        return out.unsqueeze(0)

    def parts(self) -> RecurrentParts:
        """Return the layer between its linear layers, for fused layers."""
        width = len(self.conv.weight)
        return RecurrentParts(self._call, None, inputs=2 * width, gates=width, factors=0, activates=False)

    @cached_property
    def _call(self) -> ConvolutionCall:
        return ConvolutionCall(self.conv.weight, self.conv.bias, activates=False)


class Lightning(Mixer):
    """Lightning attention: linear attention, whose state decays by a constant for each head.

    Queries, keys and values before activation are stored by slot. The recurrence is that of Mamba-2 with steps of 1.
    """

    counts = ("num_heads",)

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        if "SiLU" not in type(layer.act_fn).__name__:
            raise ModelError("model: layers with lightning attention need the hidden_act 'silu'")
        self.num_heads, self.head_dim = layer.num_attention_heads, layer.head_dim
        self.register_buffer("slope_rate", layer.slope_rate)

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (self.num_heads, self.head_dim, self.head_dim)

    @property
    def blocks(self) -> Blocks:
        return {**dict.fromkeys(("qkv_proj", "output_gate", "slope_rate", "norm"), EVENLY), "out_proj": None}

    def forward(self, hidden_states: Tensor, forward_batch: ForwardBatch, **_: Any) -> tuple[Tensor, None]:
        batch, hidden = forward_batch, hidden_states[0]
        # transformers has query, key and value of a head together.
        inputs = self.qkv_proj(hidden).unflatten(1, (self.num_heads, 3, -1)).transpose(1, 2).flatten(1)
        out = self.recur(batch, inputs, inputs.new_zeros(len(inputs), self.num_heads))
        normed = self.norm(out.flatten(1).to(inputs.dtype))
        mixed: Tensor = self.out_proj(self.output_gate(hidden).sigmoid() * normed)
        return mixed.unsqueeze(0), None

    @cached_property
    def calls(self) -> tuple[ConvolutionCall, RecurrenceCall]:
        width = self.num_heads * self.head_dim
        sizes = HeadSizes(
            self.num_heads, self.num_heads, self.head_dim, self.head_dim, 3 * width, query=0, key=width, value=2 * width
        )
        decay = -self.slope_rate.float().flatten()
        activation = ConvolutionCall(decay.new_ones(3 * width, 1, 1), None, activates=True)
        zeros = torch.zeros_like(decay)
        return activation, RecurrenceCall(sizes, zeros, decay, zeros, (1.0, 1.0))


class RgLru(Mixer):
    """A real-gated linear recurrent unit: both gates are computed from the results of the convolution.

    Args:
        layer_idx: Number of the layer, which the block does not have.
    """

    counts = ("width",)

    def __init__(self, layer: Any, layer_idx: int) -> None:
        super().__init__(layer, layer_idx)
        self.width = layer.lru_width

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (self.width,)

    @property
    def blocks(self) -> Blocks:
        gates = (f"rg_lru.{name}" for name, _ in self.rg_lru.named_parameters())
        return {**dict.fromkeys(("linear_x", "linear_y", "conv_1d", *gates), EVENLY), "linear_out": None}

    def forward(self, input_states: Tensor, forward_batch: ForwardBatch, **_: Any) -> tuple[Tensor, None]:
        batch, hidden = forward_batch, input_states[0]
        gate = self.act_fn(self.linear_y(hidden))
        store_inputs(batch, self.layer_idx, self.linear_x(hidden))
        out = self._recur(batch).to(hidden.dtype)
        mixed: Tensor = self.linear_out(out * gate)
        return mixed.unsqueeze(0), None

    @cached_property
    def calls(self) -> tuple[ConvolutionCall, RecurrenceCall]:
        # Keys and queries are 1, and steps the logarithms of what is kept.
        sizes = HeadSizes(1, 1, 1, self.width, 1 + self.width, query=0, key=0, value=1)
        decay = torch.ones(1, self.width, device=self.conv_1d.weight.device)
        recurrence = RecurrenceCall(sizes, None, decay, decays="column")
        return ConvolutionCall(self.conv_1d.weight, self.conv_1d.bias, activates=False), recurrence

    def _recur(self, batch: ForwardBatch) -> Tensor:
        """Return [tokens, width] results of the recurrence."""
        mixed = convolve(batch, self.layer_idx, self.calls[0])
        x, unit = mixed.to(batch.store.keys[self.layer_idx].dtype), self.rg_lru
        taken, kept = (
            self._gate(x, weight, bias)
            for weight, bias in (
                (unit.input_gate_weight, unit.input_gate_bias),
                (unit.recurrent_gate_weight, unit.recurrent_gate_bias),
            )
        )
        decay = _DECAY * kept * functional.softplus(unit.recurrent_param)
        is_first = batch.scan.paths(2)[:, :1] < 0  # of its request; the others are scaled by what they leave
        scale = (1 - (2 * decay).exp()).sqrt().masked_fill(is_first, 1.0)
        added = (x * taken * scale.to(x.dtype)).float()
        mixed = torch.cat([added.new_ones(len(added), 1), added], dim=-1)
        return self.recur_channels(batch, mixed, decay.float())

    def _gate(self, x: Tensor, weight: Any, bias: Any) -> Tensor:
        """Return [tokens, width] a gate, each block of channels from itself."""
        blocks = x.unflatten(1, (len(weight), -1)).transpose(0, 1)
        return torch.baddbmm(bias.unsqueeze(1), blocks, weight).transpose(0, 1).flatten(1).sigmoid()

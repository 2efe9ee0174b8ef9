"""Real-gated linear recurrent units (RecurrentGemma) on token trees: a short convolution, then a diagonal recurrence.

A token adds the inputs of its convolution only; both gates are computed from its results.

Source: Griffin (De et al., arXiv 2402.19427).
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from specinfer.model.batch import ForwardBatch
from specinfer.model.recurrent.definitions import adopt
from specinfer.model.recurrent.recurrence import convolve, recur_channels
from specinfer.model.recurrent.short_conv import store_inputs
from specinfer.model.recurrent.split import EVENLY, Blocks
from specinfer.ops.cpu.recurrence import ConvolutionCall, HeadSizes, RecurrenceCall

_DECAY = -8.0  # of a gate that is fully open, for each unit of the parameter


class RgLru(nn.Module):
    """A loaded recurrent block of RecurrentGemma, on token trees.

    Args:
        layer_idx: Number of the layer, which the block does not have.
    """

    counts = ("width",)

    linear_x: nn.Linear
    linear_y: nn.Linear
    linear_out: nn.Linear
    conv_1d: nn.Conv1d
    rg_lru: nn.Module
    act_fn: nn.Module

    def __init__(self, layer: Any, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.width = layer_idx, layer.lru_width
        adopt(self, layer)

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
    def _calls(self) -> tuple[ConvolutionCall, RecurrenceCall]:
        # Keys and queries are 1, and steps the logarithms of what is kept.
        sizes = HeadSizes(1, 1, 1, self.width, 1 + self.width, query=0, key=0, value=1)
        decay = torch.ones(1, self.width, device=self.conv_1d.weight.device)
        recurrence = RecurrenceCall(sizes, None, decay, decays="column")
        return ConvolutionCall(self.conv_1d.weight, self.conv_1d.bias, activates=False), recurrence

    def _recur(self, batch: ForwardBatch) -> Tensor:
        """Return [tokens, width] results of the recurrence."""
        (convolution, recurrence), stored = self._calls, batch.store.keys[self.layer_idx]
        mixed = convolve(batch, stored, batch.scan.paths(convolution.num_taps), convolution)
        x, unit = mixed.to(stored.dtype), self.rg_lru
        taken, kept = (
            self._gate(x, weight, bias)
            for weight, bias in (
                (unit.input_gate_weight, unit.input_gate_bias),
                (unit.recurrent_gate_weight, unit.recurrent_gate_bias),
            )
        )
        decay = _DECAY * kept * functional.softplus(unit.recurrent_param)  # type: ignore[arg-type]
        is_first = batch.scan.paths(2)[:, :1] < 0  # of its request; the others are scaled by what they leave
        scale = (1 - (2 * decay).exp()).sqrt().masked_fill(is_first, 1.0)
        added = (x * taken * scale.to(x.dtype)).float()
        mixed = torch.cat([added.new_ones(len(added), 1), added], dim=-1)
        return recur_channels(batch, self.layer_idx, recurrence, mixed, decay.float())

    def _gate(self, x: Tensor, weight: Any, bias: Any) -> Tensor:
        """Return [tokens, width] a gate, each block of channels from itself."""
        blocks = x.unflatten(1, (len(weight), -1)).transpose(0, 1)
        return torch.baddbmm(bias.unsqueeze(1), blocks, weight).transpose(0, 1).flatten(1).sigmoid()

"""Real-gated linear recurrent units (RecurrentGemma) on token trees: a short convolution, then a diagonal recurrence.

A token adds the inputs of its convolution only; both gates are computed from its results.

Source: Griffin (De et al., arXiv 2402.19427).
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from specinfer.kernels.recurrence import ConvolutionCall
from specinfer.model.batch import ForwardBatch
from specinfer.model.recurrent.definitions import adopt
from specinfer.model.recurrent.recurrence import recur
from specinfer.model.recurrent.short_conv import convolve, store_inputs

_DECAY = -8.0  # of a gate that is fully open, for each unit of the parameter


class RgLru(nn.Module):
    """A loaded recurrent block of RecurrentGemma, on token trees.

    Args:
        layer_idx: Number of the layer, which the block does not have.
    """

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

    def forward(self, input_states: Tensor, forward_batch: ForwardBatch, **_: Any) -> tuple[Tensor, None]:
        batch, hidden = forward_batch, input_states[0]
        gate = self.act_fn(self.linear_y(hidden))
        store_inputs(batch, self.layer_idx, self.linear_x(hidden))
        out = self._recur(batch)[batch.scan.new].to(hidden.dtype)
        mixed: Tensor = self.linear_out(out * gate)
        return mixed.unsqueeze(0), None

    @cached_property
    def _native(self) -> ConvolutionCall:
        return ConvolutionCall(self.conv_1d.weight, self.conv_1d.bias, activates=False)

    def _recur(self, batch: ForwardBatch) -> Tensor:
        """Return [scanned, width] results of the recurrence for all tokens of the scan."""
        stored, paths = batch.store.keys[self.layer_idx], batch.scan.paths(self.conv_1d.kernel_size[0])
        mixed = self._native(stored, paths) if batch.uses_native else convolve(self.conv_1d, stored, paths)
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
        added, kept = (x * taken * scale.to(x.dtype)).float(), decay.exp().float()

        def step(of: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
            states = states * kept[of] + added[of]
            return states, states

        result = torch.empty_like(added)
        recur(batch, self.layer_idx, self.state_shape, step, result)
        return result

    def _gate(self, x: Tensor, weight: Any, bias: Any) -> Tensor:
        """Return [tokens, width] a gate, each block of channels from itself."""
        blocks = x.unflatten(1, (len(weight), -1)).transpose(0, 1)
        return torch.baddbmm(bias.unsqueeze(1), blocks, weight).transpose(0, 1).flatten(1).sigmoid()

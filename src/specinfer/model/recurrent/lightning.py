"""Lightning attention (MiniMax) on token trees: linear attention, whose state decays by a constant for each head.

Queries, keys and values before activation are stored by slot. The recurrence is that of Mamba-2 with steps of 1.

Source: MiniMax-01 (MiniMax, arXiv 2501.08313).
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from specinfer.core.errors import ModelError
from specinfer.model.batch import ForwardBatch
from specinfer.model.recurrent.definitions import adopt
from specinfer.model.recurrent.recurrence import recur
from specinfer.model.recurrent.short_conv import store_inputs
from specinfer.model.recurrent.split import EVENLY, Blocks
from specinfer.ops.cpu.recurrence import ConvolutionCall, HeadSizes, RecurrenceCall


class Lightning(nn.Module):
    """A loaded layer of lightning attention, on token trees."""

    counts = ("num_heads",)

    qkv_proj: nn.Linear
    out_proj: nn.Linear
    output_gate: nn.Linear
    norm: nn.Module

    def __init__(self, layer: Any) -> None:
        super().__init__()
        if "SiLU" not in type(layer.act_fn).__name__:
            raise ModelError("model: layers with lightning attention need the hidden_act 'silu'")
        self.layer_idx: int = layer.layer_idx
        self.num_heads, self.head_dim = layer.num_attention_heads, layer.head_dim
        adopt(self, layer)
        self.slope_rate: Tensor
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
        store_inputs(batch, self.layer_idx, inputs, inputs.new_zeros(len(inputs), self.num_heads))
        out = recur(batch, self.layer_idx, *self._calls)
        normed = self.norm(out.flatten(1).to(inputs.dtype))
        mixed: Tensor = self.out_proj(self.output_gate(hidden).sigmoid() * normed)
        return mixed.unsqueeze(0), None

    @cached_property
    def _calls(self) -> tuple[ConvolutionCall, RecurrenceCall]:
        width = self.num_heads * self.head_dim
        sizes = HeadSizes(
            self.num_heads, self.num_heads, self.head_dim, self.head_dim, 3 * width, query=0, key=width, value=2 * width
        )
        decay = -self.slope_rate.float().flatten()
        activation = ConvolutionCall(decay.new_ones(3 * width, 1, 1), None, activates=True)
        zeros = torch.zeros_like(decay)
        return activation, RecurrenceCall(sizes, zeros, decay, zeros, (1.0, 1.0))
